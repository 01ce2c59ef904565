"""Agreement of all ranks, before a run and at each of its steps: do they mean the same?

Once, before any connection is made, every rank writes what it was given into the store as JSON and
reads what the others wrote. At each step a few hashes are compared: ranks that were handed other
data would train on the x of one batch and the y of another, and no message would show it.

Of a batch all elements count. Whole numbers must be the same; of floating-point ones a sketch must
agree to within rounding (`mpcomp.core.sketch`), as ranks may have computed them on unlike
processors, and only one of them will use its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch._C._distributed_c10d import Store

from mpcomp.comm.failures import PeerError, first_line
from mpcomp.comm.secret import ENVIRONMENT, ENVIRONMENT_FILE, Secret, given_secret
from mpcomp.core.bit_sum import bit_sum
from mpcomp.core.context import Step
from mpcomp.core.sketch import sketch, sketches_agree

__all__ = [
    "NO_DATA",
    "Difference",
    "Meeting",
    "StepFingerprint",
    "announcing_failure",
    "check_alike",
    "check_step",
    "exchange",
    "fingerprint",
    "shake_hands",
    "show_secret",
    "step_name",
]

#: In place of the hash of a rank's data: it has none, as what was to give it failed.
NO_DATA = -1
#: In place of what a rank was to say.
_FAILED = "failed before the handshake"
#: Characters of what a rank says.
_LONGEST = 1 << 26


class Meeting(Protocol):
    """Ranks that share a store, whether they are connected or not.

    Attributes:
        store: of all.
        rank: this one.
        num_ranks: of all.
        timeout_s: of a wait for a rank.
        secret: that ranks have shown, if any.
    """

    store: Store
    rank: int
    num_ranks: int
    timeout_s: float
    secret: Secret | None


class Difference(NamedTuple):
    """One thing in which two ranks differ.

    Attributes:
        rank: that has another value.
        first: the rank that it is compared with.
        name: of the thing.
        value: of ``rank``; None if it has none.
        expected: that of ``first``.
    """

    rank: int
    first: int
    name: str
    value: Any
    expected: Any


def check_alike(
    gathered: Sequence[Mapping[str, Any]],
    message: Callable[[Sequence[Difference]], str],
    *,
    group: int | None = None,
) -> None:
    """Compares named values of all ranks; so every rank comes to the same result.

    Args:
        gathered: of each rank.
        message: what differences mean, and what to do about them.
        group: number of neighbouring ranks that must be alike; all of them by default.

    Raises:
        ValueError: ranks differ; on every rank.
    """
    found = []
    for rank, values in enumerate(gathered):
        first = rank - rank % (group or len(gathered))
        expected = gathered[first]
        found += [
            Difference(rank, first, name, values.get(name), expected.get(name))
            for name in {**expected, **values}
            if values.get(name) != expected.get(name)
        ]
    if found:
        raise ValueError(message(found))


def shake_hands(mesh: Meeting, config: Mapping[str, Any]) -> None:
    """Compares ``config`` over all ranks.

    Args:
        mesh: the ranks.
        config: what JSON can hold.

    Raises:
        ValueError: ranks differ; the message says which in what. The same on every rank.
        PeerError: a rank has not come within the timeout.
    """

    def message(found: Sequence[Difference]) -> str:
        each = [
            f"rank {d.rank} has {d.name}={_shown(d.value)}, rank {d.first} has {_shown(d.expected)}"
            for d in found
        ]
        return (
            f"ranks were given different pipelines: {'; '.join(each)}. Run the same script with "
            "the same arguments and the same mpcomp on every rank"
        )

    said = exchange(mesh, "hello", dict(config))
    for rank, values in enumerate(said):
        if not isinstance(values, dict):
            raise ValueError(f"rank {rank} says {_shown(values)} in place of its pipeline")
    check_alike(said, message)


class StepFingerprint(NamedTuple):
    """A rank's announcement of what it is about to do.

    Attributes:
        data: hash of what all ranks of a replica were handed, but for floating-point elements; or
            `NO_DATA`.
        settings: hash of what must be the same on all ranks.
        terms: of the loss, or rows of the batch; weights may make them a fraction.
        trained: the first stage there with something to train, or the number of stages.
        tied_trained: of `mpcomp.links.tied_weights.trained_and_frozen`.
        tied_frozen: likewise.
        sketched: of those elements, fp64 numbers as the integers that their bits are.
    """

    data: int
    settings: int
    terms: float
    trained: int
    tied_trained: int
    tied_frozen: int
    sketched: tuple[int, ...]

    @classmethod
    def of(
        cls,
        step: Step,
        settings: tuple[Any, ...],
        data: tuple[Any, ...],
        *,
        terms: float,
        trained: int,
        tied: tuple[int, int],
    ) -> StepFingerprint:
        """The announcement of this rank.

        Args:
            step: the step to come.
            settings: what all ranks have to agree in besides.
            data: what the ranks of a replica have to agree in.
            terms: as the attribute, as are ``trained`` and ``tied``.
        """
        on = (step.compress_act, step.compress_grad, step.compress_dp)
        own = (step.index, step.train, *on, step.loss_scale)
        floats: list[Tensor] = []
        exact = fingerprint(*_without_floats(data, floats))
        bits = _bits(*sketch(floats))
        return cls(exact, fingerprint(own, step.lr, *settings), terms, trained, *tied, bits)

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> StepFingerprint:
        """The inverse of `numbers`."""
        data, settings, terms, trained, tied_trained, tied_frozen, *sketched = numbers
        tied = tied_trained, tied_frozen
        (count,) = _numbers(terms)
        return cls(data, settings, count, trained, *tied, tuple(sketched))

    @property
    def numbers(self) -> list[int]:
        """All of it, as whole numbers of 64 bits."""
        tied = self.tied_trained, self.tied_frozen
        terms = _bits(self.terms)
        return [self.data, self.settings, *terms, self.trained, *tied, *self.sketched]

    @property
    def sketch(self) -> tuple[float, ...]:
        """The sketch of floating-point elements."""
        return _numbers(*self.sketched)


def _bits(*numbers: float) -> tuple[int, ...]:
    """Integers whose bits are these fp64 numbers."""
    return struct.unpack(f"<{len(numbers)}q", struct.pack(f"<{len(numbers)}d", *numbers))


def _numbers(*bits: int) -> tuple[float, ...]:
    """The inverse of `_bits`."""
    return struct.unpack(f"<{len(bits)}d", struct.pack(f"<{len(bits)}q", *bits))


def step_name(step: Step) -> str:
    """A step's number and kind, for messages."""
    return f"step {step.index} ({'training' if step.train else 'evaluation'})"


def check_step(gathered: Sequence[StepFingerprint], step: Step, pp_size: int) -> None:
    """Compares what all ranks have announced.

    Raises:
        ValueError: ranks were handed other data, or take another step, or one failed before it; on
            every rank.
    """
    for rank, one in enumerate(gathered):
        if one.data == NO_DATA:
            raise ValueError(
                f"rank {rank} has no batch for {step_name(step)}: its own error says why"
            )
    check_alike(
        [{"settings": one.settings} for one in gathered],
        lambda found: (
            f"rank {found[0].rank} and rank 0 do not take the same step: they differ in its "
            "number, training or evaluation, compression on or off, loss scale, learning rate, "
            f"autocast or arguments of generate (this rank is at {step_name(step)}). Run the same "
            "calls on every rank, in the same order"
        ),
    )
    row = pp_size
    firsts = [gathered[rank - rank % row] for rank in range(len(gathered))]
    same = [
        sketches_agree(one.sketch, first.sketch)
        for one, first in zip(gathered, firsts, strict=True)
    ]
    check_alike(
        [
            {"data": one.data, "elements": agrees}
            for one, agrees in zip(gathered, same, strict=True)
        ],
        lambda found: (
            f"rank {found[0].rank} and rank {found[0].first} were given different data in "
            f"{step_name(step)}: the batch, target or sample ids differ. Seed the loader's shuffle "
            "and augmentation alike on all ranks of a replica"
        ),
        group=pp_size,
    )


@contextmanager
def announcing_failure(
    mesh: Meeting, expected: Sequence[str] = ("times", "hello")
) -> Iterator[None]:
    """Runs a block before the handshake; if it fails here, the other ranks need not wait.

    Args:
        mesh: the ranks.
        expected: names of the exchanges that they may wait in.
    """
    try:
        yield
    except Exception as error:
        for what in expected:
            _say(mesh, what, {_FAILED: f"{type(error).__name__}: {error}"})
        raise


def exchange(mesh: Meeting, what: str, value: Any) -> list[Any]:
    """Values that JSON can hold, from every rank, through the store: no connection is needed.

    Raises:
        ValueError: a rank has failed before it came to this, or what it says cannot be understood
            or comes from somebody who has not the secret.
        PeerError: a rank has not come within the timeout.
    """
    keys = [f"{what}/{rank}" for rank in range(mesh.num_ranks)]
    try:
        _say(mesh, what, value)
        mesh.store.wait(keys, timedelta(seconds=mesh.timeout_s))
        said = [mesh.store.get(key) for key in keys]
    except RuntimeError as error:
        raise PeerError(_why_incomplete(mesh, keys, error)) from error
    values = [_heard(mesh, what, rank, raw) for rank, raw in enumerate(said)]
    for rank, found in enumerate(values):
        if isinstance(found, dict) and _FAILED in found:
            raise ValueError(f"rank {rank} cannot take part: {found[_FAILED]}")
    return values


def _why_incomplete(mesh: Meeting, keys: Sequence[str], error: Exception) -> str:
    """The reason why not all ranks are heard."""
    try:
        late = [str(rank) for rank, key in enumerate(keys) if not mesh.store.check([key])]
    except RuntimeError:
        late = []
    if not late:
        return (
            f"the store of the rendezvous is lost in the handshake ({first_line(str(error))}): "
            "its machine, or the connection to it, has failed"
        )
    return (
        f"rank {', '.join(late)} did not come to the handshake within {mesh.timeout_s:g} s: "
        "it has failed, was not started, or cannot reach the rendezvous"
    )


def _say(mesh: Meeting, what: str, value: Any) -> None:
    """Writes what this rank says into the store, behind its code where there is a secret."""
    text = json.dumps(value)
    code = "" if mesh.secret is None else mesh.secret.code(what, str(mesh.rank), text)
    mesh.store.set(f"{what}/{mesh.rank}", f"{code} {text}")


def _heard(mesh: Meeting, what: str, rank: int, raw: bytes) -> Any:
    """The words of a rank.

    Raises:
        ValueError: nothing that can be understood, or believed.
    """
    try:
        if len(raw) > _LONGEST:
            raise ValueError(f"{len(raw)} bytes, at most {_LONGEST} are read")
        code, _, text = raw.decode().partition(" ")
        if mesh.secret is not None and not mesh.secret.made(code, what, str(rank), text):
            raise ValueError("it does not come from somebody who has the secret")
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"rank {rank} says what this one cannot take for {what!r} ({error}): the ranks run "
            "different versions of mpcomp, or a stranger has reached the rendezvous"
        ) from error


def show_secret(mesh: Meeting, environment: Mapping[str, str] = os.environ) -> None:
    """Has all ranks show that they share a secret, before anything else that they say is read.

    First each says a random number, then a code of all these numbers and its own rank, which only
    who has the secret can make, and only for this run. What ranks say afterwards has a code too.
    Without a secret on any rank nothing is shown.

    Args:
        mesh: the ranks, before they connect.
        environment: where this rank's secret is found.

    Raises:
        ValueError: ranks have different secrets, or some have none; on every rank.
        PeerError: a rank has not come within the timeout.
    """
    try:
        own = given_secret(environment)
    except ValueError as error:
        _say(mesh, "secret/number", {_FAILED: str(error)})
        raise
    numbers = exchange(mesh, "secret/number", None if own is None else secrets.token_hex(16))
    without = [rank for rank, number in enumerate(numbers) if number is None]
    if len(without) == len(numbers):
        return
    if without:
        with_one = [rank for rank in range(len(numbers)) if rank not in without]
        raise ValueError(
            f"{_ranks(without)} showed no secret, but {_ranks(with_one)} did: set {ENVIRONMENT} or "
            f"{ENVIRONMENT_FILE} alike on every rank; if they are, somebody else has joined"
        )
    assert own is not None
    nonces = [str(number) for number in numbers]
    codes = exchange(mesh, "secret/code", own.code("rank", str(mesh.rank), *nonces))
    others = [
        rank for rank, code in enumerate(codes) if not own.made(code, "rank", str(rank), *nonces)
    ]
    if others:
        raise ValueError(
            f"{_ranks(others)} showed another secret than rank {mesh.rank} has: set {ENVIRONMENT} "
            f"or {ENVIRONMENT_FILE} alike on every rank; if they are, somebody else has joined"
        )
    mesh.secret = own.for_run(nonces)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"


def fingerprint(*values: Any) -> int:
    """A 63-bit hash of nested tensors and plain values, equal for equal values."""
    digest = hashlib.blake2b(digest_size=8)
    _feed(digest, values)
    return int.from_bytes(digest.digest(), "little") >> 1


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        _feed_text(digest, (tuple(value.shape), value.dtype))
        digest.update(struct.pack("<q", int(bit_sum(value))))
    elif isinstance(value, Mapping):
        _feed_text(digest, f"mapping of {len(value)}")
        for key in sorted(value, key=repr):
            _feed_text(digest, key)
            _feed(digest, value[key])
    elif isinstance(value, tuple | list):
        _feed_text(digest, f"sequence of {len(value)}")
        for item in value:
            _feed(digest, item)
    else:
        _feed_text(digest, value)


def _feed_text(digest: Any, value: Any) -> None:
    """Adds a value with its length, so that (1, 11) and (11, 1) are not one string of digits."""
    text = repr(value).encode()
    digest.update(f"{len(text)}:".encode() + text)


def _without_floats(value: Any, floats: list[Tensor]) -> Any:
    """``value`` with shape and dtype in place of floating-point tensors, which go to ``floats``."""
    if isinstance(value, Tensor) and value.is_floating_point():
        floats.append(value)
        return "tensor", tuple(value.shape), value.dtype
    if isinstance(value, Mapping):
        return {key: _without_floats(value[key], floats) for key in sorted(value, key=repr)}
    if isinstance(value, tuple | list):
        return [_without_floats(item, floats) for item in value]
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
