"""A field says what becomes of it on another number of replicas, whoever defines it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from laws import module_of
from replica_runs import SMALLEST, alone, exchange_of
from torch import Tensor

from mpcomp import QSGD, Compressor, ConEF, Feedback, ReplicaNetwork, TensorMeta, TopK
from mpcomp.feedback import Field, Side
from mpcomp.feedback.memory import Sent, State

checkpoints = module_of("distributed/test_ranks_dp_checkpoint.py")
replicas = module_of("distributed/test_ranks_dp.py")


@dataclass(frozen=True)
class Debt(Feedback):
    """w = x + debt, debt <- w - sent; pace, first and heard are there to be merged."""

    inner: Compressor
    spec: ClassVar[str] = "debt"

    def fields(self, slot: TensorMeta) -> Mapping[str, Field]:
        return {
            "debt": Field(Side.SENDER, merge="owed"),
            "pace": Field(Side.SENDER),
            "first": Field(Side.SENDER, merge="same"),
            "copy": Field(Side.SENDER, mirrors="heard"),
            "heard": Field(Side.RECEIVER),
        }

    def compensate(self, x: Tensor, state: State) -> Tensor:
        state["pace"] = 0.5 * state["pace"] + x
        return x + state["debt"]

    def sent(self, sent: Sent, state: State) -> None:
        state["debt"] = sent.left
        state["first"] = torch.ones_like(sent.x)
        state["copy"] = sent.x

    def received(self, mean: Tensor, state: State) -> Tensor:
        state["heard"] = 0.9 * state["heard"] + mean
        return mean


METHOD = Debt(TopK(0.2))


def merged(method: object, given: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What a replica of another number of them goes on with."""
    with alone():
        return exchange_of(method, {"wide": torch.zeros(7, 30)}).merged(given)


def rows_of(number: int, numel: int = 210) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5])
def test_each_field_is_merged_as_it_says(num_replicas):
    """Also where the sum of as many equal numbers is rounded."""
    own = [{field: rows_of(10 * r + i) for i, field in enumerate(("debt", "pace", "copy"))}
           for r in range(num_replicas)]  # fmt: skip
    alike = {"first": rows_of(90) / 3, "heard": rows_of(91) / 3}
    given = [{f"own/wide/{k}": v for k, v in {**mine, **alike}.items()} for mine in own]
    found = {key.removeprefix("own/wide/"): v for key, v in merged(METHOD, given).items()}
    assert found.keys() == {"debt", "pace", "first", "copy", "heard"}
    for field in ("debt", "pace"):
        mean = sum(mine[field].double() for mine in own) / num_replicas
        torch.testing.assert_close(found[field].double(), mean, rtol=1e-6, atol=1e-6)
    for field in ("first", "heard"):
        assert torch.equal(found[field], alike[field])
    assert torch.equal(found["copy"], alike["heard"])


def test_what_is_owed_of_pieces_is_owed_by_every_replica():
    """The pieces of the mean go to the field that says so, in the order of replicas."""
    given = [
        {
            "own/wide/debt": rows_of(r),
            "own/wide/pace": rows_of(5 + r),
            "phase/wide/residual": rows_of(20 + r, 105),
            "phase/wide/start": torch.tensor(105 * r),
            "phase/wide/numel": torch.tensor(105),
        }
        for r in range(2)
    ]
    found = merged(METHOD, given)
    pieces = torch.cat([rows_of(20, 105), rows_of(21, 105)])
    torch.testing.assert_close(found["own/wide/debt"], (rows_of(0) + rows_of(1)) / 2 + pieces)
    torch.testing.assert_close(found["own/wide/pace"], (rows_of(5) + rows_of(6)) / 2)
    assert found.keys() == {"own/wide/debt", "own/wide/pace"}


def states_of(method: object, num_replicas: int, path: str) -> list[dict[str, Tensor]]:
    """What replicas remember after two steps, each in a group of its own."""
    states = []
    for rank in range(num_replicas):
        with alone():
            network = ReplicaNetwork(path, smallest=SMALLEST)
            exchange = exchange_of(method, {"wide": torch.zeros(7, 30)}, network)
            for step in range(2):
                exchange.begin(lr=0.1)
                exchange.add({"wide": rows_of(10 * rank + step).reshape(7, 30)})
                exchange.finish()
                exchange.finish_step(finite=True)
            states.append(exchange.state_dict()["tensors"])
    return states


@pytest.mark.parametrize("storage", ["fp32", "bf16", 8])
def test_sketches_are_averaged_by_their_cells(storage):
    """As a sketch is linear; the bits that stand for them are not carried on."""
    method = ConEF(TopK(0.2), 0.4, storage=storage)
    states = states_of(method, 3, "gather")
    found = merged(method, states)
    mean = sum(state["own/wide/error"] for state in states) / 3
    assert found.keys() == {"own/wide/error"}
    torch.testing.assert_close(found["own/wide/error"], mean)
    with alone():
        exchange = exchange_of(method, {"wide": torch.zeros(7, 30)})
        state = exchange.state_dict()
        exchange.load_state_dict({**state, "tensors": found})


@pytest.mark.parametrize(
    "method, path",
    [
        (ConEF(TopK(0.2), 0.4), "two-phase"),  # a sketch of a piece
        (ConEF(TopK(0.2), error=QSGD(8)), "gather"),  # a payload
        (ConEF(TopK(0.2), error=QSGD(8), improved="v1"), "gather"),
        (ConEF(TopK(0.2), 0.4, improved="v2"), "gather"),
    ],
)
def test_what_cannot_be_averaged_is_refused(method, path):
    with pytest.raises(ValueError, match="of wide belongs to as many replicas as it was saved"):
        merged(method, states_of(method, 2, path))


def test_a_piece_of_a_sharded_parameter_is_refused():
    with pytest.raises(ValueError, match="what is remembered of wide/0 belongs to as many"):
        merged(METHOD, [{"own/wide/0/debt": rows_of(0)}])


@pytest.mark.parametrize("merge", ["owned", "", "sum"])
def test_another_way_to_merge_is_refused(merge):
    with pytest.raises(ValueError, match="expected mean, same, owed, or None"):
        Field(Side.SENDER, merge=merge)


MOVES = [
    (METHOD, replicas.NETWORK, 4, 2),
    (METHOD, checkpoints.TWO_PHASE, 4, 2),
    (METHOD, checkpoints.TWO_PHASE, 2, 4),
]


def test_a_strangers_method_goes_on_with_other_replicas(ranks, tmp_path):
    """No other file knows of its fields: checkpoints of four ranks, loaded by as many."""
    results = ranks(checkpoints.moved, 4, MOVES, str(tmp_path), timeout_s=120.0)
    for i, (_, network, before, after) in enumerate(MOVES):
        old = checkpoints.in_all(results, i, 0, before)
        new = checkpoints.in_all(results, i, 1, after)
        for replica in new[1:]:
            replicas.assert_same_tensors(replica, new[0])
        assert not any(key.startswith("phase/") for key in new[0])
        pieces = checkpoints.owed(old, "residual")
        assert bool(pieces) == (network is checkpoints.TWO_PHASE)
        for field in ("debt", "pace", "first", "heard"):
            expected = checkpoints.mean_of(old, field)
            for name, value in checkpoints.mean_of(new, field).items():
                owed = pieces.get(name.replace("/debt", "/residual"), 0)
                torch.testing.assert_close(value, expected[name] + owed, rtol=1e-5, atol=1e-6)
        for name, value in checkpoints.mean_of(new, "copy").items():
            assert torch.equal(value, new[0][name.replace("/copy", "/heard")])
        for rank in range(4):
            *_, last = results[rank][i]
            assert all(value.isfinite().all() for value in last.values())
            replicas.assert_same_tensors(last, results[0][i][2])
