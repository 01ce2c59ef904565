"""What a pipeline is made of: stages, cuts and ranks, and what has been sent between them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import stages as staging
from mpcomp.api.original_names import OriginalNames
from mpcomp.api.step_sync import bytes_sent
from mpcomp.engines.base import Engine
from mpcomp.links.boundary import Boundary
from mpcomp.links.link import Link
from mpcomp.links.tied_weights import Tie

__all__ = ["Parts"]


class Parts(OriginalNames):
    """Stages of a model and what connects them; `mpcomp.api.pipeline.Pipeline` makes them run.

    Args:
        stages: those of this rank.
        cut: all of them.
        boundaries: the cuts.
        ties: the parameters that two stages share.
        engine: runs the stages, and reaches other ranks.
    """

    def __init__(
        self,
        stages: Sequence[staging.Stage],
        cut: Sequence[staging.Stage],
        boundaries: Sequence[Boundary],
        ties: Sequence[Tie],
        engine: Engine,
    ) -> None:
        # Where stages are sharded, plans are made with copies of them, which must follow too.
        super().__init__(stages, elsewhere=[s for s in cut if all(s is not o for o in stages)])
        self.cut_stages = list(cut)
        self.boundaries = list(boundaries)
        self.ties = list(ties)
        self.engine: Engine = engine
        self._agreed_bytes = (0, 0)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Parts:
        self.engine.forget_shapes()  # dtypes may change
        super()._apply(fn, recurse)
        return self

    # -- ranks --------------------------------------------------------------------------------

    def collect(self, value: Any) -> list[Any]:
        """A value that JSON can hold from every rank, by rank; every rank calls it."""
        return self.engine.collect(value)

    @property
    def rank(self) -> int:
        """Number of this process, 0 to `num_ranks` - 1."""
        return self.engine.rank

    @property
    def num_ranks(self) -> int:
        """Number of processes."""
        return self.engine.num_ranks

    @property
    def replica(self) -> int:
        """Which pipeline this rank is in, of `num_replicas`."""
        return self.engine.replica

    @property
    def num_replicas(self) -> int:
        """Number of pipelines."""
        return self.engine.num_replicas

    # -- messages -----------------------------------------------------------------------------

    @property
    def crossings(self) -> list[Boundary | Tie]:
        """All that sends messages: boundaries, then ties."""
        return [*self.boundaries, *self.ties]

    @property
    def links(self) -> list[Link]:
        """All links: of each cut that of activations, then that of gradients; those of ties."""
        return [link for each in self.crossings for link in each.links]

    @property
    def wire_bytes(self) -> int:
        """Bytes of all messages of training so far, headers included; of all ranks."""
        return self._bytes_sent()[0]

    @property
    def dense_bytes(self) -> int:
        """Bytes that training so far would have sent uncompressed, in the tensors' own dtypes."""
        return self._bytes_sent()[1]

    def _bytes_sent(self) -> tuple[int, int]:
        return self._agreed_bytes if self.engine.num_ranks > 1 else bytes_sent(self.links)

    def gather_scalars(self, values: Mapping[str, Tensor]) -> Tensor:
        """One number for a parameter, from all ranks of a replica, in the model's order: [n].

        Args:
            values: 0-d tensors by the names of this rank's parameters; some may be left out.
        """
        names = [name for stage in self.cut_stages for name, _ in stage.named_parameters()]
        if self.engine.num_ranks == 1:
            found = [values[name] for name in names if name in values]
            if not found:
                return torch.zeros(0, device=self.engine.device)
            return torch.stack([value.to(self.engine.device) for value in found])
        own = [values[name].item() if name in values else 0.0 for name in names]
        there = [float(name in values) for name in names]
        sums = self.engine.agree([*own, *there])
        replicas = self.engine.num_replicas
        kept = [
            total / replicas
            for total, count in zip(sums[: len(names)], sums[len(names) :], strict=True)
            if count
        ]
        dtype = next((value.dtype for value in values.values()), torch.float32)
        return torch.tensor(kept, dtype=dtype, device=self.engine.device)

    # -- the model ----------------------------------------------------------------------------

    def merge(self) -> nn.Module:
        """The original model, with the trained weights, on the first stage's device.

        With several processes a copy of it with all weights, on the CPU of every rank.
        """
        model = self.engine.plain_model or staging.merge(self.cut_stages)
        if self.engine.num_ranks == 1:
            return model.to(self.engine.device_of(0))
        self.engine.align_replicas()
        whole = copy.deepcopy(model)
        state = self.engine.share_tensors(_on_cpu(self.state_dict()))
        whole.load_state_dict(state, assign=True)
        staging.tie_names(whole, self.cut_stages)
        return whole.cpu()

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        """Writes a model of transformers as its own ``save_pretrained`` does; every rank calls it.

        The folder is written by the first rank.

        Args:
            folder: to be made.
            options: for the model's ``save_pretrained``.

        Raises:
            TypeError: the model has no ``save_pretrained``.
        """
        original: Any = self.cut_stages[0].original
        if not hasattr(original, "save_pretrained"):
            raise TypeError(
                f"save_pretrained: {type(original).__name__} is no model of transformers; use "
                "pipe.merge() and torch.save, or pipe.save"
            )
        model: Any = self.merge()
        with self.engine.together("saving the model"):
            if self.rank == 0:
                model.save_pretrained(folder, **options)
        self.collect(None)  # none goes on to read what is not there yet


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}
