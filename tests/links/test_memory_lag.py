"""How far what is remembered of samples lags behind them, as the sender meters it."""

import json
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from models import MLP_SPLIT, mlp, rows
from ranks import preload
from torch import nn

import mpcomp
from mpcomp import Link, TensorMeta
from mpcomp.core.context import Step
from mpcomp.core.traffic import LAGS, Traffic
from mpcomp.links.build import method_of
from mpcomp.links.endpoints.memory import MemoryPlan
from mpcomp.view.run import Run

preload("test_memory_lag")

SHAPE = (4, 5, 24)
#: Methods, directions, and what else a message may be like.
CASES = {
    "raw at first": ("aqsgd+quant:4", "act", {}),
    "a step": ("aqsgd:first=step/0.4+step:0.4:dead_zone=0.7", "act", {}),
    "a selection": ("aqsgd+topk:0.1", "act", {}),
    "a gradient": ("aqsgd:first=step/1+step:1:scale=tensor", "grad", {}),
    "a loss scale": ("aqsgd+quant:4", "grad", {"loss_scale": 1024.0}),
    "half precision": ("aqsgd+quant:4", "act", {"dtype": torch.bfloat16}),
    "padding": ("aqsgd+quant:4", "act", {"padded": True}),
    "some for the first time": ("aqsgd:first=step/0.4+step:0.4", "act", {"new": 2}),
    "a dead zone of a step": ("aqsgd+step:1:dead_zone=1", "act", {}),
}


def visit(link, index, x, ids, *, loss_scale=1.0, padded=False):
    """Sends a microbatch as one step does; gives the estimates of its samples before and after."""
    valid = torch.ones(SHAPE[:2], dtype=torch.bool)
    if padded:
        valid[1:, 3:] = False
    step = Step(
        index,
        True,
        sample_ids=(tuple((i,) for i in ids),),
        loss_scale=loss_scale,
        valid=(valid,),
    )
    meta = TensorMeta.of(x)
    message = link.encode(x, step, 0)
    link.compare_sent(x, message, step, 0)
    link.decode(message, meta, step, 0)
    end = link.endpoint.ends["sender"]
    held = [end.estimates([(i,) for i in ids]).clone()]
    link.commit()
    return *held, end.estimates([(i,) for i in ids]), valid


def drawn(seed):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("case", CASES)
def test_figures_are_those_of_what_is_remembered(case):
    spec, direction, also = CASES[case]
    new, dtype = also.get("new", 0), also.get("dtype", torch.float32)
    scale = also.get("loss_scale", 1.0)
    choices = {"loss_scale": scale, "padded": also.get("padded", False)}
    link = Link(method_of(f"{direction}_comp", spec), boundary=0, direction=direction)
    visit(link, 0, (scale * drawn(0)).to(dtype), range(4), **choices)
    assert all(getattr(link.meter.train, name) is None for name in LAGS)
    x = (drawn(0) + 0.3 * drawn(1)).to(dtype)
    ids = [*range(new, 4), *range(10, 10 + new)]
    before, after, valid = visit(link, 1, scale * x, ids, **choices)
    again = valid.clone()
    again[4 - new :] = False
    counts = again[:, :, None].expand(SHAPE)
    is_, was, now = (each.float().reshape(SHAPE)[counts] for each in (x, before, after))
    traffic = link.meter.train
    close = {"rel": 1e-5, "abs": 1e-7}
    assert traffic.drift == pytest.approx(float((is_ - was).norm() / is_.norm()), **close)
    assert traffic.lag == pytest.approx(float((is_ - now).norm() / is_.norm()), **close)
    assert traffic.stayed == pytest.approx(float((was == now).float().mean()))
    assert traffic.lag < traffic.drift or case == "a dead zone of a step"


def test_a_memory_that_stands_still():
    link = Link(method_of("act_comp", "aqsgd+step:100:dead_zone=1"), boundary=0, direction="act")
    visit(link, 0, drawn(0), range(4))
    visit(link, 1, 1.1 * drawn(0), range(4))
    traffic = link.meter.train
    assert traffic.stayed == 1 and traffic.lag == traffic.drift == pytest.approx(0.1 / 1.1)


@pytest.mark.parametrize("spec", ["none", "bf16", "quant:4", "ef+topk:0.1", "ef21+topk:0.1"])
def test_where_samples_are_not_remembered_there_is_no_lag(spec):
    link = Link(method_of("act_comp", spec), boundary=0, direction="act")
    for index in range(3):
        step = Step(index, True)
        message = link.encode(drawn(index), step, 0)
        link.compare_sent(drawn(index), message, step, 0)
        link.decode(message, TensorMeta(SHAPE), step, 0)
        link.commit()
    assert all(link.meter.train.to_dict()[name] is None for name in LAGS)


def test_it_is_measured_of_what_is_metered_alone(monkeypatch):
    """Also where gradients ask what has arrived, of every microbatch."""
    measured = []
    one_lag = MemoryPlan._lags_of

    def noted(plan, *rows_and_tensors):
        measured.append((plan.context.step, plan.context.microbatch))
        return one_lag(plan, *rows_and_tensors)

    monkeypatch.setattr(MemoryPlan, "_lags_of", noted)
    pipe = mpcomp.pipeline(
        mlp(),
        4,
        split=MLP_SPLIT[:1],
        act_comp="aqsgd+quant:4",
        grad_comp="same:where=nonzero",
        loss_fn=F.cross_entropy,
    )
    for _ in range(3):
        pipe.forward_backward(*rows(8, 0), sample_ids=range(8))
    assert measured == [(1, 1), (2, 2)]


def train(folder=None, steps=4):
    """Visits of the same ten samples; the report, and what a log wrote."""
    torch.manual_seed(0)
    pipe = mpcomp.pipeline(
        mlp(),
        2,
        split=MLP_SPLIT[:1],
        act_comp="aqsgd:first=step/0.4+step:0.4",
        grad_comp="aqsgd+quant:4",
        loss_fn=F.cross_entropy,
    )
    seen = []
    pipe.log_to((lambda said, step: seen.append(said)) if pipe.rank == 0 else None)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    log = None if folder is None else mpcomp.RunLog(pipe, folder, total_steps=steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = pipe.forward_backward(*rows(10, 0), sample_ids=range(10))
        optimizer.step()
        if log is not None:
            log.step(loss)
            log.flush()
    return pipe.report(show=False), seen


def lags_of(report):
    return {entry["direction"]: [entry["train"][name] for name in LAGS]
            for entry in report["boundaries"]}  # fmt: skip


def test_reports_and_logs_say_it(tmp_path, capsys):
    report, seen = train(str(tmp_path))
    mpcomp.monitor.report.print_report(report)
    table = capsys.readouterr().out
    run = Run.read(tmp_path)
    windows = [window for _, window in run.windows]
    assert windows[0]["links"]["lag"] == [None, None]  # first visits
    assert "cut 0 act/lag" not in seen[0]
    for i, direction in enumerate(("act", "grad")):
        drift, lag, stayed = lags_of(report)[direction]
        assert 0 < lag < drift < 1 and 0 <= stayed < 1
        assert f"{lag:.4f}" in table
        later = [window["links"]["lag"][i] for window in windows[1:]]
        assert min(later) <= lag <= max(later)
        assert later == pytest.approx(
            [said[f"cut 0 {direction}/lag"] for said in seen[1:]], abs=1e-6
        )
        assert run.link_figures(windows)[i]["lag"] == pytest.approx(sum(later) / 3)


def test_two_ranks_say_what_one_process_does(ranks):
    one, _ = train()
    for report, _ in ranks(train, 2):
        for direction, expected in lags_of(one).items():
            assert lags_of(report)[direction] == pytest.approx(expected, rel=1e-6)


STEP = "aqsgd:first=step/0.4+step:0.4"


@pytest.mark.parametrize(
    "act, grad, said",
    [
        (f"{STEP}:dead_zone=0.7", "none", ["boundary 0 act"]),
        (f"{STEP}:dead_zone=1", "none", ["boundary 0 act"]),
        ("none", f"{STEP}:dead_zone=1", ["boundary 0 grad"]),
        (STEP, STEP, []),
        (STEP.replace("+step:0.4", "+step:0.2"), "none", []),
        (STEP.replace("step/0.4", "step/0.8/dead_zone=0.7"), "none", []),
        ("aqsgd+quant:4", "aqsgd+quant:8", []),  # raw at first
        ("quant:4", "ef+topk:0.1", []),  # no memory of samples
    ],
)
def test_a_memory_that_lags_more_than_first_messages_is_spoken_of_once(act, grad, said):
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(13, 256), nn.Tanh(), nn.Linear(256, 5))
    pipe = mpcomp.pipeline(
        wide, 1, split=[2, 1], act_comp=act, grad_comp=grad, loss_fn=F.cross_entropy
    )
    optimizer = torch.optim.SGD(pipe.parameters(), 0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(64):
            ids = [10 * (step % 4) + i for i in range(10)]
            optimizer.zero_grad()
            pipe.forward_backward(*rows(10, step % 4), sample_ids=ids)
            optimizer.step()
    found = [str(each.message) for each in caught if "what is remembered lags" in str(each.message)]
    assert [message.partition(":")[0] for message in found] == said, found
    assert all("dead_zone=0.5" in message for message in found)


def test_figures_go_through_a_checkpoint_and_a_window():
    traffic = Traffic()
    traffic.count(10, 40, 10)
    first = torch.tensor([4.0, 2.0, 1.0, 5.0, 10.0], dtype=torch.float64)
    traffic.follow(first)
    state = json.loads(json.dumps(traffic.to_state()))
    again = Traffic()
    again.load_state(state)
    assert again.to_dict() == traffic.to_dict()
    assert traffic.lag == 0.5 and traffic.stayed == 0.5 and traffic.drift == math.sqrt(0.5)
    before = Traffic.merged([state])
    traffic.count(10, 40, 10)
    traffic.follow(4 * first)
    traffic.follow(torch.full((5,), torch.nan, dtype=torch.float64))
    assert traffic.since(before).lag == 0.5
    assert Traffic.merged([state, state]).stayed == 0.5
    assert "lags" not in Traffic().to_state()  # as checkpoints of before have none
