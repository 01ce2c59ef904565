"""pipe.compare: a row for each method, the right recommendation, and nothing left of it."""

import copy
import json
import math
import random
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import CONV_SPLIT, MLP_SPLIT, convnet, mlp, rows
from torch import nn

import mpcomp
from mpcomp.core.account import Account
from mpcomp.core.sent import Sent
from mpcomp.pilot.comparison import Comparison, Trial


def images(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 3, 8, 8, generator=generator), torch.randint(5, (8,), generator=generator)


def pipe_and_optimizer():
    torch.manual_seed(0)
    pipe = mpcomp.pipeline(
        convnet(), 2, split=CONV_SPLIT, act_comp="ef21+topk:0.3",
        grad_comp=["ef+topk:0.3", "adaptive:cf=2-8:budget=0.4:window=2+topk:0.1"],
        loss_fn=F.cross_entropy,
    )  # fmt: skip
    return pipe, torch.optim.Adam(pipe.parameters(), 1e-2)


def train(pipe, optimizer, numbers):
    losses = []
    for number in numbers:
        losses.append(pipe.forward_backward(*images(number)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def left(pipe, optimizer):
    """All that a pilot may have touched, in tensors and plain values."""
    return {
        "weights": dict(pipe.state_dict()),
        "grads": [p.grad for p in pipe.parameters()],
        "optimizer": optimizer.state_dict(),
        "links": [link.endpoint.state_dict() for link in pipe.links],
        "meters": [t.to_state() for link in pipe.links for t in link.meter.phases.values()],
        "steps": [pipe.num_steps, pipe.step_skipped, pipe.wire_bytes, list(pipe.step_times)],
        "history": pipe.adaptive_history,
        "generators": [torch.get_rng_state(), random.getstate(), np.random.get_state()],  # noqa: NPY002
    }


def assert_same(a, b, where=""):
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    elif isinstance(a, np.ndarray):
        assert np.array_equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}.{i}")
    else:
        assert a == b, where


@pytest.mark.parametrize("trained", [False, True])
def test_nothing_is_left_of_a_pilot(trained):
    """Also where it trains with the user's own optimizer, on a loader that draws and augments."""
    pipe, optimizer = pipe_and_optimizer()
    train(pipe, optimizer, range(3))
    pipe.forward_backward(*images(3))  # gradients, half an accumulation
    x, y = images(4)
    own = torch.Generator().manual_seed(5)

    def augment(items):
        random.random()
        noise = torch.randn(3, 8, 8) * np.random.rand()  # noqa: NPY002
        pictures, classes = zip(*items, strict=True)
        return torch.stack(pictures) + noise, torch.stack(classes)

    loader = torch.utils.data.DataLoader(
        list(zip(x, y, strict=True)), 4, shuffle=True, generator=own, collate_fn=augment
    )
    before = copy.deepcopy(left(pipe, optimizer))
    drawn = own.get_state()
    identities = [id(p.grad) for p in pipe.parameters()]
    found = pipe.compare(
        ["quant:4", "ef21+topk:0.5"], data=loader, batches=2, seconds=1e3,
        optimizer=optimizer if trained else None, show=False,
    )  # fmt: skip
    assert_same(left(pipe, optimizer), before)
    assert torch.equal(own.get_state(), drawn)
    assert [id(p.grad) for p in pipe.parameters()] == identities
    assert len({trial.losses for trial in found.trials}) > 1, "nothing was compressed"
    if trained:
        assert found.trials[0].losses[1] != found.trials[1].losses[1]


def test_a_run_goes_on_as_without_a_pilot():
    pipe, optimizer = pipe_and_optimizer()
    train(pipe, optimizer, range(3))
    pipe.compare(["topk:0.1"], data=[images(9)], optimizer=optimizer, show=False)
    other, its = pipe_and_optimizer()
    train(other, its, range(3))
    assert_same(train(pipe, optimizer, range(3, 6)), train(other, its, range(3, 6)))
    assert_same(dict(pipe.state_dict()), dict(other.state_dict()))


def by_log(pipe, folder, run, every=1):
    seen = []
    pipe.log_to(lambda figures, step: seen.append({**figures, "step": step}), every=every)
    run()
    assert seen
    return [{k: v for k, v in entry.items() if k != "seconds"} for entry in seen]


def by_run_log(pipe, folder, run):
    log = mpcomp.RunLog(pipe, folder / "run")
    run(log.step)
    log.close()
    lines = map(json.loads, (folder / "run" / "steps.jsonl").read_text().splitlines())
    return [[line[name] for name in ("step", "loss", "wire_bytes", "skipped")] for line in lines]


def by_window(pipe, folder, run):
    window = pipe.step_window()
    run()
    found = window.gathered(4)
    links = [{**traffic.to_state(), "seconds": 0.0} for traffic in found.links]
    return [links, found.account.to_dict()]


def by_trace(pipe, folder, run):
    with pipe.trace(folder / "trace.json", steps=4):
        run()
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return [[e["name"], e["args"].get("step")] for e in events if e["ph"] == "X"]


def by_history(pipe, folder, run):
    run()
    return [pipe.adaptive_history, len(pipe.step_times), pipe.num_steps, pipe.account().to_dict()]


WATCHES = {
    "log": by_log,
    "log of two steps": lambda *given: by_log(*given, every=2),
    "run log": by_run_log,
    "window": by_window,
    "trace": by_trace,
    "history": by_history,
}


@pytest.mark.parametrize("watch", WATCHES)
def test_who_watches_a_run_sees_nothing_of_a_pilot(watch, tmp_path):
    """Neither its steps nor its bytes, in the middle of a run."""
    seen = []
    for name in ("with", "without"):
        pipe, optimizer = pipe_and_optimizer()

        def run(each=None, pipe=pipe, optimizer=optimizer, name=name):
            for number in range(4):
                if number == 2 and name == "with":
                    pipe.compare(["topk:0.1"], data=[images(9)], optimizer=optimizer, show=False)
                (loss,) = train(pipe, optimizer, [number])
                if each is not None:
                    each(loss)

        (tmp_path / name).mkdir()
        seen.append(WATCHES[watch](pipe, tmp_path / name, run))
    assert_same(*seen)


def test_the_time_of_a_pilot_is_part_of_no_step():
    pipe, _ = pipe_and_optimizer()
    window = pipe.step_window()
    pipe.forward_backward(*images(0))

    def slow():
        time.sleep(5)
        yield images(1)

    pipe.compare(["topk:0.1"], data=slow(), show=False)
    assert window.gathered(1).ranks[0]["seconds"] < 5


def test_a_pilot_that_fails_leaves_nothing_either():
    pipe, optimizer = pipe_and_optimizer()
    train(pipe, optimizer, range(2))
    before = copy.deepcopy(left(pipe, optimizer))
    with pytest.raises(ValueError, match="needs sample ids: let data yield"):
        pipe.compare(["aqsgd+quant:4"], data=[images(3)], optimizer=optimizer, show=False)
    with pytest.raises(TypeError, match="compare: the loader yielded a Tensor"):
        pipe.compare(["quant:4"], data=images(3), optimizer=optimizer, show=False)
    assert_same(left(pipe, optimizer), before)


def test_rows_are_what_the_methods_do(capsys):
    torch.manual_seed(0)
    pipe = mpcomp.pipeline(mlp(), 2, split=MLP_SPLIT, loss_fn=F.cross_entropy)
    data = [rows(8, i) for i in range(4)]
    found = pipe.compare(["quant:8", ("topk:0.2", "none")], data=data, seconds=1e3, mbps=5.0)
    none, bf16, quant, top = found.trials
    assert [trial.name for trial in found.trials] == ["none", "bf16", "quant:8", "topk:0.2 / none"]
    # By hand: the loss, and the gradients of all batches, of the plain model.
    for (x, y), loss in zip(data, none.losses, strict=True):
        assert loss == pytest.approx(float(F.cross_entropy(pipe.merge()(x), y).detach()), rel=1e-6)
    assert none.act_error == none.grad_error == none.gradient_error == 0
    assert 0 < bf16.act_error < quant.act_error < 0.05 < top.act_error
    assert top.grad_error == 0 < top.gradient_error
    assert quant.wire_bytes < bf16.wire_bytes < none.wire_bytes
    assert all(trial.step_s > trial.coding_s / 2 > 0 for trial in found.trials)
    out = capsys.readouterr().out
    assert "a step at 5 Mbit/s" in out and "topk:0.2 / none" in out
    figures = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    below = bf16.account.below_bf16
    assert below == pytest.approx(1, rel=0.1)  # and headers, of small messages
    fewer = bf16.wire_bytes / quant.wire_bytes
    assert figures["trials"][2]["below_bf16"] == pytest.approx(fewer * below)
    assert figures["trials"][2]["cuts_below_bf16"] == figures["trials"][2]["below_bf16"]
    assert figures["batches"] == 4


def test_errors_count_where_residuals_have_been_sent():
    """Error feedback's gradient of many batches is nearer to the true one than of one batch."""
    torch.manual_seed(0)
    pipe = mpcomp.pipeline(mlp(), 2, split=MLP_SPLIT, loss_fn=F.cross_entropy)
    pair = ("none", "ef+topk:0.2")
    one = pipe.compare([pair], data=[rows(8, 1)], show=False).trial(pair)
    many = pipe.compare([pair], data=[rows(8, 1)] * 12, seconds=1e3, show=False).trial(pair)
    assert 0 < many.gradient_error < one.gradient_error / 2


def test_the_methods_of_the_advice_are_the_default():
    pipe = mpcomp.pipeline(mlp(), 2, split=MLP_SPLIT, loss_fn=F.cross_entropy)
    found = pipe.compare(data=[rows(8, 1)], show=False)
    assert ("auto:relu", "auto:relu") in [trial.pair for trial in found.trials]


def test_ties_are_in_the_bytes_of_a_step():
    """Of a pipeline that has trained before: only the pilot's steps count."""
    lms = pytest.importorskip("lms")
    torch.manual_seed(0)
    pipe = mpcomp.pipeline(lms.gpt2(), 2, split=2, tie_comp="quant:8").train()
    batch = {"input_ids": torch.randint(3, lms.VOCABULARY, (4, 8))}
    batch["labels"] = batch["input_ids"]
    pipe.forward_backward(batch)
    found = pipe.compare(["topk:0.1"], data=[batch] * 2, seconds=1e3, show=False)
    numel = lms.VOCABULARY * 32
    # The head's gradient, and the embedding's rows: nothing follows a sequence's last token.
    num_rows = lms.VOCABULARY + len(batch["input_ids"][:, :-1].unique())
    for trial in found.trials:
        account = trial.account
        assert account.ties.num_elements == 2 * numel
        assert account.ties.wire_bytes == pytest.approx(num_rows * 32, rel=0.1)
        whole = 2 * (account.cuts.num_elements + 2 * numel)
        sent = account.cuts.wire_bytes + account.ties.wire_bytes
        assert account.below_bf16 == pytest.approx(whole / sent)
    row = found.to_dict()["trials"][2]
    assert row["largest"] == "ties" and row["below_bf16"] < row["cuts_below_bf16"]
    assert "cuts alone" in found.table()


def test_time_bounds_the_batches():
    pipe = mpcomp.pipeline(mlp(), 2, split=MLP_SPLIT, loss_fn=F.cross_entropy)
    found = pipe.compare(["quant:4"], data=[rows(8, 1)] * 5, seconds=1e-6, show=False)
    assert found.num_batches == 1
    assert {len(trial.losses) for trial in found.trials} == {1}


class Fragile(nn.Module):
    """Overflows if what arrives is not what was sent."""

    def forward(self, x):
        return torch.where((x == x.round()).all(), x, torch.inf)


def test_a_method_that_diverges_is_named_and_not_recommended():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Fragile(), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight.mul(40).round())
        model[0].bias.zero_()
    pipe = mpcomp.pipeline(model, 1, split=["1"], loss_fn=F.cross_entropy)
    data = [(torch.randint(9, (4, 4)).float(), torch.randint(3, (4,)))]
    with pytest.warns(UserWarning, match="diverged in batch 0"):
        found = pipe.compare(["quant:3"], data=data, show=False)
    failed = found.trials[-1]
    assert failed.failure == "diverged in batch 0" and not found.is_good(failed)
    assert math.isnan(found.loss_change(failed)[0]) and "diverged" in found.table()
    assert found.best is not failed


def trial(pair, losses, wire, error=0.0, act_error=0.0, step_s=None):
    account = Account(Sent(wire, 400.0, 100.0))
    return Trial((pair, pair), act_error, 0.0, tuple(losses), error, account, 0.0, step_s)


def test_the_recommendation_is_the_cheapest_good_one():
    none, bf16 = trial("none", [2.0, 4.0], 400.0), trial("bf16", [2.0, 4.0], 200.0)
    good = trial("good", [2.0, 4.02], 100.0)
    lossy = trial("lossy", [2.2, 4.2], 20.0)
    wrong = trial("wrong", [2.0, 4.0], 10.0, error=0.6)
    noise = trial("noise", [2.0, 4.0], 10.0, act_error=0.6)
    found = Comparison((none, bf16, good, lossy, wrong, noise), 2, False, 1.0, None, 0.0)
    assert found.best is good
    change, half = found.loss_change(good)
    assert change == pytest.approx(100 * 0.01 / 3)
    assert half == pytest.approx(1.95996 * 100 * 0.01 / 3, rel=1e-4)  # of changes 0 and 0.02
    assert "start with act_comp='good'" in found.summary()[0]
    little = trial("little", [2.0, 4.0], 195.0)
    found = Comparison((none, bf16, little), 2, False, 1.0, None, 0.0)
    assert found.best is bf16 and "do not compress" in found.summary()[0]


def test_with_a_rate_seconds_decide():
    none = trial("none", [1.0], 400.0, step_s=4.0)
    bf16 = trial("bf16", [1.0], 200.0, step_s=2.0)
    small = trial("small", [1.0], 10.0, step_s=3.0)  # its coding takes longer than it saves
    fast = trial("fast", [1.0], 50.0, step_s=1.0)
    found = Comparison((none, bf16, small, fast), 1, False, 1.0, 100.0, 0.0)
    assert found.best is fast
    assert "at 100 Mbit/s a step takes 1.00 s, with bf16 2.00 s" in found.summary()[0]


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"batches": 0}, ValueError, "batches=0: expected 1 or more"),
        ({"mbps": -1.0}, ValueError, "mbps=-1.0: expected a rate above 0"),
        ({"latency_ms": 5.0}, ValueError, "pass the rate of the links, too"),
        ({"latency_ms": -1.0}, ValueError, "expected a number from 0 up"),
        ({"seconds": 0}, ValueError, "seconds=0"),
        ({"optimizer": "adam"}, TypeError, "optimizer is a str"),
        ({"methods": "quant:4"}, TypeError, r"expected a list, as in \['quant:4'\]"),
        ({"methods": ["quant:x"]}, ValueError, "quant"),
        ({"data": []}, ValueError, "data yielded no batch"),
    ],
)
def test_mistakes_are_named(given, error, message):
    pipe = mpcomp.pipeline(mlp(), 2, split=MLP_SPLIT, loss_fn=F.cross_entropy)
    with pytest.raises(error, match=message):
        pipe.compare(**{"data": [rows(8, 1)], "show": False, **given})


def compared():
    torch.manual_seed(0)
    pipe = mpcomp.pipeline(mlp(), 2, split=["relu"], loss_fn=F.cross_entropy)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    before = {name: value.clone() for name, value in pipe.merge().state_dict().items()}
    data = [rows(8, i) for i in range(3)]
    methods = ["quant:4", "ef21+topk:0.3"]
    settings = {"data": data, "seconds": 1e3, "show": False}
    still = pipe.compare(methods, mbps=10.0, latency_ms=1.0, **settings)
    moved = pipe.compare(methods, optimizer=optimizer, **settings)
    after = pipe.merge().state_dict()
    same = all(torch.equal(before[name], after[name]) for name in before)
    rows_of = [
        [
            (*t.pair, t.losses, t.act_error, t.grad_error, t.gradient_error or 0.0, t.wire_bytes)
            for t in found.trials
        ]
        for found in (still, moved)
    ]
    return rows_of, same, [t.step_s for t in still.trials]


def test_many_processes_find_what_one_does(ranks):
    alone, same, _ = compared()
    assert same
    for found, same, steps in ranks(compared, 2):
        assert same and all(seconds > 0 for seconds in steps)
        for mine, theirs in zip(found, alone, strict=True):
            for ours, other in zip(mine, theirs, strict=True):
                assert ours[:3] == other[:3]
                assert ours[3:] == pytest.approx(other[3:], rel=1e-6)
