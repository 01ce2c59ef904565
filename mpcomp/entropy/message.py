"""A message of coded symbols: written as a whole, and read from its beginning.

kind, what is ahead, tables (`mpcomp.entropy.frequencies`), ANS states, ANS words, what is behind
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpcomp.entropy import ans
from mpcomp.entropy.frequencies import Tables, all_alike, costs_from, starts_of

__all__ = ["FEW", "Coder", "Message", "Place", "Reader", "damaged"]

#: Integers for which tables of several contexts would cost more than they save.
FEW = 4096
_STATES = 4  # of more; as many bytes are lost


class Place(NamedTuple):
    """Places of symbols among contexts and tables, as `ans.push` takes them.

    Attributes:
        rows: class of each row, uint8 [rows].
        columns: classes of columns, uint8 [1, columns], or of each symbol [rows, columns].
        table_of: the table of each context, int64.
    """

    rows: NDArray[np.uint8]
    columns: NDArray[np.uint8]
    table_of: NDArray[np.int64]

    @classmethod
    @functools.lru_cache(256)
    def alike(cls, table: int, count: int) -> Place:
        """A row of symbols, which all are coded by one table; not to be changed."""
        columns = np.zeros((1, count), np.uint8)
        return cls(np.zeros(1, np.uint8), columns, np.full(1, table, np.int64))

    def says_all(self, starts: NDArray[np.int64]) -> bool:
        """Whether all symbols are coded by a table that has zero alone, which takes no bits.

        Args:
            starts: as of `ans.divisors`.
        """
        return len(self.table_of) == 1 and bool(starts[self.table_of[0], 1] == ans.TOTAL)


@dataclass(frozen=True)
class Message:
    """A way to say integers.

    Attributes:
        ahead: the first bytes.
        tables: of symbols.
        coded: symbols, int16 [rows, columns], with their places; the last ones say the integers.
        num_behind: number of the last bytes.
        behind: gives those; only the way that is chosen is asked.
    """

    ahead: bytes
    tables: Tables
    coded: Sequence[tuple[NDArray[np.int16], Place]]
    num_behind: int = 0
    behind: Callable[[], bytes] = bytes

    @property
    def num_bytes(self) -> float:
        """Its length, nearly."""
        return len(self.ahead) + self.tables.num_bytes + self.num_behind

    def parts(self) -> list[bytes]:
        """All of it but the kind."""
        costs = self.tables.costs
        starts = starts_of(costs)
        # A word of each symbol at most.
        out = np.empty(2 * sum(symbols.size for symbols, _ in self.coded), np.uint8)
        at = len(out)
        states = np.full(_num_states(self.coded[-1][0].size, costs), ans.LOWEST, np.int64)
        divisors = ans.divisors(starts)
        for symbols, place in reversed(self.coded):
            if not place.says_all(starts):
                at = ans.push(symbols, *place, *divisors, states, out, at)
        coded = states.astype("<u4").tobytes() + out[at:].tobytes()
        return [self.ahead, self.tables.to_bytes(), coded, self.behind()]


class Coder(NamedTuple):
    """The state of decoding, as `ans.pop` takes it.

    Attributes:
        starts: sums of frequencies, int64 [tables, symbols + 1].
        first: `ans.buckets` of these.
        states: int64; they change.
    """

    starts: NDArray[np.int64]
    first: NDArray[np.uint8]
    states: NDArray[np.int64]

    def check_end(self) -> None:
        """Raises RuntimeError unless all is said, and states are as encoding began with them."""
        if (self.states != ans.LOWEST).any():
            raise damaged("a state that no encoder begins with")


class Reader:
    """A message, read from its beginning behind its kind.

    Attributes:
        data: all of it, uint8.
    """

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self.data = data
        self._at = 1

    @property
    def at(self) -> int:
        """The next byte."""
        return self._at

    def array(self, dtype: str, count: int) -> NDArray[Any]:
        """The next numbers."""
        start = self._at
        self.go_to(start + np.dtype(dtype).itemsize * count)
        return np.frombuffer(self.data, dtype, count, start)

    def go_to(self, at: int) -> None:
        """Reads on from this byte.

        Raises:
            RuntimeError: there are not so many, or it is below zero.
        """
        if not 0 <= at <= len(self.data):
            raise damaged("it ends too early")
        self._at = at

    def costs(self, num_tables: int) -> NDArray[np.uint8]:
        """Costs of the next tables, as of `mpcomp.entropy.frequencies.Tables`."""
        try:
            costs, self._at = costs_from(self.data, self._at, num_tables)
        except ValueError as error:
            raise damaged(str(error)) from error
        return costs

    def coder(
        self, costs: NDArray[np.uint8], num_integers: int, num_tables: int | None = None
    ) -> Coder:
        """The next states.

        Args:
            costs: of all tables.
            num_integers: of the symbols that are coded by these states.
            num_tables: of those symbols, the first ones; None for all.
        """
        starts = starts_of(costs[:num_tables])
        states = self.array("<u4", _num_states(num_integers, costs)).astype(np.int64)
        if (states < ans.LOWEST).any():
            raise damaged("an impossible state")
        return Coder(starts, ans.buckets(starts), states)

    def check_end(self, num_bytes: int) -> None:
        """Raises RuntimeError unless so many bytes are left."""
        if len(self.data) - self._at != num_bytes:
            raise damaged(f"{len(self.data) - self._at} bytes left, expected {num_bytes}")


def damaged(what: str) -> RuntimeError:
    """The error of a message that no encoder makes."""
    return RuntimeError(
        f"a coded message that says nothing ({what}): it is damaged, or the two ends have "
        "different methods"
    )


def _num_states(num_integers: int, costs: NDArray[np.uint8]) -> int:
    """States for so many integers, one if the tables say all of them."""
    return 1 if num_integers < FEW or all_alike(costs) else _STATES
