"""Before and during a run: do all ranks mean the same?

Once, before any connection is made, every rank writes what it was given into the store as JSON and
reads what the others wrote. At each step a few hashes are compared: ranks that were handed other
data would train on the x of one batch and the y of another, and no message would show it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from mpcomp.comm.failures import PeerError
from mpcomp.comm.mesh import World

__all__ = ["announcing_failure", "exchange", "fingerprint", "shake_hands"]

#: Elements of a tensor that its fingerprint reads: batches that differ, differ all over.
_SAMPLED = 1 << 16
#: In place of what a rank was to say.
_FAILED = "failed before the handshake"


def shake_hands(world: World, config: Mapping[str, Any]) -> None:
    """Compares ``config`` over all ranks.

    Args:
        world: the ranks.
        config: what JSON can hold.

    Raises:
        ValueError: ranks differ; the message says which in what. The same on every rank.
        PeerError: a rank has not come within the timeout.
    """
    said = exchange(world, "hello", dict(config))
    differences = [
        f"rank {rank} has {name}={_shown(other.get(name))}, rank 0 has {_shown(said[0].get(name))}"
        for rank, other in enumerate(said)
        for name in {**said[0], **other}
        if other.get(name) != said[0].get(name)
    ]
    if differences:
        raise ValueError(
            "ranks were given different pipelines: "
            + "; ".join(differences)
            + ". Run the same script with the same arguments on every rank"
        )


@contextmanager
def announcing_failure(world: World) -> Iterator[None]:
    """Runs a block before the handshake; if it fails here, the other ranks need not wait."""
    try:
        yield
    except Exception as error:
        for what in ("times", "hello"):
            failure = json.dumps({_FAILED: f"{type(error).__name__}: {error}"})
            world.store.set(f"{what}/{world.rank}", failure)
        raise


def exchange(world: World, what: str, value: Any) -> list[Any]:
    """What JSON can hold, from every rank, through the store: needs no connection.

    Raises:
        ValueError: a rank has failed before it came to this.
        PeerError: a rank has not come within the timeout.
    """
    world.store.set(f"{what}/{world.rank}", json.dumps(value))
    keys = [f"{what}/{rank}" for rank in range(world.size)]
    try:
        world.store.wait(keys, timedelta(seconds=world.timeout_s))
    except RuntimeError as error:
        late = [str(rank) for rank in range(world.size) if not world.store.check([keys[rank]])]
        raise PeerError(
            f"rank {', '.join(late)} did not come to the handshake within {world.timeout_s:g} s: "
            "it has failed, was not started, or cannot reach the rendezvous"
        ) from error
    values = [json.loads(world.store.get(key)) for key in keys]
    for rank, said in enumerate(values):
        if isinstance(said, dict) and _FAILED in said:
            raise ValueError(f"rank {rank} cannot take part: {said[_FAILED]}")
    return values


def fingerprint(*values: Any) -> int:
    """A 63-bit hash of nested tensors and plain values, equal for equal values.

    Of a large tensor 65,536 elements, evenly spread, are read.
    """
    digest = hashlib.blake2b(digest_size=8)
    _feed(digest, values)
    return int.from_bytes(digest.digest(), "little") >> 1


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        _say(digest, (tuple(value.shape), value.dtype))
        flat = value.detach().reshape(-1)
        if flat.numel() > _SAMPLED:
            flat = flat[:: flat.numel() // _SAMPLED]
        digest.update(flat.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        _say(digest, f"mapping of {len(value)}")
        for key in sorted(value, key=repr):
            _say(digest, key)
            _feed(digest, value[key])
    elif isinstance(value, tuple | list):
        _say(digest, f"sequence of {len(value)}")
        for item in value:
            _feed(digest, item)
    else:
        _say(digest, value)


def _say(digest: Any, value: Any) -> None:
    """With its length, so that (1, 11) and (11, 1) are not one string of digits."""
    text = repr(value).encode()
    digest.update(f"{len(text)}:".encode() + text)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
