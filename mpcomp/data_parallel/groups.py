"""Groups in which tensors are exchanged: one is on its way while the next is encoded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from torch import Tensor

__all__ = ["GROUP_BYTES", "in_groups"]

#: Bytes of a group, about.
GROUP_BYTES = 25_000_000


def in_groups(
    named: Iterable[tuple[str, Tensor]], alone: Collection[str]
) -> Iterator[dict[str, Tensor]]:
    """Tensors by name, in groups; the last one may be empty.

    Args:
        named: the tensors, in an order that is the same on all replicas.
        alone: names of parameters that another rank may have a copy of. Each goes by itself, so
            that no figure of it depends on what else a rank has.
    """
    group: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in named:
        if name in alone:
            yield {name: tensor}
            continue
        group[name] = tensor
        num_bytes += tensor.nbytes
        if num_bytes >= GROUP_BYTES:
            yield group
            group, num_bytes = {}, 0
    yield group
