"""Messages whose length is known only after coding cross cuts, in one process and in two."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from methods import same_bits
from models import mlp, rows
from torch import Tensor

import mpcomp
from mpcomp import Compressor, TensorMeta
from mpcomp.data_parallel.base import check_run
from mpcomp.data_parallel.methods import param_comp_of, replica_method_of


@dataclass(frozen=True)
class Runs(Compressor):
    """Steps of 1 / 8, and as many bytes as it takes to say them: zeros at the end are not sent."""

    spec: ClassVar[str] = "runs"
    variable_length: ClassVar[bool] = True

    def layout(self, meta: TensorMeta) -> tuple[TensorMeta, ...]:
        return (TensorMeta((1,)), TensorMeta((meta.numel,), torch.uint8))

    def compress(self, x: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
        flat = TensorMeta.of(x).flatten(x).reshape(-1).float()
        scale = flat.abs().amax().clamp(min=1e-30)
        codes = (flat / scale * 8).round().to(torch.int16) + 8
        end = int((codes != 8).nonzero().max()) + 1 if bool((codes != 8).any()) else 0
        return (scale.reshape(1), codes[:end].to(torch.uint8))

    def decompress(
        self,
        payload: tuple[Tensor, ...],
        meta: TensorMeta,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        scale, codes = payload
        flat = torch.zeros(meta.numel)
        flat[: codes.numel()] = (codes.float() - 8) / 8 * scale
        return meta.unflatten(flat.to(meta.dtype))


METHODS = ["runs", "ef+runs", "ef21+runs"]


def trained(method: str) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, weights of this rank and wire bytes of three steps."""
    torch.manual_seed(0)
    pipe = mpcomp.pipeline(
        mlp(), 2, split=2, act_comp=method, grad_comp=method, loss_fn=F.cross_entropy
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        x, y = rows(8, seed=step)
        x[:, 5:] = 0
        losses.append(float(pipe.forward_backward(x, y)))
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: p.detach().clone() for name, p in pipe.named_parameters()}
    return losses, weights, pipe.wire_bytes


def train_all() -> list[tuple[list[float], dict[str, Tensor], int]]:
    return [trained(method) for method in METHODS]


@pytest.mark.filterwarnings("ignore:.*would not shrink")
def test_two_ranks_do_what_one_does_and_only_what_is_used_is_counted(ranks):
    found = ranks(train_all, 2)
    for i, method in enumerate(METHODS):
        losses, weights, wire_bytes = trained(method)
        for of_rank in found:
            assert of_rank[i][0] == losses and of_rank[i][2] == wire_bytes, method
            for name, value in of_rank[i][1].items():
                assert same_bits(value, weights[name]), f"{method}: {name}"
        assert len(found[0][i][1]) + len(found[1][i][1]) == len(weights)
    most = 2 * 2 * 3 * (24 + 4 + 4 * 19)  # directions, microbatches, steps; header, scale, elements
    assert trained("runs")[2] < most


def test_where_lengths_must_be_equal_it_is_refused():
    with pytest.raises(ValueError, match="values=runs: indices follow"):
        mpcomp.TopK(0.1, values=Runs())
    with pytest.raises(ValueError, match="param_comp=runs: .*equal lengths"):
        param_comp_of("runs")
    with pytest.raises(ValueError, match=r"dp_comp=ef\+runs: .*equal lengths; use it at a cut"):
        check_run(
            {"w": torch.zeros(64, 64)}, replica_method_of("ef+runs"), mpcomp.ReplicaNetwork(), 2
        )
