"""What arrives: all of it in the lossless limit, and with feedback nothing is ever lost."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from chunks import Chunks, asked_for
from everyday import slow_but
from methods import COMPRESSORS
from ranks import preload
from replica_runs import (
    SMALLEST,
    Run,
    digest,
    exchange_of,
    exchanged,
    gradients,
    mean_gradients,
    mean_over_replicas,
    parameters,
    train_all,
)
from torch import Tensor

from mpcomp import EF21, Compressor, ErrorFeedback, ReplicaNetwork, parse
from mpcomp.core.context import TensorMeta
from mpcomp.data_parallel.base import matrix_of
from mpcomp.data_parallel.exchange import Exchange
from mpcomp.data_parallel.methods import replica_method_of
from mpcomp.data_parallel.paths import _pieces

preload("replica_runs")

NETWORKS = {
    "cheapest": ReplicaNetwork(smallest=SMALLEST),
    "gather": ReplicaNetwork("gather", smallest=SMALLEST),
    "two-phase": ReplicaNetwork("two-phase", smallest=SMALLEST),
    "machines": ReplicaNetwork("gather", smallest=SMALLEST, per_machine=2),
    "machines, two-phase": ReplicaNetwork("two-phase", smallest=SMALLEST, per_machine=2),
}


# -- lossless limits ------------------------------------------------------------------------------

#: Everything is kept, so that a message would be no smaller, or a gain is never reached: all of it
#: goes as it is, and what a method remembers must not get in its way.
DENSE = [
    "topk:1.0",
    "ef+topk:1.0",
    "ef21+topk:1.0",
    "conef+topk:1.0",
    "conef:error=qsgd/8+randomblock:1.0",
    "randomk:1.0",
    "ef+randomk:1.0",
    "randomk:1.0:unbiased=true",
    "ef+randomblock:1.0",
    "powersgd:7",
    "gravac:cf=2-8:eps=0.999:window=3+topk:0.1",
    "gravac:cf=1-1:window=3+topk:0.1",
    "dgc:1.0:momentum=0",
    "redsync:1.0:momentum=0",
    "accordion:low=topk/1.0:high=topk/1.0:interval=2",
]

#: Lossless for gradients of one row in a matrix, though they go compressed.
ONE_ROW = [
    "topk:0.6",
    "ef+topk:0.6",
    "ef21+topk:0.6",
    "conef+topk:0.6",
    "ef+sampledtopk:0.6",
    "ef+lowrank:1",
    "powersgd:1:min_saving=1",
    "gravac:cf=1.5-2:eps=0.3:window=3+topk:0.1",
    "gravac:cf=1.5-2:eps=0.3:window=3:exact=true+topk:0.1",
    "dgc:0.6:momentum=0",
    "redsync:0.6:momentum=0",
    "redsync:0.6:momentum=0:search=binary",
    "accordion:low=topk/0.6:high=topk/0.5:interval=2",
    "accordion:low=powersgd/2/1:high=powersgd/1/1:interval=2",
]

#: Likewise for those of two rows, in which the columns of a factor must be orthonormal.
TWO_ROWS = [
    "powersgd:2:min_saving=1",
    "powersgd:2:min_saving=1:feedback=false",
    "accordion:low=powersgd/2/1:high=powersgd/2/1:interval=2",
    "ef+lowrank:2",
    "ef21+lowrank:2",
]


#: Rows of each matrix that are left in a gradient of a kind. One has as many elements as half of a
#: piece.
ROWS = {"one row": [1], "two rows": [1, 4]}


def only_rows(given: dict[str, Tensor], rows: list[int]) -> dict[str, Tensor]:
    """Of each matrix some rows alone."""
    found = {}
    for name, g in given.items():
        left = torch.zeros_like(g)
        left[[row for row in rows if row < len(g)]] = g[[row for row in rows if row < len(g)]]
        found[name] = left if g.dim() > 1 else g
    return found


def lossless(cases: list[tuple[str, str, str]]) -> list[tuple[dict[str, float], dict[str, int]]]:
    """Of each case the largest error relative to a tensor's largest element; the last paths."""
    found = []
    for spec, network, kind in cases:
        like = parameters()
        exchange = exchange_of(spec, like, NETWORKS[network])
        errors = dict.fromkeys(like, 0.0)
        for step in range(4):
            given = gradients(like, dist.get_rank(), step)
            expected = mean_gradients(like, dist.get_world_size(), step)
            if kind in ROWS:
                given, expected = only_rows(given, ROWS[kind]), only_rows(expected, ROWS[kind])
            result = exchanged(exchange, given)
            for name, g in result.items():
                error = (g.double() - expected[name]).abs().max() / expected[name].abs().max()
                errors[name] = max(errors[name], float(error))
        found.append((errors, exchange.report()["paths"]))
    return found


LOSSLESS = [
    *((spec, "cheapest", "dense") for spec in DENSE),
    *((spec, "gather", "two rows") for spec in TWO_ROWS),
    *((spec, name, "one row") for spec in ONE_ROW for name in ("gather", "two-phase")),
    *((spec, "machines", "one row") for spec in ONE_ROW[::2] if "exact" not in spec),
]


#: Each method once, networks by turns.
LOSSLESS_EVERYDAY = [
    *((spec, "cheapest", "dense") for spec in DENSE),
    *((spec, "gather", "two rows") for spec in TWO_ROWS),
    *((spec, ("gather", "two-phase")[i % 2], "one row") for i, spec in enumerate(ONE_ROW)),
    *((spec, "machines", "one row") for spec in ONE_ROW[:1]),
]


@pytest.fixture(scope="module")
def lossless_runs(ranks, request):
    cases = {case: case for case in LOSSLESS}
    return Chunks(ranks, lossless, 4, cases, size=40, wanted=asked_for(request, "case"))


@pytest.mark.parametrize("case", slow_but(LOSSLESS_EVERYDAY, LOSSLESS), ids="-".join)
def test_a_lossless_limit_is_the_dense_mean(lossless_runs, case):
    """And it is reached on the way that the case is about, by all of the three matrices."""
    spec, network, kind = case
    own = lossless_runs[case]
    # A factor of two columns that are nearly parallel loses digits before it is orthonormal.
    bound = 3e-4 if kind == "two rows" else 3e-6
    for errors, _ in own:
        assert max(errors.values()) < bound, errors
    wanted = "factors" if "powersgd" in spec else network.removeprefix("machines") or "gather"
    expected = {"dense": 5} if kind == "dense" else {"dense": 2, wanted: 3}
    # Of a machine's replicas the first alone sends to other machines.
    assert [paths for _, paths in own if paths] == [expected] * (2 if network == "machines" else 4)


def momentum_free() -> list[float]:
    """DGC and RedSync with momentum, everything sent: masking clears the velocity each time."""
    errors = []
    like = parameters(vectors=False)
    for spec in ("dgc:1.0", "dgc:1.0:nesterov=true", "redsync:1.0", "dgc:1.0:masking=false"):
        exchange = exchange_of(spec, like)
        error = 0.0
        for step in range(4):
            result = exchanged(exchange, gradients(like, dist.get_rank(), step))
            expected = mean_gradients(like, dist.get_world_size(), step)
            scale = 1.9 if "nesterov" in spec else 1.0
            for name, g in result.items():
                error = max(error, float((g.double() - scale * expected[name]).abs().max()))
        assert exchange.report()["paths"] == {"dense": 3}  # a message would be no smaller
        errors.append(error)
    return errors


def test_masking_clears_momentum_where_all_is_sent(ranks):
    for dgc, nesterov, redsync, unmasked in ranks(momentum_free, 2):
        assert max(dgc, nesterov, redsync) < 1e-5 < 0.5 < unmasked


UNMASKED = ("dgc:1.0:masking=false", "gravac:cf=1-2:eps=0.999999:momentum=0.9:masking=false+topk:1")


def momentum_kept() -> list[float]:
    errors = []
    like = parameters()
    for spec in UNMASKED:
        exchange = exchange_of(spec, like)
        velocity = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in like.items()}
        error = 0.0
        for step in range(6):
            result = exchanged(exchange, gradients(like, dist.get_rank(), step))
            for name, mean in mean_gradients(like, dist.get_world_size(), step).items():
                velocity[name] = 0.9 * velocity[name] + mean
                away = (result[name].double() - velocity[name]).abs().max()
                error = max(error, float(away / velocity[name].abs().max()))
        errors.append(error)
    return errors


def test_without_masking_the_limit_is_momentum_sgd(ranks):
    """Also through GraVAC's dense steps, the first of which comes before any gain is known."""
    for errors in ranks(momentum_kept, 2):
        assert max(errors) < 3e-6, dict(zip(UNMASKED, errors, strict=True))


def test_no_method_is_plain_ddp_bit_for_bit(ranks):
    runs = [Run(None, steps=6), Run("identity", steps=6)]
    for plain, none in ranks(train_all, 4, runs):
        assert plain.weights == none.weights and plain.losses == none.losses
        assert none.report["ratio"] == 1 and plain.report == {}


# -- no mass is lost ------------------------------------------------------------------------------


def fed_back() -> list[Compressor]:
    """All compressors that may stand in error feedback between replicas."""
    found = []
    for compressor in COMPRESSORS:
        if not compressor.between_replicas:
            continue
        try:
            ErrorFeedback(compressor)
        except ValueError:
            assert "unbiased" in str(compressor)
        else:
            found.append(compressor)
    return found


METHODS = [
    "powersgd:1",
    "powersgd:2:min_saving=1",
    "onebitsgd",
    "gravac:cf=2-8:eps=0.85:window=2:smoothing=1+topk:0.1",
    "gravac:cf=2-32:eps=0.6:window=2+topk:0.1+fp16",
    "gravac:cf=2-8:eps=0.5:window=2:exact=true+sampledtopk:0.1",
    "gravac:cf=4-32:eps=0.5:window=2+quant:8",
    "gravac:cf=1.5-8:eps=0.4:window=2+randomk:0.5",
    "accordion:low=topk/0.5:high=topk/0.1:interval=2",
    "accordion:low=powersgd/2:high=topk/0.1:interval=2",
    "dgc:0.1:momentum=0",
    "dgc:0.1:momentum=0:warmup_steps=4:clip=1e6+fp16",
    "redsync:0.1:momentum=0",
    "redsync:0.1:momentum=0:same_sign=true",
    "ef:lr_scaled=true+topk:0.1",
]


def by_turns(shift: int = 0) -> list[tuple[str, str]]:
    """Each method once, networks by turns; machines refuse those that are exact."""
    turns = itertools.islice(itertools.cycle(NETWORKS), shift, None)
    exact = ("gather", "cheapest", "two-phase")[shift]
    return [(spec, exact if "exact" in spec else next(turns)) for spec in METHODS]


MASS = [
    *((str(ErrorFeedback(c)), "two-phase") for c in fed_back()),
    *((str(ErrorFeedback(c)), "gather") for c in fed_back()[::3]),
    *((spec, name) for shift in (0, 2) for spec, name in by_turns(shift)),
]


def everyday() -> list[tuple[str, str]]:
    """Each class in error feedback, and each method once."""
    of_class = {type(c): (str(ErrorFeedback(c)), "two-phase") for c in reversed(fed_back())}
    return [*of_class.values(), *by_turns()]


def left_over(exchange: Any, name: str, meta: TensorMeta, codec: Compressor | None) -> Tensor:
    """The mean of what all replicas keep of a parameter [n]; the same on all."""
    tensors = exchange.state_dict()["tensors"]
    lr = 0.1 if exchange.method.lr_scaled else 1.0
    total = torch.zeros(meta.numel, dtype=torch.float64)
    for key in ("residual", "sum"):
        total += tensors.get(f"own/{name}/{key}", torch.zeros(())).double() / lr
    kept = mean_over_replicas(total) * exchange.network.per_machine
    phase = torch.zeros_like(total)
    found = [v for k, v in tensors.items() if k in (f"phase/{name}/residual", f"phase/{name}/sum")]
    if found:
        assert codec is not None
        peers = exchange._connections.between
        sizes = [piece.numel for piece in _pieces(codec, meta, peers.size)]
        start = sum(sizes[: peers.rank])
        phase[start : start + sizes[peers.rank]] = found[0].double() / lr
    return kept + mean_over_replicas(phase) * dist.get_world_size()


def masses(cases: list[tuple[str, str]]) -> list[Any]:
    """Of each case the error of sums over steps, by parameter, and what was done."""
    found = []
    for spec, network in cases:
        like = parameters()
        exchange = exchange_of(spec, like, NETWORKS[network])
        given = {name: torch.zeros(p.numel(), dtype=torch.float64) for name, p in like.items()}
        arrived = {name: torch.zeros_like(v) for name, v in given.items()}
        codecs: dict[str, Compressor | None] = dict.fromkeys(like)
        results, branches = [], set()
        for step in range(5):
            means = mean_gradients(like, dist.get_world_size(), step)
            exchange.begin(lr=0.1)
            own = gradients(like, dist.get_rank(), step)
            exchange.add(own)
            exchange.finish()
            for name in exchange._compressible:
                codec = exchange.controller.codec(name)
                if isinstance(codec, Compressor):
                    codecs[name] = codec
            exchange.finish_step(finite=True)
            branches.add(exchange.history[-1].get("branch"))
            for name, p in like.items():
                meta = TensorMeta.of(p)
                given[name] += meta.flatten(means[name]).reshape(-1)
                arrived[name] += meta.flatten(own[name]).reshape(-1).double()
            results.append(digest(own))
        errors = {}
        for name, p in like.items():
            meta = TensorMeta.of(p)
            kept = left_over(exchange, name, matrix_of(meta), codecs[name])
            error = (given[name] - arrived[name] - kept).abs().max() / given[name].abs().max()
            errors[name] = (float(error), float(kept.abs().max()))
        found.append((errors, results, sorted(b for b in branches if b), exchange.report()))
    return found


@pytest.fixture(scope="module")
def mass_runs(ranks, request):
    wanted = {*asked_for(request, "case"), *everyday()}  # the last test asks for GraVAC's
    return Chunks(ranks, masses, 4, {case: case for case in MASS}, size=30, wanted=wanted)


def bound_of(spec: str) -> float:
    """What sums in half precision round off; else the rounding of fp32."""
    method = parse(spec)
    codec = method.inner if isinstance(method, ErrorFeedback) else None
    if codec is not None and codec.summable:
        dtypes = {part.dtype for part in codec.layout(TensorMeta((1, 100)))}
        return 0.05 if dtypes & {torch.float16, torch.bfloat16} else 1e-5
    return 1e-5


@pytest.mark.parametrize("case", slow_but(everyday(), MASS), ids="-".join)
def test_nothing_is_lost(mass_runs, case):
    """Sum of results + mean of what is kept = sum of the mean gradients."""
    spec, _network = case
    own = mass_runs[case]
    for errors, results, _branches, report in own:
        assert results == own[0][1]
        assert max(error for error, _ in errors.values()) < bound_of(spec), errors
        if set(report["paths"]) - {"dense"} and spec != "ef+fp32":
            assert max(kept for _, kept in errors.values()) > 0  # it did leave something out


def test_gravac_lost_nothing_on_any_branch(mass_runs):
    taken = {spec: own[0][2] for (spec, _), own in mass_runs.items() if spec.startswith("gravac")}
    assert {branch for branches in taken.values() for branch in branches} == {
        "dense",
        "minimum",
        "candidate",
    }


# -- EF21 -----------------------------------------------------------------------------------------


#: Networks of each.
ESTIMATES = {
    "ef21+topk:0.2": ("gather", "two-phase"),
    "ef21+topk:0.2+quant:8": ("two-phase",),
    "ef21+quant:4": ("gather",),
    "ef21+randomk:0.3": ("two-phase",),
}


def estimates() -> list[Any]:
    found = []
    for spec, networks in ESTIMATES.items():
        for network in networks:
            like = parameters()
            exchange = exchange_of(spec, like, NETWORKS[network])
            given = gradients(like, dist.get_rank(), 0)
            first, last = exchanged(exchange, given), {}
            tensors = exchange.state_dict()["tensors"]
            errors = []
            for name in ("wide", "conv", "tall"):
                meta = matrix_of(TensorMeta.of(like[name]))
                mean = tensors[f"own/{name}/mean"]
                own = mean_over_replicas(tensors[f"own/{name}/own"])
                if network == "two-phase":
                    # What a mean did not say is on its way.
                    own = own - left_over(exchange, name, meta, parse(spec).inner)
                errors.append(float((own - mean).abs().max() / own.abs().max()))
            said = digest({k: v for k, v in tensors.items() if k.endswith("/mean")})
            for _ in range(30):  # a gradient that does not change
                last = exchanged(exchange, given)
            expected = mean_gradients(like, dist.get_world_size(), 0)
            far, near = (
                max(
                    float((r[n] - expected[n]).norm() / expected[n].norm())
                    for n in ("wide", "conv", "tall")
                )
                for r in (first, last)
            )
            found.append((spec, network, errors, said, far, near, exchange.report()["ratio"]))
    return found


def test_estimates_agree_and_converge_to_a_fixed_gradient(ranks):
    assert isinstance(parse("ef21+quant:4"), EF21)
    for cases in zip(*ranks(estimates, 3), strict=True):
        for spec, network, errors, said, far, near, ratio in cases:
            assert max(errors) < 1e-6 and said == cases[0][3], (spec, network, errors)
            assert far > 0.05 and near < 0.03 * far, (spec, network, far, near)
            assert ratio < 0.9


# -- many replicas are one ------------------------------------------------------------------------

#: All replicas choose alike, and what is kept is linear in the gradients. (So it is in PowerSGD,
#: whose factors however turn with the last bit of a sum: after some steps they are others.)
LINEAR = [
    "ef+randomblock:0.1",
    "ef+randomk:0.1",
    "conef:0.4+randomblock:0.1",
    "conef:0.2:hash=murmur+randomk:0.1",
    "conef:1:beta=0.9+randomblock:0.1",
    "ef:lr_scaled=true+randomk:0.1",
]


def beside_one(specs: list[str]) -> list[float]:
    """By how much the result is another one than that of a replica alone, given the mean."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    found = []
    for spec in specs:
        like = parameters(vectors=False)
        together = exchange_of(spec, like)
        one = Exchange(like, replica_method_of(spec), alone, network=NETWORKS["cheapest"])
        error = 0.0
        for step in range(20):
            result = exchanged(together, gradients(like, dist.get_rank(), step))
            means = mean_gradients(like, dist.get_world_size(), step)
            # In the parameters' memory order, by which blocks are chosen.
            given = {name: torch.empty_like(p).copy_(means[name]) for name, p in like.items()}
            expected = exchanged(one, given)
            for name, g in result.items():
                error = max(error, float((g - expected[name]).norm() / expected[name].norm()))
        found.append(error)
    return found


def test_linear_methods_do_with_many_replicas_what_one_would_with_the_mean(ranks):
    for errors in ranks(beside_one, 3, LINEAR):
        assert max(errors) < 2e-6, dict(zip(LINEAR, errors, strict=True))
