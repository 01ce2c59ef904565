"""Coding in the background: messages are coded beside the stages, to the bits of coding in turn.

What a stage gives is encoded and sent while the next microbatch runs, and what it will ask for is
decoded before that. Each direction of a cut has a thread, which does one message after the other::

    stages            F0  F1  F2  F3  ....  B0  F4  B1         of the first stage
    boundary 0 act        e0  e1  e2  e3        e4
    boundary 0 grad                       d0    d1             e, d: encodes, decodes

A message depends on none of its step: what is remembered is read as the steps before have left it,
and random numbers are drawn by what they are for. What asks autograd or the default generators
stays with the stages. Waits are theirs, too: a message has as long to come as it has when a stage
itself waits for it, from the moment on when one does.

The first error ends all of it. It is raised where a stage next waits for a message, or at the end,
when nothing is under way any more.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Any, Final

import torch
from torch import Tensor

from mpcomp.comm.mesh import ProcessMesh
from mpcomp.core.trace import BESIDE
from mpcomp.links.boundary import Crossing

__all__ = ["Background"]

#: Messages of a direction that are decoded before a stage asks for them, beside the one it has.
_AHEAD: Final = 2
#: The most that the end of a process waits for a thread that waits for a message.
_PART_S: Final = 2.0

_Queue = SimpleQueue[Callable[[], None] | None]


class _Over(Exception):
    """Something has failed, so that what was to be done is of no use."""


class _Expected:
    """A message that is to come, and what it says."""

    def __init__(self) -> None:
        self.arrived = self.decoded = False
        self.lost: RuntimeError | None = None  # the transport's words
        self.value: Any = None
        self.when: Any = None  # it is there on an accelerator


class Background:
    """The threads of one rank that code its messages.

    Args:
        mesh: the ranks; told where this one is when an error is raised.
    """

    def __init__(self, mesh: ProcessMesh) -> None:
        self._mesh = mesh
        #: Guards all that follows, and tells of its changes.
        self._changed = threading.Condition()
        self._threads: dict[str, tuple[threading.Thread, _Queue]] = {}
        self._given = self._at_work = 0
        self._error: tuple[str, BaseException] | None = None
        self._over = False
        self._expected: dict[tuple[str, int], _Expected] = {}
        self._decoded: defaultdict[str, int] = defaultdict(int)  # and not taken, by link
        #: All work on an accelerator, in the order in which it is given.
        self._stream: Any = None
        if mesh.device.type == "cuda":
            self._stream = torch.cuda.Stream(mesh.device)  # type: ignore[no-untyped-call]
        self._begun: Any = None
        weakref.finalize(self, _end, self._threads)

    # -- the thread of the stages ---------------------------------------------------------------

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """A context of a step, at whose end nothing is under way; the first error is raised.

        Raises:
            Exception: of what was given.
        """
        self._begun = self._event()
        try:
            yield
            self._wait(lambda: not self._given)
        except BaseException as error:
            with self._changed:
                self._over = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._at_work)
            # Others wait for messages, which end with the connections of ranks that now fail, too.
            atexit.register(_end, self._threads, _PART_S)
            if isinstance(error, Exception):
                self._check()
            raise
        if self._stream is not None:
            torch.cuda.current_stream(self._mesh.device).wait_stream(self._stream)

    def give(
        self, crossing: Crossing, where: str, work: Callable[[], None], x: Tensor | None
    ) -> None:
        """Has something done, after all that was given of this direction before.

        Args:
            crossing: the direction.
            where: what this is, for errors, as in "stage 1, microbatch 3, forward".
            work: the function.
            x: the tensor that it reads, if any, which nobody writes to any more.
        """
        if self._stream is not None and x is not None:
            x.record_stream(self._stream)
        self._put(crossing, where, work, after=self._event())

    def take(self, crossing: Crossing, microbatch: int) -> Any:
        """Waits for what a message says, which was expected; see `expect`.

        Raises:
            PeerLost: it did not come in time, or its sender is gone.
        """
        key = crossing.link.name, microbatch
        self._wait(lambda: key in self._expected)
        message = self._expected.pop(key)
        crossing.channel.until(microbatch, partial(self._arrival, message))
        self._wait(lambda: message.decoded)
        with self._changed:
            self._decoded[crossing.link.name] -= 1
            self._changed.notify_all()
        if message.when is not None:
            stream = torch.cuda.current_stream(self._mesh.device)
            stream.wait_event(message.when)
            for each in message.value if isinstance(message.value, tuple) else (message.value,):
                if isinstance(each, Tensor):
                    each.record_stream(stream)
        return message.value

    def _arrival(self, message: _Expected, seconds: float) -> None:
        """Returns when a message has arrived, or something here has failed."""
        with self._changed:
            self._changed.wait_for(lambda: message.arrived or self._error is not None, seconds)
        if self._error is not None:
            return  # is no fault of the transport
        if message.lost is not None:
            raise message.lost
        if not message.arrived:
            raise RuntimeError(f"Timed out waiting {seconds * 1000:.0f}ms for a message")

    def _wait(self, done: Callable[[], bool]) -> None:
        """Waits for what is done here; raises the first error."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or done())
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            self._mesh.where, error = self._error
            raise error

    # -- any thread -----------------------------------------------------------------------------

    def expect(
        self, crossing: Crossing, microbatch: int, where: str, decode: Callable[[], Any]
    ) -> None:
        """Has a message decoded that was posted, once it has arrived.

        Args:
            crossing: the direction, whose messages are taken in the order of expecting them.
            microbatch: number of the message.
            where: as of `give`.
            decode: gets the message from its channel; gives what `take` returns.
        """
        name, message = crossing.link.name, _Expected()

        def arrive() -> None:
            if self._is_over:
                raise _Over
            try:
                crossing.channel.arrive(microbatch)
            except RuntimeError as error:
                message.lost = error
            with self._changed:
                message.arrived = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_over or self._decoded[name] < _AHEAD)
            if message.lost is not None:
                raise _Over

        def work() -> None:
            message.value = decode()
            if self._stream is not None:
                message.when = self._stream.record_event()
            with self._changed:
                message.decoded = True
                self._decoded[name] += 1
                self._changed.notify_all()

        with self._changed:
            self._expected[name, microbatch] = message
            self._changed.notify_all()
        self._put(crossing, where, work, after=self._begun, first=arrive)

    def _put(
        self,
        crossing: Crossing,
        where: str,
        work: Callable[[], None],
        *,
        after: Any,
        first: Callable[[], None] | None = None,
    ) -> None:
        name = crossing.link.name
        with self._changed:
            self._given += 1
            if name not in self._threads:
                own: _Queue = SimpleQueue()
                thread = threading.Thread(
                    target=_serve, args=(own,), name=f"mpcomp {name}", daemon=True
                )
                self._threads[name] = thread, own
                thread.start()
            _, queue = self._threads[name]
        # Whether a tensor may be written to in place depends on the mode that it is made in.
        queue.put(partial(self._do, where, work, after, first, torch.is_grad_enabled()))

    def _event(self) -> Any:
        """All that this thread has launched on an accelerator so far."""
        if self._stream is None:
            return None
        return torch.cuda.current_stream(self._mesh.device).record_event()

    @property
    def _is_over(self) -> bool:
        return self._over or self._error is not None

    # -- the threads here -----------------------------------------------------------------------

    def _do(
        self,
        where: str,
        work: Callable[[], None],
        after: Any,
        first: Callable[[], None] | None,
        grad: bool,
    ) -> None:
        self._mesh.does_beside(where)
        try:
            if first is not None:  # a wait, during which a step that has failed may end
                first()
            with self._working(), torch.set_grad_enabled(grad), self._after(after):
                work()
        except _Over:
            pass
        except BaseException as error:
            with self._changed:
                if not self._is_over:
                    self._error = where, error
        finally:
            with self._changed:
                self._given -= 1
                self._changed.notify_all()

    @contextmanager
    def _working(self) -> Iterator[None]:
        with self._changed:
            if self._is_over:
                raise _Over
            self._at_work += 1
        try:
            yield
        finally:
            with self._changed:
                self._at_work -= 1
                self._changed.notify_all()

    @contextmanager
    def _on_stream(self, event: Any) -> Iterator[None]:
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(event)
            yield

    def _after(self, event: Any) -> AbstractContextManager[None]:
        """A context in which an accelerator computes beside the stages, after their event."""
        return nullcontext() if self._stream is None else self._on_stream(event)


def _serve(queue: _Queue) -> None:
    """A thread's loop, which keeps nobody alive."""
    BESIDE.here = True
    while (work := queue.get()) is not None:
        work()
        del work


def _end(threads: dict[str, tuple[threading.Thread, _Queue]], seconds: float = 0.0) -> None:
    """Has threads end; waits for each as long as is said.

    A thread that comes out of a wait while the interpreter ends would abort the process.
    """
    for _, queue in threads.values():
        queue.put(None)
    for thread, _ in threads.values():
        if seconds:
            thread.join(seconds)
