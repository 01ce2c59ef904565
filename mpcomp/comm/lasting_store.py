"""A client of the rendezvous' store that outlives its connection.

torch's has one connection: once that is reset, or away for longer than TCP's patience, every
question is an error. One whose other end is silent waits for its answer without end. This one
connects again and asks again, so a question must be one that may be asked twice: ``set``, ``get``
and ``check``, but not ``add``.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from mpcomp.comm.answers import NoAnswer, answered, let_go
from mpcomp.comm.failures import PeerError, first_line

__all__ = ["LastingStore"]

_T = TypeVar("_T")

#: Seconds in which a question is answered; else the connection is taken for lost.
ANSWER_S: float = 30.0
#: Seconds that it may take where the process is to end.
_HURRY_S: Final = 2.0
#: Seconds before a lost connection is made again.
_PAUSE_S: Final = 0.5
#: The key of a name that a store is given once.
_NAME: Final = "mpcomp/name of this store"


class LastingStore(Store):
    """A store of the rendezvous, which this process asks, or whose host it is.

    Any question raises PeerError, which names the host, if there is no answer in time.

    Args:
        host: of the store.
        port: of the store.
        is_host: whether the store itself is to be in this process.
        say: told once whenever the connection is lost.

    Attributes:
        is_host: as given.
        patience_s: seconds in which a connection may be made again; it is tried once anyway.
        hurried: says that this process is to end.

    Raises:
        RuntimeError: the port cannot be had.
    """

    def __init__(self, host: str, port: int, *, is_host: bool, say: Callable[[str], None]) -> None:
        super().__init__()
        self.is_host = is_host
        self.patience_s = 0.0
        self.hurried: Callable[[], bool] = lambda: False
        self._host, self._port, self._say = host, port, say
        self._name = ""
        self._lost = False
        self._client: TCPStore | None = None
        self._server = self._open(is_host=True) if is_host else None

    def set(self, key: str, value: str) -> None:
        def question(store: TCPStore) -> None:
            store.set(key, value)
            store.check([key])  # `set` waits for nothing: into a connection that broke, it is lost

        self._ask(question)

    def get(self, key: str) -> bytes:
        return self._ask(lambda store: store.get(key))

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(lambda store: store.check(list(keys)))

    def _ask(self, question: Callable[[TCPStore], _T]) -> _T:
        begin = time.monotonic()

        def asked() -> tuple[TCPStore, _T]:
            client = self._client or self._connect()
            return client, question(client)

        def is_too_long() -> bool:
            return self.hurried() and time.monotonic() - begin > _HURRY_S

        while True:
            try:
                self._client, answer = answered(asked, ANSWER_S, unless=is_too_long)
            except (NoAnswer, dist.DistError) as error:
                self._lose(error)
                seconds = time.monotonic() - begin
                if is_too_long() or seconds > self.patience_s:
                    raise PeerError(
                        f"the store of the rendezvous at {self._host}:{self._port} has not "
                        f"answered for {seconds:.0f} s ({first_line(str(error))}): its machine "
                        "has failed, or cannot be reached from here"
                    ) from error
                time.sleep(_PAUSE_S)
            else:
                self._lost = False
                return answer

    def _lose(self, error: Exception) -> None:
        self._client = None
        if isinstance(error, NoAnswer):
            let_go(error.thread, self._port)
        if not self._lost:
            self._lost = True
            reason = first_line(str(error))
            at = f"{self._host}:{self._port}"
            self._say(f"the rendezvous at {at} is out of reach ({reason}): trying on")

    def _connect(self) -> TCPStore:
        client = self._open()
        # A new word each time: this process may have named the former store, and now this one.
        name = client.compare_set(_NAME, "", secrets.token_hex(8)).decode()
        if self._name and name != self._name:
            raise PeerError(
                f"the store of the rendezvous at {self._host}:{self._port} is another than "
                "before: the run was started anew there; start it anew here as well"
            )
        self._name = name
        return client

    def _open(self, is_host: bool = False) -> TCPStore:
        return TCPStore(
            self._host,
            self._port,
            is_master=is_host,
            timeout=timedelta(seconds=ANSWER_S),
            wait_for_workers=False,
            multi_tenant=True,
        )
