"""The ranks of a run: their place in the mesh of pipelines × replicas, and small collectives.

    replica 0   rank 0 ── rank 1 ── rank 2      a row is a pipeline
    replica 1   rank 3 ── rank 4 ── rank 5      a column holds the same stages

Everything here is small and on the CPU, over a gloo group of its own; nothing is pickled. What
needs other ranks only through these takes a `Mesh`, and a `LocalMesh` where there are none.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

from mpcomp.comm.all_gather import LARGEST_RECORD, AllGather
from mpcomp.comm.clocks import Offset, offset_to_first
from mpcomp.comm.failures import Faults, PeerError, Waits, first_line, grace_of
from mpcomp.comm.from_first import FromFirst
from mpcomp.comm.loader_workers import attend_to_the_rank_alone
from mpcomp.comm.secret import Secret

__all__ = [
    "ATTEMPT",
    "HEALING",
    "LocalMesh",
    "Mesh",
    "ProcessMesh",
    "attempt_of_launcher",
    "connecting",
    "launched",
    "meet",
]

#: Environment variable with the number of an attempt at a run (`mpcomp.heal`): ranks that begin
#: again meet under other keys than those that are gone.
ATTEMPT: Final = "MPCOMP_ATTEMPT"

#: Environment variable with the number of the call of `mpcomp.heal`, as a script may have several.
HEALING: Final = "MPCOMP_HEALING"

#: Pipelines made so far in this process: all ranks make them in the same order.
_counter = itertools.count()

#: Bytes of an object that one rank gives to all.
_LARGEST_OBJECT = 1 << 30

#: What a collective is for that is given no other purpose, in errors.
_END_OF_STEP = "end of a step"


def launched() -> bool:
    """Whether this process is one of several: by torchrun, or in an initialised group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def meet(timeout_s: float) -> tuple[Store, int, int]:
    """The store that torchrun's processes share, this one's rank, and their number.

    Raises:
        ValueError: this process was not started by torchrun.
        RuntimeError: the store does not answer.
    """
    if "RANK" not in os.environ:
        raise ValueError(
            "engine='distributed' needs several processes: start the script with torchrun, or "
            "call torch.distributed.init_process_group before mpcomp.pipeline"
        )
    store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    # The store outlives the processes: what an attempt that failed has left there, such as
    # addresses, must not be taken for that of this one.
    attempts = [os.environ.get(HEALING, "0"), os.environ.get(ATTEMPT, "0"), attempt_of_launcher()]
    return PrefixStore(f"attempt/{'/'.join(attempts)}", store), rank, size


def attempt_of_launcher() -> str:
    """The number of torchrun's attempt, alike on all ranks; machines count theirs differently."""
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return "0"


@contextmanager
def connecting(rank: int, timeout_s: float) -> Iterator[None]:
    """A context in which this rank makes a group together with others.

    Raises:
        PeerError: it could not be connected to them.
    """
    try:
        yield
    except RuntimeError as error:
        raise PeerError(
            f"rank {rank} could not be connected to the others within {timeout_s:g} s "
            f"({first_line(str(error))}): one of them has failed meanwhile, or their machines "
            "cannot reach each other"
        ) from error


class Mesh(ABC):
    """The ranks of a run, as one of them sees them; all make the same calls in the same order.

    Attributes:
        device: where tensors of this rank are.
        rank: of this process.
        num_ranks: of processes.
        num_replicas: number of pipelines.
        replica: which of them this rank is in.
        pp_size: ranks of one pipeline.
        place: this rank's number among those.
        where: what this rank is doing, for errors, as in "stage 1, microbatch 3, forward".
    """

    device: torch.device
    rank = 0
    num_ranks = 1
    num_replicas = 1
    replica = 0
    pp_size = 1
    place = 0
    where = "start"

    @abstractmethod
    def all_reduce_sum(self, values: Sequence[float], what: str = "") -> list[float]:
        """Elementwise sums over all ranks, in fp64.

        Args:
            values: as many on each rank.
            what: is waited for, for errors, as in all collectives here.
        """

    @abstractmethod
    def all_gather(self, values: Sequence[int], what: str) -> list[list[int]]:
        """Whole numbers of 64 bits, as many on each rank, from every rank, by rank."""

    @abstractmethod
    def all_gather_object(self, value: Any, what: str = "figures of all ranks") -> list[Any]:
        """A value that JSON can hold, from every rank, by rank."""

    @abstractmethod
    def broadcast(self, x: Tensor, source: int, what: str) -> None:
        """Overwrites ``x``, on the CPU and of the same shape on all ranks, by that of one rank."""

    @abstractmethod
    def broadcast_object(self, value: Any, source: int, what: str) -> Any:
        """A value that JSON can hold, from one rank to all."""

    @abstractmethod
    def broadcast_tensor(self, x: Tensor | None, source: int, what: str) -> Tensor:
        """A tensor of any shape from one rank to all, on each one's device."""

    @abstractmethod
    def whole(self, x: Tensor, what: str) -> Tensor:
        """The whole of a tensor of which each replica holds a piece; any other as it is.

        All replicas call this for the former.
        """

    @abstractmethod
    def abort_all_on_error(self, where: str = "") -> AbstractContextManager[None]:
        """A context for whatever needs other ranks, or is needed by them.

        What fails in it on one rank ends the pipeline on all of them, as messages that were begun
        cannot be taken back. What can be, needs `mpcomp.comm.agreement.SharedOutcome` instead.

        Args:
            where: sets `where`, if given.

        Raises:
            PeerError: another rank failed, or has failed before.
        """

    def clock_offset(self) -> Offset:
        """The first rank's clock against that of this one; every rank calls it."""
        return Offset()

    def broadcast_in_pipelines(self, x: Tensor | None, place: int, what: str) -> Tensor:
        """In each pipeline a tensor from its rank at ``place`` to all ranks of it."""
        with self.abort_all_on_error():
            for replica in range(self.num_replicas):
                shared = self.broadcast_tensor(x, replica * self.pp_size + place, what)
                if replica == self.replica:
                    own = shared
        return own

    def all_gather_tensors(self, tensors: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
        """Tensors under distinct names from the ranks of the first pipeline, on every rank."""
        gathered: dict[str, Tensor] = {}
        with self.abort_all_on_error():
            for rank in range(self.pp_size):
                for name in self.broadcast_object(list(tensors), rank, f"names of {what}"):
                    own = tensors[name] if rank == self.rank else None
                    gathered[name] = self.broadcast_tensor(own, rank, what)
        return gathered

    def gather_scalars(
        self, values: Mapping[str, Tensor], names: Sequence[str], *, apart: bool = False
    ) -> Tensor:
        """One number for each name, from all ranks of a pipeline, in the order of names: [n].

        Pipelines are given the mean of theirs, unless they are apart from each other.

        Args:
            values: 0-d tensors by the names that this rank has; some may be left out.
            names: all names, alike on all ranks.
            apart: whether each pipeline is given its own.
        """
        own = [values[name].item() if name in values else 0.0 for name in names]
        there = [float(name in values) for name in names]
        places, place = (self.num_replicas, self.replica) if apart else (1, 0)
        mine = slice(place * len(names), (place + 1) * len(names))
        placed = [0.0] * (places * len(names))
        placed[mine] = own
        sums = self.all_reduce_sum([*placed, *there])
        kept = [
            total / (self.num_replicas // places)
            for total, count in zip(sums[mine], sums[len(placed) :], strict=True)
            if count
        ]
        dtype = next((value.dtype for value in values.values()), torch.float32)
        return torch.tensor(kept, dtype=dtype, device=self.device)


class LocalMesh(Mesh):
    """One rank, which has all there is already.

    Args:
        device: where outputs and losses are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def all_reduce_sum(self, values: Sequence[float], what: str = "") -> list[float]:
        return list(values)

    def all_gather(self, values: Sequence[int], what: str) -> list[list[int]]:
        return [list(values)]

    def all_gather_object(self, value: Any, what: str = "") -> list[Any]:
        return [value]

    def broadcast(self, x: Tensor, source: int, what: str) -> None:
        pass

    def broadcast_object(self, value: Any, source: int, what: str) -> Any:
        return value

    def broadcast_tensor(self, x: Tensor | None, source: int, what: str) -> Tensor:
        assert x is not None
        return x

    def whole(self, x: Tensor, what: str) -> Tensor:
        return x

    def abort_all_on_error(self, where: str = "") -> AbstractContextManager[None]:
        return nullcontext()

    def all_gather_tensors(self, tensors: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
        return dict(tensors)

    def gather_scalars(
        self, values: Mapping[str, Tensor], names: Sequence[str], *, apart: bool = False
    ) -> Tensor:
        found = [values[name].to(self.device) for name in names if name in values]
        return torch.stack(found) if found else torch.zeros(0, device=self.device)


class ProcessMesh(Mesh):
    """Several processes, over torch.distributed.

    Until `connect` nothing but the rendezvous' store is reached (`mpcomp.comm.handshake`).

    Args:
        replicas: number of pipelines.
        timeout_s: after which ranks that wait in vain have ended.
        device: of this rank.

    Raises:
        ValueError: the ranks cannot be shared out among so many replicas.
    """

    def __init__(self, replicas: int, timeout_s: float, device: torch.device) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        if replicas < 1 or self.num_ranks % replicas:
            raise ValueError(
                f"replicas={replicas} with {self.num_ranks} ranks: expected a divisor of "
                f"{self.num_ranks}, as every replica is a whole pipeline"
            )
        self.num_replicas = replicas
        self.pp_size = self.num_ranks // replicas
        self.replica, self.place = divmod(self.rank, self.pp_size)
        self.device = device
        self.timeout_s = timeout_s
        #: Of a single wait; the rest is for finding out why it was in vain.
        self.wait_s = timeout_s - grace_of(timeout_s)
        store = dist.distributed_c10d._get_default_store()
        self.store: Store = PrefixStore(f"mpcomp/{next(_counter)}", store)
        #: Of this run, where ranks share a secret (`mpcomp.comm.handshake.show_secret`).
        self.secret: Secret | None = None
        self.waits = Waits()
        self._groups: list[dist.ProcessGroup] = []
        self._closing: list[Callable[[], None]] = []
        self._guarded = False  # whether a `abort_all_on_error` is under way
        self._where = Mesh.where
        self._beside = threading.local()
        self._telling: FromFirst | None = None

    @property
    def where(self) -> str:
        """The work of this rank; in a thread beside its stages, the work of that."""
        where: str = getattr(self._beside, "where", self._where)
        return where

    @where.setter
    def where(self, where: str) -> None:
        self._where = where

    def does_beside(self, where: str) -> None:
        """Sets `where` for this thread alone."""
        self._beside.where = where

    def connect(self, names: Sequence[str]) -> None:
        """Makes the groups; all ranks together, once they agree that they want the same.

        Args:
            names: of all ranks, for errors, as in "rank 1 (stage 1)".
        """
        attend_to_the_rank_alone()  # else workers hold the connections of a rank that is killed
        everyone = torch.arange(self.num_ranks).reshape(self.num_replicas, -1)
        self._control = self._group(everyone.flatten().tolist(), backend="gloo")
        self._records = AllGather(self._control, self.wait_s)
        pipes = [self._group(row.tolist()) for row in everyone]
        columns = [self._group(column.tolist()) for column in everyone.T]
        self.pipe_group = pipes[self.replica]
        self.replica_group = columns[self.place]
        self.device_mesh = DeviceMesh.from_group(
            [self.replica_group, self.pipe_group],
            self.device.type,
            mesh=everyone,
            mesh_dim_names=("replica", "pipe"),
        )
        self._faults = Faults(
            self.store,
            self.rank,
            self.num_ranks,
            self.timeout_s,
            self.waits,
            name_of=lambda rank: names[rank],
            where=lambda: self.where,
            close=self.close,
        )

    @property
    def backend(self) -> str:
        """Name of what torch moves tensors of this mesh's device by, such as "gloo" or "nccl"."""
        name: str = self.pipe_group._get_backend(self.device).name()
        return name

    def pair(self, a: int, b: int, backend: str | None = None) -> dist.ProcessGroup | None:
        """A group of two places of every pipeline; None where this rank is neither.

        All ranks call this in the same order.

        Args:
            a: one place.
            b: the other.
            backend: of the group; None for the one of all ranks.
        """
        own = None
        for row in range(self.num_replicas):
            ranks = [row * self.pp_size + place for place in (a, b)]
            group = self._group(sorted(ranks), backend)
            if self.rank in ranks:
                own = group
        return own

    def rank_at(self, place: int) -> int:
        """The rank at a place of this rank's own pipeline."""
        return self.replica * self.pp_size + place

    def _group(self, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
        group = self._new(ranks, backend)
        if self.rank in ranks:
            self._groups.append(group)
        return group

    def _new(self, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
        with connecting(self.rank, self.wait_s):
            group: dist.ProcessGroup = dist.new_group(
                list(ranks), backend=backend, timeout=timedelta(seconds=self.wait_s)
            )
        return group

    def close(self) -> None:
        """Drops all connections, so that ranks that wait for this one need not wait any longer.

        A socket closes when nothing refers to its group any more, not even a pending receive in
        the frame of a traceback.
        """
        for close in self._closing:
            close()
        _destroy(self._groups)
        self._telling = None
        for name in ("_control", "_records", "pipe_group", "replica_group", "device_mesh"):
            if hasattr(self, name):
                delattr(self, name)
        gc.collect()

    def on_close(self, close: Callable[[], None]) -> None:
        """Has `close` call this before it closes what is here."""
        self._closing.append(close)

    def destroy_with(self, owner: object) -> None:
        """Destroys the groups when ``owner`` is no more: they have a thread and sockets each."""
        weakref.finalize(owner, _destroy, self._groups).atexit = False

    # -- collectives -----------------------------------------------------------------------------

    def all_reduce_sum(self, values: Sequence[float], what: str = "") -> list[float]:
        total = torch.tensor(values, dtype=torch.float64)
        with self._collective(what or _END_OF_STEP, "" if what else _END_OF_STEP):
            if total.nbytes <= LARGEST_RECORD:
                total = self._records(total).sum(dim=0)  # in the same order on every rank
            else:
                dist.all_reduce(total, group=self._control)
        result: list[float] = total.tolist()
        return result

    def all_gather(self, values: Sequence[int], what: str) -> list[list[int]]:
        return self.announce(values, what)()

    def announce(self, values: Sequence[int], what: str) -> Callable[[], list[list[int]]]:
        """`all_gather` in two parts: sends, and gives what waits for the other ranks."""
        own = torch.tensor(list(values), dtype=torch.int64)
        with self.abort_all_on_error(), self.waits.leaving(what):
            records = self._records.begin(own)

        def gathered() -> list[list[int]]:
            with self._collective(what):
                found: list[list[int]] = records().tolist()
            return found

        return gathered

    def all_gather_object(self, value: Any, what: str = "figures of all ranks") -> list[Any]:
        with self.abort_all_on_error():
            return [self.broadcast_object(value, rank, what) for rank in range(self.num_ranks)]

    def clock_offset(self) -> Offset:
        what = "comparison of clocks"
        with self.abort_all_on_error(what):
            return offset_to_first(self._control, self.wait_s, lambda: self.waiting(what))

    def broadcast(self, x: Tensor, source: int, what: str) -> None:
        with self._collective(what):
            dist.broadcast(x, src=source, group=self._control)

    def broadcast_object(self, value: Any, source: int, what: str) -> Any:
        with self.abort_all_on_error():
            raw = json.dumps(value).encode() if self.rank == source else b""
            length = torch.tensor([len(raw)])
            with self.waiting(what):
                dist.broadcast(length, src=source, group=self._control)
            if not 0 <= length <= _LARGEST_OBJECT:
                raise RuntimeError(
                    f"{what} of {int(length)} bytes from rank {source}: at most {_LARGEST_OBJECT} "
                    "are taken"
                )
            with self.waiting(what):
                data = torch.empty(int(length), dtype=torch.uint8)
                if raw:
                    data.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
                dist.broadcast(data, src=source, group=self._control)
        return json.loads(bytes(data.numpy()))

    def broadcast_tensor(self, x: Tensor | None, source: int, what: str) -> Tensor:
        described = None
        if self.rank == source:
            assert x is not None
            described = [list(x.shape), str(x.dtype).removeprefix("torch.")]
        host = _empty_as(self.broadcast_object(described, source, what), source, what)
        if x is not None and self.rank == source:
            host.copy_(x.detach())
        if host.numel():
            # As bytes: gloo does not know every dtype.
            self.broadcast(host.reshape(-1).view(torch.uint8), source, what)
        return host.to(self.device)

    def whole(self, x: Tensor, what: str) -> Tensor:
        if not isinstance(x, DTensor):
            return x
        with self._collective(what):
            return x.full_tensor()

    def tell(self, message: bytes, what: str) -> int:
        """Sends from the first rank of this pipeline to its others, which all `hear` it.

        Returns:
            The bytes of all these messages.
        """
        with self.abort_all_on_error(), self.waits.leaving(what):
            return self._from_first().send(message)

    def hear(self, what: str) -> bytes:
        """Waits for what the first rank of this pipeline tells."""
        with self.abort_all_on_error(), self.waits.on(self.rank_at(0), what):
            return self._from_first().receive()

    def _from_first(self) -> FromFirst:
        if self._telling is None:
            ranks = [self.rank_at(place) for place in range(self.pp_size)]
            self._telling = FromFirst(self._control, ranks, self.wait_s)
        return self._telling

    @contextmanager
    def abort_all_on_error(self, where: str = "") -> Iterator[None]:
        self.where = where or self.where
        if self._guarded:  # the outermost one lets go of all frames that hold a connection
            yield
            return
        self._guarded = True
        try:
            with self._faults.watch():
                yield
        finally:
            self._guarded = False

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """A context for a collective alone, in which this rank waits for all others."""
        return self.waits.on(None, what)

    @contextmanager
    def _collective(self, what: str, where: str = "") -> Iterator[None]:
        with self.abort_all_on_error(where), self.waiting(what):
            yield


def _empty_as(described: Any, source: int, what: str) -> Tensor:
    """A tensor of the shape and dtype that a rank has announced."""
    match described:
        case [[*shape], str(name)] if all(type(size) is int and size >= 0 for size in shape):
            dtype = getattr(torch, name, None)
            if isinstance(dtype, torch.dtype):
                return torch.empty(shape, dtype=dtype)
    raise RuntimeError(f"{what} from rank {source} is announced as {described!r:.80}: no tensor")


def _destroy(groups: list[dist.ProcessGroup]) -> None:
    for group in groups:
        with suppress(ValueError, RuntimeError):  # destroyed with all others at the end
            dist.destroy_process_group(group)
    groups.clear()
