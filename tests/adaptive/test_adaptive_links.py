"""Links that follow GraVAC's rule: what is measured, what is sent, and what leaves no trace."""

import operator

import pytest
import torch
import torch.nn.functional as F
from models import CONV_SPLIT, MLP_SPLIT, assert_same_training, convnet, images, mlp, rows

import mpcomp
from mpcomp import EF21, Adaptive, ErrorFeedback, Quantize, RandomK, TensorMeta, TopK
from mpcomp.adaptive.gain import base_energy, gain_of, rest_energy
from mpcomp.adaptive.search import Search
from mpcomp.core.context import MessageContext, Step
from mpcomp.core.randomness import generator_for
from mpcomp.core.wire import Header
from mpcomp.feedback.memory import Side
from mpcomp.links.endpoints.memory import MemoryPlan, end_of
from mpcomp.links.link import ACT, Link

pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")
MODELLED = {"bandwidth_mbps": 1.0, "latency_ms": 0.1, "compute_ms": 1.0}


def adaptive(inner=None, **settings):
    settings = {"cf": (2.0, 20.0), "eps": 0.5, "window": 3, **MODELLED, **settings}
    return Adaptive(inner or TopK(0.1), **settings)


def pipe_of(act=None, grad=None, model=mlp, split=MLP_SPLIT, seed=0, **kwargs):
    torch.manual_seed(seed)
    options = {"loss_fn": F.cross_entropy, "engine": "local", **kwargs}
    return mpcomp.pipeline(model(), 2, split=split, act_comp=act, grad_comp=grad, **options)


def run(pipe, first, last, batch=rows, count=8):
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05)
    losses = []
    for step in range(first, last):
        x, y = batch(count, step)
        losses.append(pipe.forward_backward(x, y))
        if pipe.scaler is None:
            optimizer.step()
        else:
            pipe.scaler.step(optimizer)
            pipe.scaler.update()
        optimizer.zero_grad()
    return torch.stack(losses)


def sent_of(pipe, link, names=("cf", "branch")):
    return [tuple(entry["links"][link][n] for n in names) for entry in pipe.adaptive_history]


# -- gains ----------------------------------------------------------------------------------------


def draw(part):
    return generator_for(0, part)


def test_energies():
    x = torch.tensor([[3.0, 4.0, 1.0, 0.0]])
    base = base_energy(x, None, centred=False)
    rest = rest_energy(TopK(0.5), x.repeat(1, 16), None, draw)
    assert base == 26 and base.dtype == torch.float64
    assert rest == 16 * 1.0
    assert gain_of(26.0, [1.0, 0.0]) == [1 - 1 / 26, 1.0]
    assert gain_of(26.0, [30.0]) == [0.0]
    assert gain_of(0.0, [0.0]) is None and gain_of(float("nan"), [0.0]) is None


def test_centred_energies_take_a_channels_mean_away():
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(4, 6, 5, generator=generator, dtype=torch.float64)
    offset = torch.tensor([100.0, 0, 0, 0, 0], dtype=torch.float64)
    wanted = (noise - noise.mean(dim=(0, 1))).square().sum()
    assert base_energy(noise + offset, None, centred=True).item() == pytest.approx(wanted.item())
    image = torch.randn(4, 5, 3, 3, generator=generator, dtype=torch.float64)
    wanted = (image - image.mean(dim=(0, 2, 3), keepdim=True)).square().sum()
    shifted = image + offset[None, :, None, None]
    assert base_energy(shifted, None, centred=True).item() == pytest.approx(wanted.item())
    flat = noise[:, 0]
    wanted = (flat - flat.mean(dim=0)).square().sum()
    assert base_energy(flat + offset, None, centred=True).item() == pytest.approx(wanted.item())


def test_padded_positions_have_no_part_in_a_mean():
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    padded = torch.tensor([[False, False, True], [False, True, True]])[:, :, None]
    counted = x[~padded[:, :, 0]]
    wanted = (counted - counted.mean(dim=0)).square().sum()
    found = base_energy(x.masked_fill(padded, 0), padded, centred=True)
    assert found.item() == pytest.approx(wanted.item())


def test_what_feedback_compresses_is_measured():
    """EF: with the residual in it. EF21: the difference; all of a row without an estimate."""
    x, meta = torch.randn(3, 40), TensorMeta((3, 40))
    at = MessageContext(0, 0, draw)
    for method in (ErrorFeedback(TopK(0.1)), EF21(TopK(0.1))):
        end = end_of(method, Side.SENDER, meta, torch.device("cpu"))

        def plan(method=method, end=end):
            return MemoryPlan(method, end, meta, at, torch.device("cpu"))

        wanted, against = plan().measured(x)
        assert torch.equal(wanted, x) and torch.equal(against, x)
        plan().encode(x)
        end.commit()
        wanted, against = plan().measured(2 * x)
        if isinstance(method, ErrorFeedback):
            sent = TopK(0.1).decompress(TopK(0.1).compress(x), meta)
            assert torch.equal(wanted, 2 * x + (x - sent)) and torch.equal(against, wanted)
        else:
            assert torch.equal(wanted, 2 * x - x) and torch.equal(against, 2 * x)


# -- the rule over links --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        adaptive(),
        adaptive(RandomK(0.1), eps=0.2),
        adaptive(Quantize(4), cf=(4.0, 32.0)),
        adaptive(ErrorFeedback(TopK(0.1))),
        adaptive(EF21(TopK(0.1))),
        adaptive(gain="centred"),
    ],
    ids=str,
)
def test_the_first_step_is_dense_and_then_links_compress_each_its_own_way(method):
    pipe = pipe_of(method, method, convnet, CONV_SPLIT)
    losses = run(pipe, 0, 14, images)
    assert losses.isfinite().all()
    for link in ("0.act", "0.grad", "1.act", "1.grad"):
        sent = sent_of(pipe, link)
        assert sent[0] == (1.0, "dense")
        assert len({cf for cf, _ in sent}) > 1
    assert 0 < pipe.wire_bytes < pipe.dense_bytes
    for link in pipe.links:  # the log says what was metered
        name = f"{link.boundary}.{link.direction}"
        cfs = [cf for cf, _ in sent_of(pipe, name)]
        sizes = [cf for cf in cfs if cf > 1]
        assert sizes and link.meter.train.relative_error > 0
        assert link.endpoint.policy.changes >= 1


def test_decisions_are_those_of_the_search_told_gains_and_modelled_seconds(monkeypatch):
    """Worked out again from the tensors that went into the link."""
    method = adaptive(policy="geometric", gain="energy")
    seen = []
    encode = Link.encode

    def spy(link, x, step, microbatch):
        message = encode(link, x, step, microbatch)
        if link.boundary == 0 and link.direction == ACT:
            seen.append((step.index, microbatch, x.detach().clone(), message.numel()))
        return message

    monkeypatch.setattr(Link, "encode", spy)
    pipe = pipe_of(method, None)
    run(pipe, 0, 14)
    search = Search((2.0, 20.0), eps=0.5, window=3, policy="geometric", smoothing=0.1)
    for entry in pipe.adaptive_history:
        said, step, branch = entry["links"]["0.act"], entry["step"], search.branch()
        assert said["branch"] == branch and said["cf"] == search.cf_of(branch)
        of_step = [note for note in seen if note[0] == step]
        assert [microbatch for _, microbatch, _, _ in of_step] == [0, 1]
        x = of_step[step % 2][2].double()
        gains = [kept(x, cf) for cf in (search.cf_min, search.cf_candidate)]
        search.average(*gains)
        seconds = 0.001 + 2 * 0.0001 + sum(note[3] for note in of_step) * 8 / 1e6
        search.record(branch, seconds)
        assert said["gain_min"] == pytest.approx(search.gain_min)
        assert said["gain_candidate"] == pytest.approx(search.gain_candidate)
        search.end_step()
    found = pipe.boundaries[0].act.endpoint.policy.search
    assert [d["actions"] for d in found.history] == [d["actions"] for d in search.history]
    assert found.throughputs == pytest.approx(search.throughputs)
    assert len({said["links"]["0.act"]["cf"] for said in pipe.adaptive_history}) > 2


def kept(x, cf):
    """Top-k's gain: the energy of the largest elements of each sample."""
    count = -int(-x.shape[1] / cf // 1)
    largest = x.abs().topk(count, dim=1).values
    return float(largest.square().sum() / x.square().sum())


def test_high_demands_stay_dense():
    pipe = pipe_of(adaptive(RandomK(0.1), eps=0.99), None)
    plain = pipe_of(None, None)
    assert torch.equal(run(pipe, 0, 8), run(plain, 0, 8))
    assert {branch for _, branch in sent_of(pipe, "0.act")} == {"dense"}
    assert_same_training(pipe, plain)
    assert pipe.wire_bytes == plain.wire_bytes


def test_dense_steps_of_feedback_leave_what_a_warm_up_leaves():
    """Estimates are set to what went over, residuals to zero."""
    for inner in (EF21(TopK(0.1)), ErrorFeedback(TopK(0.1))):
        pipe = pipe_of(adaptive(inner), adaptive(inner))
        run(pipe, 0, 1)
        warm = pipe_of(inner, inner, warmup_steps=1)
        run(warm, 0, 1)
        for link, other in zip(pipe.links, warm.links, strict=True):
            mine, theirs = link.endpoint.state_dict(), other.endpoint.state_dict()
            assert mine.pop("adaptive")["cf"] is not None
            assert mine.keys() == theirs.keys()
            for name, value in theirs.items():
                same = torch.equal if torch.is_tensor(value) else operator.eq
                assert same(mine[name], value), name


def test_same_indices_goes_by_what_the_activation_carried():
    pipe = pipe_of(adaptive(), "same")
    run(pipe, 0, 6)
    act, grad = pipe.boundaries[0].links
    assert act.meter.train.relative_error > 0 and grad.meter.train.relative_error > 0
    assert grad.meter.train.wire_bytes < grad.meter.train.dense_bytes


def test_the_header_says_the_factor_and_a_receiver_expects_it():
    link = Link(adaptive(), boundary=0, direction=ACT)
    step, x = Step(3, train=True), torch.randn(2, 60)
    assert Header.of(link.encode(x, step, 0)).cf == 0.0
    link.endpoint.policy._send_with(2.1)
    message = link.encode(x, step, 0)
    assert Header.of(message).cf == torch.tensor(2.1).item()
    assert link.decode(message, TensorMeta.of(x), step, 0).count_nonzero() == 2 * 29
    other = Link(adaptive(), boundary=0, direction=ACT)
    other.endpoint.policy._send_with(2.1000001 * (1 + 1e-4))  # as many elements, of another ratio
    with pytest.raises(RuntimeError, match=r"two ends disagree.*cf=2\.1"):
        other.decode(message, TensorMeta.of(x), step, 0)


# -- what counts and what does not ----------------------------------------------------------------


def adapted(pipe):
    return [link.endpoint.state_dict()["adaptive"] for link in pipe.links]


def test_evaluation_and_no_grad_change_nothing_and_send_as_trained():
    pipe = pipe_of(adaptive(), adaptive())
    run(pipe, 0, 5)
    before, sent = adapted(pipe), pipe.wire_bytes
    x, y = rows(8, 50)
    pipe.evaluate([(x, y)])
    with torch.no_grad():
        pipe(x)
    assert adapted(pipe) == before and pipe.wire_bytes == sent
    act = pipe.boundaries[0].act
    fixed = pipe_of(act.endpoint.policy.coder, None)
    meta = TensorMeta((4, 19))
    evaluation = Step(5, train=False)
    assert not act.endpoint.policy.dense
    assert act.message_bytes(meta, evaluation, 0, x.device) == (
        fixed.boundaries[0].act.message_bytes(meta, evaluation, 0, x.device)
    )


def test_recomputation_changes_nothing():
    one, two = pipe_of(adaptive(), adaptive()), pipe_of(adaptive(), adaptive(), recompute=True)
    assert torch.equal(run(one, 0, 6), run(two, 0, 6))
    assert adapted(one) == adapted(two)


def test_warm_up_and_uncompressed_steps_count_and_measure_nothing():
    pipe = pipe_of(adaptive(), adaptive(), warmup_steps=2)
    run(pipe, 0, 2)
    for state in (link.endpoint.policy for link in pipe.links):
        assert state.search.steps == 2 and state.search.gain_min is None and state.dense
    run(pipe, 2, 4)
    before = [link.endpoint.policy.search.gain_min for link in pipe.links]
    with pipe.uncompressed():
        run(pipe, 4, 5)
    assert [link.endpoint.policy.search.gain_min for link in pipe.links] == before
    assert {link.endpoint.policy.search.steps for link in pipe.links} == {5}
    assert [branch for _, branch in sent_of(pipe, "0.act")][:2] == ["off", "off"]
    assert sent_of(pipe, "0.act")[-1] == (1.0, "off")


def test_skipped_steps_count_and_record_nothing():
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=50)
    pipe = pipe_of(adaptive(), adaptive(), scaler=scaler)
    handle = next(pipe.parameters()).register_hook(lambda g: g * torch.inf)
    run(pipe, 0, 1)
    handle.remove()
    assert pipe.step_skipped
    for state in (link.endpoint.policy for link in pipe.links):
        assert state.search.steps == 1 and state.search.gain_min is None and state.dense
    run(pipe, 1, 3)
    for state in (link.endpoint.policy for link in pipe.links):
        assert state.search.steps == 3 and state.search.gain_min is not None


def test_a_step_that_fails_leaves_no_trace():
    pipe = pipe_of(adaptive(), adaptive())
    run(pipe, 0, 3)
    before = adapted(pipe)
    with pytest.raises(FloatingPointError):
        pipe.forward_backward(torch.full((8, 13), torch.inf), rows(8)[1])
    assert adapted(pipe) == before and len(pipe.adaptive_history) == 3
    twin = pipe_of(adaptive(), adaptive())
    run(twin, 0, 3)
    pipe.zero_grad()
    assert torch.equal(run(pipe, 3, 6), run(twin, 3, 6))


def test_a_module_that_is_called_adapts_at_the_next_call():
    """`pipe(x)`, then backward: bit for bit the same decisions."""
    one, two = pipe_of(adaptive(), adaptive()), pipe_of(adaptive(), adaptive())
    run(one, 0, 5)
    optimizer = torch.optim.SGD(two.parameters(), lr=0.05)
    for step in range(5):
        x, y = rows(8, step)
        F.cross_entropy(two(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(two.adaptive_history) == 4
    names = [f"{link.boundary}.{link.direction}" for link in one.links]
    for entry, other in zip(two.adaptive_history, one.adaptive_history, strict=False):
        assert [entry["links"][n]["cf"] for n in names] == [other["links"][n]["cf"] for n in names]


def test_the_wall_clock_records_the_time_of_steps():
    method = Adaptive(TopK(0.1), cf=(2.0, 20.0), eps=0.5, window=2)
    pipe = pipe_of(method, method)
    run(pipe, 0, 5)
    for link in pipe.links:
        assert link.endpoint.policy.search.throughputs
        assert all(rate > 0 for rate in link.endpoint.policy.search.throughputs.values())


def test_the_report(capsys):
    pipe = pipe_of(adaptive(), None)
    run(pipe, 0, 6)
    act, grad, *_ = pipe.report()["boundaries"]
    assert grad["adaptive"] is None
    found = act["adaptive"]
    assert found["cf"] == pipe.boundaries[0].act.endpoint.policy.cf and found["changes"] >= 1
    assert all(0 <= gain <= 1 for _, gain in found["gains"]) and found["gains"]
