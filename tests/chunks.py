"""Many cases in few starts of processes: each start takes several, when the first is asked for."""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

_NO_PARAMETERS = SimpleNamespace(params={})


def asked_for(request: pytest.FixtureRequest, name: str) -> set[Any]:
    """Values of a parameter in the tests of this run, which may leave out slow ones."""
    return {
        item.callspec.params[name]
        for item in request.session.items
        if item.module is request.module
        and request.fixturename in item.fixturenames
        and name in getattr(item, "callspec", _NO_PARAMETERS).params
    }


class Chunks(Mapping[Any, list[Any]]):
    """What each rank returned, by case.

    Args:
        ranks: the fixture.
        function: called in each process with a list of cases; returns as many results.
        num_ranks: number of processes.
        cases: by key, as they are handed to the function.
        args: further arguments of the function.
        size: cases of one start.
        wanted: keys of the cases that this run will ask for; None: of all.
    """

    def __init__(
        self,
        ranks: Callable[..., list[Any]],
        function: Callable[..., list[Any]],
        num_ranks: int,
        cases: Mapping[Any, Any],
        *args: Any,
        size: int,
        wanted: Collection[Any] | None = None,
    ) -> None:
        self._call = lambda chunk: ranks(function, num_ranks, chunk, *args)
        self._cases = {k: v for k, v in cases.items() if wanted is None or k in wanted}
        self._size = size
        self._results: dict[Hashable, list[Any]] = {}

    def __getitem__(self, key: Any) -> list[Any]:
        if key not in self._results:
            keys = list(self._cases)
            start = keys.index(key) // self._size * self._size
            chunk = keys[start : start + self._size]
            found = self._call([self._cases[k] for k in chunk])
            for i, k in enumerate(chunk):
                self._results[k] = [of_rank[i] for of_rank in found]
        return self._results[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._cases)

    def __len__(self) -> int:
        return len(self._cases)
