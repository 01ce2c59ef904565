"""Runs whose connection to the rendezvous fails: they go on, or end in time and name its host.

Two machines are two processes here, started without torchrun. The second reaches the store, which
is in the first, through a relay that the test resets, silences, or takes away for a while.
"""

import socket
import struct
import textwrap
import threading
import time
from contextlib import contextmanager, suppress

import pytest
import torch.distributed as dist
from everyday import slow
from ranks import preload, start_python

from mpcomp import healing
from recipes.bench.hosts import free_port

preload("mpcomp.healing")
LIMIT_S = 120

SCRIPT = """
    import os, signal, sys, time
    from pathlib import Path
    import mpcomp
    import mpcomp.healing as healing
    import mpcomp.comm.lasting_store as lasting_store

    folder = Path(sys.argv[1])
    rank, other = os.environ["RANK"], str(1 - int(os.environ["RANK"]))
    lasting_store.ANSWER_S, healing._PATIENCE_S = 1.0, float(sys.argv[3])

    def reached(what, by):
        deadline = time.monotonic() + 60
        while not (folder / f"{what}-{by}").exists():
            assert time.monotonic() < deadline, f"rank {by} has not reached {what}"
            time.sleep(0.05)

    def reach(what, by=rank):
        (folder / f"{what}-{by}").touch()

    def train():
        attempt = int(os.environ["MPCOMP_ATTEMPT"])
        reach(f"begin{attempt}")
        exec(sys.argv[2])
        reach(f"end{attempt}")

    mpcomp.heal(train)
    print(f"rank {rank} is done", flush=True)
"""

#: Both begin, and wait for the test; then the second is killed in the first attempt.
MEET = "reached(f'begin{attempt}', other); reached('go', 'test')"
KILLED = f"{MEET}; rank == '1' and attempt == 0 and os.kill(os.getpid(), signal.SIGKILL)"
#: ... or fails while the test has not let it go on.
TRAINING = f"""
import torch
from torch import nn
{MEET}
torch.manual_seed(0)
pipe = mpcomp.pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), chunks=1, split=2,
                       loss_fn=nn.functional.mse_loss, timeout=20)
for step in range(4):
    if step == 2 and attempt == 0:
        reach("half"); reached("on", "test")
    pipe.forward_backward(torch.ones(2, 4), torch.ones(2, 4))
"""


#: The first attempts end while ranks connect: one after the other dies at a place of its own.
DYING = """
import torch
from torch import nn
from mpcomp.comm import joining
from mpcomp.comm.mesh import ProcessMesh
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
if attempt % 2 == int(rank):
    places = [(joining.dist, "init_process_group"), (joining, "exchange"), (ProcessMesh, "connect"),
              (ProcessMesh, "pair"), (ProcessMesh, "all_reduce_sum")]
    if attempt < len(places):
        setattr(*places[attempt], die)
pipe = mpcomp.pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), chunks=1, split=2,
                       loss_fn=nn.functional.mse_loss, timeout=20)
pipe.forward_backward(torch.ones(2, 4), torch.ones(2, 4))
"""
#: In the first attempt the second rank never comes to the others.
HANGING = """
import functools
from torch import nn
from mpcomp.api import launch
launch.join = functools.partial(launch.join, patience_s=2.0)
if rank == "1" and attempt == 0:
    time.sleep(600)
pipe = mpcomp.pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), chunks=1, split=2,
                       loss_fn=nn.functional.mse_loss, timeout=2.0 if attempt == 0 else 60.0)
"""


class Relay:
    """A TCP relay to a port of this machine.

    Args:
        port: where connections go on to.
    """

    def __init__(self, port):
        self.target = port
        self.silent = False
        self._pairs = []
        self._server = socket.create_server(("127.0.0.1", free_port()))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._serve, args=(self._server,), daemon=True).start()

    def _serve(self, server):
        with suppress(OSError):
            while True:
                near, _ = server.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self.target), timeout=5)
                except OSError:
                    near.close()
                    continue
                far.settimeout(None)
                self._pairs.append((near, far))
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source, sink):
        with suppress(OSError):
            while data := source.recv(65536):
                if not self.silent:
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def reset(self):
        """Resets all connections that there are."""
        pairs, self._pairs = self._pairs, []
        assert pairs, "something is connected"
        for ends in pairs:
            for end in ends:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RD)  # which ends the thread that reads
                end.close()

    def away(self):
        """Refuses everybody."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.reset()

    def back(self):
        """Is there again."""
        self._server = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._serve, args=(self._server,), daemon=True).start()

    def close(self):
        self._server.close()
        for ends in self._pairs:
            for end in ends:
                end.close()


class Run:
    """Two ranks with a relay between the second and the store, each in a process of its own."""

    def __init__(self, folder, arguments):
        port = free_port()
        self.folder, self.arguments, self.relay = folder, arguments, Relay(port)
        self._ports = (port, self.relay.port)
        self.script = folder / "script.py"
        self.script.write_text(textwrap.dedent(SCRIPT))
        self.processes = [self._started(rank) for rank in (0, 1)]

    def _started(self, rank):
        own = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._ports[rank])}
        printed = self.folder / f"printed-{rank}"
        arguments = (str(self.script), str(self.folder), *self.arguments)
        return start_python(*arguments, environment=own, printed=printed)

    def start_again(self, rank):
        """Kills the process of a rank, and starts it again."""
        self.processes[rank].kill()
        self.processes[rank].join()
        self.processes[rank] = self._started(rank)

    def until(self, what):
        """Waits until both ranks have come to a point."""
        deadline = time.monotonic() + LIMIT_S
        while not all((self.folder / f"{what}-{rank}").exists() for rank in (0, 1)):
            assert time.monotonic() < deadline, f"not both have reached {what}"
            time.sleep(0.05)

    def let(self, what):
        """Lets both ranks go on."""
        (self.folder / f"{what}-test").touch()

    def reached(self, what, rank):
        return (self.folder / f"{what}-{rank}").exists()

    def ends(self):
        """Status and words of each rank."""
        found = []
        for rank, process in enumerate(self.processes):
            process.join(LIMIT_S)
            found.append((process.exitcode, (self.folder / f"printed-{rank}").read_text()))
        return found


@contextmanager
def running(folder, what, patience_s=60.0):
    run = Run(folder, (what, str(patience_s)))
    try:
        yield run
    finally:
        run.relay.close()
        for process in run.processes:
            process.kill()
            process.join()


def reset(run):
    run.relay.reset()


def reset_often(run):
    for _ in range(3):
        run.relay.reset()
        time.sleep(1.5)


def away(run):
    run.relay.away()
    time.sleep(2.5)
    run.relay.back()


def silence(run):
    run.relay.silent = True
    time.sleep(2.5)  # longer than the store is given to answer
    run.relay.silent = False


FAULTS = [reset, slow(reset_often), slow(away), silence]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_process_that_waits_finds_the_store_again(tmp_path, fault):
    """The kill after it is told to the other rank, and both begin again."""
    with running(tmp_path, KILLED) as run:
        run.until("begin0")
        fault(run)
        run.let("go")
        for rank, (status, words) in enumerate(run.ends()):
            assert status == 0 and f"rank {rank} is done" in words, words
            assert run.reached("end1", rank) and not run.reached("begin2", rank)
            assert (f"127.0.0.1:{run.relay.port} is out of reach" in words) == (rank == 1), words


@pytest.mark.parametrize("times", [1, slow(3)])
def test_a_process_that_is_started_again_takes_its_ranks_place(tmp_path, times):
    """The others are not begun anew: all meet in the next attempt."""
    with running(tmp_path, MEET) as run:
        run.until("begin0")
        for attempt in range(1, times + 1):
            run.start_again(1)
            run.until(f"begin{attempt}")
        run.let("go")
        for rank, (status, words) in enumerate(run.ends()):
            assert status == 0 and f"rank {rank} is done" in words, words
            assert run.reached(f"end{times}", rank) and not run.reached("end0", rank)
            assert not run.reached(f"begin{times + 1}", rank)


class HeldStore(dist.HashStore):
    """A store in this process, of rank 1 of two."""

    is_host = False
    patience_s = 0.0


@pytest.mark.parametrize(
    "said, expected, is_done, is_told",
    [
        ({}, 0, False, None),
        ({"alive/0": "1"}, 0, False, None),
        ({"alive/1": "1"}, 1, False, "0/again"),
        ({"alive/1": "1", "0/done/1": ""}, 1, False, "0/again"),
        ({"alive/1": "1", "0/done/0": "", "0/done/1": ""}, 0, True, None),
        ({"alive/1": "1", "attempt": "3", "3/here/0": ""}, 3, False, None),
        ({"alive/1": "1", "attempt": "3", "3/here/1": ""}, 4, False, "3/again"),
        ({"alive/1": "1", "attempt": "3", "3/done/0": "", "3/done/1": ""}, 3, True, None),
    ],
)
def test_the_attempt_with_which_a_process_begins(monkeypatch, said, expected, is_done, is_told):
    """The one that the others wait for; none where all have come to the end."""
    held = HeldStore()
    monkeypatch.setattr(healing, "_store", lambda: held)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    store = dist.PrefixStore("mpcomp/heal/0/0", held)
    for key, value in said.items():
        store.set(key, value)
    attempt, ending = healing._Others(0, healing._Stop()).arrive()
    assert (attempt, ending.done) == (expected, is_done)
    told = [key for key in ("0/again", "3/again") if store.check([key])]
    assert told == ([] if is_told is None else [is_told])
    assert store.check(["alive/1"])


@pytest.mark.slow
def test_a_training_that_needs_no_store_goes_on_meanwhile(tmp_path):
    with running(tmp_path, TRAINING) as run:
        run.let("go")
        run.until("half")
        run.relay.reset()
        run.let("on")
        for rank, (status, words) in enumerate(run.ends()):
            assert status == 0 and f"rank {rank} is done" in words, words
            assert run.reached("end0", rank) and not run.reached("begin1", rank)


def test_a_store_that_is_silent_for_good_is_named_in_time(tmp_path):
    """The rank that cannot reach it is not held for ever, nor is the one that waits for that."""
    with running(tmp_path, MEET, patience_s=3.0) as run:
        run.until("begin0")
        run.relay.silent = True
        run.let("go")
        ends = run.ends()
        for rank, (status, words) in enumerate(ends):
            assert status == 1 and run.reached("end0", rank), words
            assert "Traceback" not in words and "terminate called" not in words, words
        assert "rank 1 has given no sign of life for 3 s" in ends[0][1], ends
        assert f"127.0.0.1:{run.relay.port} has not answered for" in ends[1][1], ends


@pytest.mark.slow
def test_ranks_that_die_one_after_the_other_while_they_connect(tmp_path):
    with running(tmp_path, DYING) as run:
        for rank, (status, words) in enumerate(run.ends()):
            assert status == 0 and run.reached("end5", rank), words


def test_a_rank_that_hangs_before_it_joins_is_begun_again(tmp_path):
    with running(tmp_path, HANGING) as run:
        (_, first), *_ = ends = run.ends()
        assert "rank 1 did not come to the handshake within 2 s" in first, first
        for rank, (status, words) in enumerate(ends):
            assert status == 0 and run.reached("end1", rank), words


def test_errors_that_follow_from_a_kill_are_not_the_scripts(tmp_path):
    """Any: of torch's collectives in the loop, say."""
    failing = f"""
{KILLED}
if attempt == 0: raise RuntimeError("connection closed by peer")
"""
    with running(tmp_path, failing) as run:
        run.let("go")
        for rank, (status, words) in enumerate(run.ends()):
            assert status == 0 and run.reached("end1", rank), words
            assert not run.reached("begin2", rank)


def test_an_error_is_the_scripts_where_none_was_killed(tmp_path):
    failing = f"""
{MEET}
if rank == "0": raise ValueError("the batch is empty")
raise mpcomp.PeerError("rank 0 failed")
"""
    with running(tmp_path, failing) as run:
        run.let("go")
        for status, words in run.ends():
            assert status == 1, words
        assert not run.reached("end0", 0) and not run.reached("begin2", 1)
