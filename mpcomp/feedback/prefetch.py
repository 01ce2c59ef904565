"""Rows read ahead: while a step computes, a thread reads what the next one will ask for.

What is read ahead is a copy of rows as they were stored when it was asked for. A row that is
stored anew in the meantime is forgotten here and read again where it lies, so reading ahead never
changes a number, only when a file is read. Everything but the reading itself happens in the
threads that call. Several of them may take rows at once::

    caller   prefetch(b) ── step a ─────────── commit: forgets rows of a ── step b: takes rows of b
    worker        └─ reads the files ──┘
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

from mpcomp.core.step import Key
from mpcomp.feedback.tables import Table

__all__ = ["ReadAhead"]

#: Batches kept: the one about to be trained on, and the one after it.
_BATCHES = 2

_Rows = tuple[Tensor, ...]


@cache
def _worker() -> ThreadPoolExecutor:
    """The one thread of this process that reads; made when first needed."""
    return ThreadPoolExecutor(1, thread_name_prefix="mpcomp-prefetch")


class _Part:
    """Rows of some keys of one batch, on their way or here."""

    def __init__(self, number: int, rows: Future[_Rows]) -> None:
        self.number = number
        self.rows = rows


class ReadAhead:
    """Rows that are read ahead for one end.

    Args:
        tables: where the rows lie.
        device: of the link. Rows for another than the CPU wait in page-locked memory.
    """

    def __init__(self, tables: Sequence[Table], device: torch.device) -> None:
        self._tables = list(tables)
        self._pinned = device.type == "cuda"
        self._places: dict[Key, tuple[_Part, int]] = {}
        self._running: list[_Part] = []
        self._batches = 0
        self._taking = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._running)

    def begin(self, parts: Iterable[tuple[Sequence[Key], Sequence[int]]]) -> None:
        """Begins to read one batch, in parts (keys and their slots) that are used together.

        Raises:
            OSError: as `check`.
        """
        self.check()
        self._batches += 1
        oldest = self._batches - _BATCHES
        self._places = {k: at for k, at in self._places.items() if at[0].number > oldest}
        for part in self._running:
            if part.number <= oldest:
                part.rows.cancel()
        self._running = [part for part in self._running if part.number > oldest]
        for keys, slots in parts:
            if keys:
                rows = _worker().submit(_read, self._tables, list(slots), self._pinned)
                part = _Part(self._batches, rows)
                self._running.append(part)
                self._places.update((key, (part, i)) for i, key in enumerate(keys))

    def forget(self, keys: Iterable[Key]) -> None:
        """Forgets keys whose rows are about to be stored anew."""
        for key in keys:
            self._places.pop(key, None)

    def clear(self) -> None:
        """Forgets everything."""
        for part in self._running:
            part.rows.cancel()
        self._running.clear()
        self._places.clear()

    def check(self) -> None:
        """Raises what went wrong in the thread, and forgets everything: it is then read anew."""
        for part in self._running:
            if part.rows.done() and (error := part.rows.exception()) is not None:
                self.clear()
                raise error

    def take(self, keys: Sequence[Key], slots: Sequence[int]) -> _Rows:
        """The rows of ``keys``, waiting for those under way, reading those that were forgotten.

        Raises:
            OSError: a file cannot be read; also where that was found out ahead.
        """
        with self._taking:
            return self._taken(keys, slots)

    def _taken(self, keys: Sequence[Key], slots: Sequence[int]) -> _Rows:
        places = [self._places.pop(key, None) for key in keys]
        wanted: dict[_Part, tuple[list[int], list[int]]] = {}  # of a part: rows, and where they go
        late: list[int] = []
        for i, place in enumerate(places):
            if place is None:
                late.append(i)
            else:
                rows, where = wanted.setdefault(place[0], ([], []))
                rows.append(place[1])
                where.append(i)
        for part in wanted:
            part.rows.exception()  # waits
        self.check()
        live = {id(part) for part, _ in self._places.values()}
        self._running = [p for p in self._running if id(p) in live or not p.rows.done()]
        if len(wanted) == 1 and not late:
            (part, (rows, _)), *_ = wanted.items()
            held = part.rows.result()
            if rows == list(range(held[0].shape[0])):
                return held
        found = _read(self._tables, [slots[i] for i in late], self._pinned) if late else ()
        joined = []
        for number, table in enumerate(self._tables):
            shape = (len(keys), *table.row_shape)
            out = torch.empty(shape, dtype=table.dtype, pin_memory=self._pinned)
            for part, (rows, where) in wanted.items():
                out[torch.tensor(where)] = part.rows.result()[number][torch.tensor(rows)]
            if late:
                out[torch.tensor(late)] = found[number]
            joined.append(out)
        return tuple(joined)


def _read(tables: Sequence[Table], slots: Sequence[int], pinned: bool) -> _Rows:
    return tuple(table.read(slots, pinned=pinned) for table in tables)
