"""The stranger's test, of feedback: a method defined here, with formulas alone, works everywhere.

No other file knows of it: at a cut, on a tie, between replicas and with FSDP2 it is stored,
counted, saved and adapted as the library's own are.
"""

import contextlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from laws import laws_over, module_of
from methods import same_bits
from models import (
    CONV_SPLIT,
    MLP_SPLIT,
    adamw,
    assert_ends_agree,
    assert_same_state,
    assert_same_training,
    convnet,
    images,
    links_state,
    mlp,
    rows,
    sgd,
)
from ranks import preload
from torch import Tensor

import mpcomp
from mpcomp import (
    EF21,
    Adaptive,
    Compressor,
    Feedback,
    Quantize,
    ReplicaNetwork,
    TensorMeta,
    TopK,
    parse,
)
from mpcomp.core.context import Step
from mpcomp.data_parallel.methods import replica_method_of
from mpcomp.feedback import EvalChoice, Field, Side
from mpcomp.feedback.memory import Sent, State

preload("torch.distributed.fsdp")
runs = module_of("distributed/runs.py")
lm_runs = module_of("distributed/lm_runs.py")
checkpoints = module_of("distributed/test_ranks_checkpoint.py")
replicas = module_of("distributed/test_ranks_dp.py")
replica_checkpoints = module_of("distributed/test_ranks_dp_checkpoint.py")
exchanges = module_of("data_parallel/replica_runs.py")
fsdp = module_of("data_parallel/test_ranks_fsdp.py")


@dataclass(frozen=True)
class EF21SGDM(Feedback):
    """v <- (1 - eta) v + eta x, d = C(v - h), h <- h + d, H <- H + mean d.

    Fatkhullin, Tyurin, Richtarik, NeurIPS 2023, algorithm 1 (EF21-SGDM).
    """

    inner: Compressor
    eta: float = 0.5
    first: Compressor | None = None
    storage: str | int = "fp32"
    location: str = "device"
    cap_bytes: int | None = None
    eval: EvalChoice = "compressed"
    spec: ClassVar[str] = "ef21sgdm"

    def fields(self, slot: TensorMeta) -> Mapping[str, Field]:
        return {
            "velocity": Field(Side.SENDER),
            "own": Field(Side.SENDER, mirrors="mean"),
            "mean": Field(Side.RECEIVER),
        }

    def compensate(self, x: Tensor, state: State) -> Tensor:
        state["velocity"] = (1 - self.eta) * state["velocity"] + self.eta * x
        return state.new("velocity") - state["own"]

    def sent(self, sent: Sent, state: State) -> None:
        state["own"] = state.new("velocity") - sent.left

    def received(self, mean: Tensor, state: State) -> Tensor:
        state["mean"] = state["mean"] + mean
        return state.new("mean")

    def dense(self, x: Tensor, state: State) -> None:
        state["velocity"] = x
        state["mean"] = x


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*would not shrink"),
    pytest.mark.filterwarnings("ignore:.*what was kept of all samples is dropped"),
]
METHODS = [
    EF21SGDM(TopK(0.1)),
    EF21SGDM(Quantize(4, rounding="stochastic"), eta=0.2, storage="bf16", eval="raw"),
    EF21SGDM(TopK(0.3), eta=1.0, first=Quantize(8), location="cpu"),
    EF21SGDM(TopK(0.3), storage=8, cap_bytes=2000),
]

FEEDBACK_LAWS = "feedback/test_feedback_laws.py"
globals().update(laws_over(FEEDBACK_LAWS, method=METHODS))
globals().update(laws_over(FEEDBACK_LAWS, cls=[EF21SGDM]))
globals().update(laws_over("links/test_link.py", method=METHODS))
globals().update(laws_over("engines/test_local.py", method=METHODS))
globals().update(
    laws_over(
        "test_padding.py",
        without=["test_error_feedback_loses_no_mass_and_keeps_padded_residuals"],
        method=METHODS,
    )
)
globals().update(laws_over("compressors/test_registry.py", method=METHODS))


def test_the_laws_are_all_here():
    """As many as a feedback method of the library is under."""
    found = {name.split("__")[0] for name in globals() if "__test_" in name}
    assert {
        "test_messages_are_as_laid_out_and_come_out_like_the_input",
        "test_state_is_read_as_it_was_before_the_step",
        "test_discarded_steps_leave_no_trace",
        "test_state_is_free_of_the_loss_scale",
        "test_bad_settings",
        "test_length_is_known_beforehand_and_metered",
        "test_state_goes_to_a_fresh_link_and_on_bit_for_bit",
        "test_bytes_metered_are_bytes_handed_to_the_transport",
        "test_what_is_padded_never_matters",
        "test_estimates_are_equal_at_both_ends_and_stay_where_it_is_padded",
        "test_a_method_is_a_frozen_value",
    } <= found


METHOD = EF21SGDM(TopK(0.2), eta=0.4)


def test_its_spec_is_known():
    assert parse("ef21sgdm:eta=0.4+topk:0.2") == METHOD
    assert str(METHOD) == "ef21sgdm:eta=0.4+topk:0.2"
    assert parse("ef21sgdm:first=quant/8:storage=bf16+topk:0.1") == EF21SGDM(
        TopK(0.1), first=Quantize(8), storage="bf16"
    )
    with pytest.raises(ValueError, match="did you mean 'ef21sgdm'"):
        parse("ef21sgd+topk:0.1")


# -- a cut ----------------------------------------------------------------------------------------


def train(pipe: mpcomp.Pipeline, first: int, last: int, optimizer: Any = None) -> Tensor:
    """The losses."""
    optimizer = optimizer or sgd(pipe)
    losses = []
    for step in range(first, last):
        losses.append(pipe.forward_backward(*rows(8, step)))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


def pipe_of(**kwargs: Any) -> mpcomp.Pipeline:
    torch.manual_seed(0)
    options = {"split": MLP_SPLIT, "loss_fn": F.cross_entropy, "engine": "local", **kwargs}
    return mpcomp.pipeline(options.pop("model", mlp)(), 2, **options)


def test_its_formulas_at_a_cut():
    """Of several steps, against the paper's, row by row."""
    link = mpcomp.Link(METHOD, boundary=0, direction="grad")
    velocity = estimate = None
    for index in range(5):
        x = torch.randn(3, 40)
        step = Step(index, True)
        arrived = link.decode(link.encode(x, step, 0), TensorMeta.of(x), step, 0)
        link.commit()
        if velocity is None or estimate is None:  # the first message is x itself
            velocity = estimate = x
        else:
            velocity = (1 - 0.4) * velocity + 0.4 * x
            difference = velocity - estimate
            payload = METHOD.inner.compress(difference)
            estimate = estimate + METHOD.inner.decompress(payload, TensorMeta.of(x))
        assert same_bits(arrived, estimate)
        sender = link.endpoint.ends["sender"].fields
        assert same_bits(sender["velocity"].store.read([(0, r) for r in range(3)]), velocity)
        assert_ends_agree(link.endpoint.ends["sender"], link.endpoint.ends["receiver"])


def test_without_momentum_it_is_ef21():
    ours, theirs = (
        pipe_of(act_comp=method, grad_comp=method)
        for method in (EF21SGDM(TopK(0.2), eta=1.0), EF21(TopK(0.2)))
    )
    assert same_bits(train(ours, 0, 5), train(theirs, 0, 5))
    assert_same_training(ours, theirs)
    assert ours.wire_bytes == theirs.wire_bytes


def test_state_bytes_are_what_is_held():
    pipe = pipe_of(act_comp=METHODS[1], grad_comp=METHOD)
    said = pipe.state_bytes(rows(8)[0])
    train(pipe, 0, 2)
    held = {
        (link.boundary, link.direction, role): end.num_bytes
        for link in pipe.links
        for role, end in link.endpoint.ends.items()
    }
    assert held == {
        (e["boundary"], e["direction"], e["role"]): e["bytes"] for e in said["per_link"]
    }
    assert said["total"] == sum(held.values()) == 3 * 8 * (19 + 17) * (2 + 4)
    kept = [value for state in links_state(pipe).values() for key, value in state.items()
            if "rows" in key]  # fmt: skip
    assert sum(value.nbytes for value in kept) == said["total"]


def test_going_on_is_as_if_never_stopped(tmp_path):
    """With dropout and BatchNorm, a loss scaler's overflow before the save."""

    def made(seed):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        pipe = pipe_of(
            model=convnet, split=CONV_SPLIT, act_comp=METHODS[1], grad_comp=METHOD, scaler=scaler,
            seed=3,
        )  # fmt: skip
        for parameter in pipe.parameters():
            parameter.data.add_(seed)
        return pipe, adamw(pipe)

    def go(pipe, optimizer, first, last):
        losses = []
        for step in range(first, last):
            with runs.exploding(pipe, 1) if step == 1 else contextlib.nullcontext():
                losses.append(pipe.forward_backward(*images(5, step)))
            assert pipe.step_skipped == (step == 1)
            pipe.scaler.step(optimizer)
            pipe.scaler.update()
            optimizer.zero_grad()
        return torch.stack(losses)

    straight, optimizer = made(0)
    go(straight, optimizer, 0, 3)
    straight.save(tmp_path / "last", optimizer=optimizer)
    expected = go(straight, optimizer, 3, 6)
    resumed, other = made(1)
    go(resumed, other, 0, 1)
    resumed.load(tmp_path / "last", optimizer=other)
    resumed.zero_grad()
    assert same_bits(go(resumed, other, 3, 6), expected)
    assert_same_training(resumed, straight)
    assert_same_state(links_state(resumed), links_state(straight))


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_a_tie(optimizer):
    pytest.importorskip("transformers")
    ties = module_of("test_tie.py")
    ties.test_copies_stay_equal_under_compression("ef21sgdm:eta=0.4+topk:0.1", optimizer)
    ties.test_a_skipped_step_leaves_its_state("ef21sgdm:eta=0.4+topk:0.1")
    pipe = ties.pipe_of(METHOD)
    said = pipe.state_bytes(ties.text(4))["total"]
    pipe.forward_backward(ties.text(4))
    held = [end.num_bytes for link in pipe.ties[0].links for end in link.endpoint.ends.values()]
    assert said == sum(held) == 2 * 3 * ties.DENSE_BYTES


RUNS = [
    runs.Run(act=METHOD, grad="same", steps=3),
    runs.Run(act=METHODS[1], grad=METHOD, steps=4, rows=(10, 7), scale=64.0, overflow=(2, 1)),
    runs.Run(act=Adaptive(METHOD, cf=(2.0, 10.0), window=2, bandwidth_mbps=1.0), steps=4),
    runs.Run(act="topk:0.3", grad=METHOD, stages=4, schedule="ZBVZeroBubble", steps=3),
    lm_runs.lm_run("gpt2", act=METHOD, grad=METHOD, steps=2, pipeline={"tie_comp": METHOD}),
]
SETTINGS = [
    checkpoints.Setting(CONV_SPLIT[-1:], METHOD, METHODS[1], adamw, model=convnet),
]


def on_two_stages(folder: str) -> Any:
    outcomes = runs.train_all(RUNS)
    checkpoints.goes_on(SETTINGS, folder, False)
    return outcomes


def test_a_cut_and_a_tie_in_both_engines(ranks, tmp_path):
    """Two processes are one, bit for bit; saved and gone on with, they are what they were."""
    pytest.importorskip("transformers")
    results = ranks(on_two_stages, 2, str(tmp_path), timeout_s=120.0)
    for i, run in enumerate(RUNS):
        alone = runs.train(run)
        runs.assert_same(run, [outcomes[i] for outcomes in results], alone)
        for name, (wire, dense) in alone.sent.items():
            assert wire < dense or not name.startswith("tied")


# -- adaptive -------------------------------------------------------------------------------------


def test_adaptive():
    method = Adaptive(METHOD, cf=(2.0, 10.0), eps=0.3, window=2, bandwidth_mbps=1.0)
    assert parse(str(method)) == method
    assert method.at(10.0) == replace(METHOD, inner=TopK(0.1))
    pipe = pipe_of(act_comp=method, grad_comp=method)
    losses = train(pipe, 0, 12)
    assert losses.isfinite().all() and pipe.wire_bytes < pipe.dense_bytes
    for link in pipe.links:
        cfs = {entry["links"][f"{link.boundary}.{link.direction}"]["cf"]
               for entry in pipe.adaptive_history}  # fmt: skip
        assert len(cfs) > 1
        for role in ("sender", "receiver"):
            assert link.endpoint.ends[role].num_slots == 8
        assert_ends_agree(link.endpoint.ends["sender"], link.endpoint.ends["receiver"])


def test_a_measured_message_leaves_the_state_alone():
    """`Adaptive` asks for the target of a message once more; its formulas set nothing then."""
    wire = module_of("feedback/ends.py").Wire(METHOD, TensorMeta((3, 40)))
    at = module_of("feedback/ends.py").context
    for step in range(3):
        x = torch.randn(3, 40)
        plan, other = wire.plans(TensorMeta.of(x), at(step))
        other.decode(plan.encode(x))
        staged = wire.sender.open_slots
        before = {name: f.store.read([(0, 0)]).clone() for name, f in wire.sender.fields.items()}
        target, against = plan.measured(2 * x)
        velocity = 0.6 * before["velocity"] + 0.4 * 2 * x[0]
        assert torch.equal(target[:1], velocity - before["own"])
        assert torch.equal(against, 2 * x)
        assert wire.sender.open_slots == staged
        wire.commit()
        expected = 0.6 * before["velocity"] + 0.4 * x[0] if step else x[:1]
        assert same_bits(wire.sender.fields["velocity"].store.read([(0, 0)]), expected)


# -- between replicas -----------------------------------------------------------------------------

GATHER, TWO_PHASE = (
    ReplicaNetwork(path, smallest=exchanges.SMALLEST) for path in ("gather", "two-phase")
)


def exchanged(method: Any, network: ReplicaNetwork, steps: int = 5) -> tuple[Any, list[Any]]:
    """The exchange, and the results of each step."""
    like = exchanges.parameters()
    exchange = exchanges.exchange_of(method, like, network)
    given = (exchanges.gradients(like, dist.get_rank(), step) for step in range(steps))
    return exchange, [exchanges.exchanged(exchange, g) for g in given]


def check_formulas() -> None:
    """Of several steps against the paper's, for every replica in this process."""
    exchange, results = exchanged(METHOD, GATHER)
    like, size = exchanges.parameters(), dist.get_world_size()
    for name in ("wide", "conv", "tall"):
        meta = TensorMeta.of(like[name])
        velocity, own = torch.zeros(2, size, 1, meta.numel)
        mean = torch.zeros(1, meta.numel)
        for step, result in enumerate(results):
            said = []
            for rank in range(size):
                x = meta.flatten(exchanges.gradients(like, rank, step)[name]).reshape(1, -1)
                velocity[rank] = 0.6 * velocity[rank] + 0.4 * x
                payload = METHOD.inner.compress(velocity[rank] - own[rank])
                said.append(METHOD.inner.decompress(payload, TensorMeta(tuple(x.shape))))
                own[rank] += said[-1]
            mean += sum(said) / size
            found = meta.flatten(result[name]).reshape(1, -1)
            torch.testing.assert_close(found, mean, rtol=1e-5, atol=1e-5)
        held = exchange.state_dict()["tensors"]
        for field, expected in (("velocity", velocity), ("own", own)):
            torch.testing.assert_close(
                held[f"own/{name}/{field}"], expected[dist.get_rank(), 0], rtol=1e-5, atol=1e-5
            )
    for name in ("bias", "small"):  # which go as they are
        for step, result in enumerate(results):
            expected = exchanges.mean_gradients(like, size, step)[name]
            torch.testing.assert_close(result[name].double(), expected, rtol=1e-5, atol=1e-5)


def check_limits() -> None:
    """Without momentum it is EF21, and where all is sent the mean; on every path."""
    like, size = exchanges.parameters(), dist.get_world_size()
    for network, keep in itertools.product((GATHER, TWO_PHASE), (0.2, 1.0)):
        method = EF21SGDM(TopK(keep), eta=1.0)
        ours, theirs = (exchanged(m, network)[1] for m in (method, EF21(TopK(keep))))
        for step, (one, two) in enumerate(zip(ours, theirs, strict=True)):
            for name, result in one.items():
                assert torch.equal(result, two[name]), (network, keep, name)
                if keep == 1:
                    mean = exchanges.mean_gradients(like, size, step)[name]
                    torch.testing.assert_close(result.double(), mean, rtol=1e-5, atol=1e-4)


def check_nothing_is_lost() -> None:
    """In two phases H and what is left of means are the mean of all h."""
    exchange, results = exchanged(METHOD, TWO_PHASE)
    held = exchange.state_dict()["tensors"]
    for name in ("wide", "conv", "tall"):
        own = exchanges.mean_over_replicas(held[f"own/{name}/own"])
        left = torch.zeros_like(own)
        start = int(held[f"phase/{name}/start"])
        piece = held[f"phase/{name}/residual"]
        left[start : start + piece.numel()] = piece.double()
        dist.all_reduce(left)
        assert left.abs().sum() > 0
        result = TensorMeta.of(results[-1][name]).flatten(results[-1][name]).reshape(-1)
        assert torch.equal(result, held[f"own/{name}/mean"])
        torch.testing.assert_close(result + left, own, rtol=1e-5, atol=1e-4)


def on_two_replicas(folder: str) -> Any:
    check_formulas()
    check_limits()
    check_nothing_is_lost()
    replica_checkpoints.goes_on(
        [(METHOD, replicas.NETWORK), (METHODS[1], replica_checkpoints.TWO_PHASE)], folder
    )
    cases = [(str(METHOD), None), (str(METHODS[1]), "GPipe")]
    return replicas.ddp_outcomes([METHOD], 6), replicas.outcomes(cases, 10, {}), cases


def test_two_replicas(ranks, tmp_path):
    """Formulas, limits, resuming; a pipeline of one stage is a model in DDP."""
    results = ranks(on_two_replicas, 2, str(tmp_path), timeout_s=120.0)
    for in_ddp, _, _ in results:
        for _, ours, theirs in in_ddp:
            replicas.assert_same_tensors(ours, theirs)
    replicas.check_replicas([trained for _, trained, _ in results], results[0][2])


def test_first_has_no_place_between_replicas():
    with pytest.raises(ValueError, match="between replicas estimates begin at zero"):
        replica_method_of(EF21SGDM(TopK(0.1), first=Quantize(8)))


def test_fsdp2(ranks):
    """Equal weights, compressed, learning, and resumed bit for bit."""
    methods = [METHOD, METHODS[1]]
    results = ranks(fsdp.trained, 2, methods, fsdp.PLAIN, 1)
    for i, method in enumerate(methods):
        fsdp.check([of_rank[i] for of_rank in results], str(method))
