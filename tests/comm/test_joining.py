"""Ranks that join: who does not come, dies meanwhile, or waits where nobody finds it, is named."""

import os
import signal
import socket
import time

import pytest
import torch
import torch.distributed as dist
from everyday import slow

from mpcomp import PeerError
from mpcomp.comm import joining

#: Of what waits in vain, and of what must not.
SHORT_S, LONG_S = 3.0, 120.0


class Store(dist.Store):
    """A store in front of another; a test may change what is set."""

    def __init__(self, store, setting):
        super().__init__()
        self._store, self._setting = store, setting

    def set(self, key, value):
        self._store.set(key, value)
        self._setting()

    def get(self, key):
        return self._store.get(key)

    def add(self, key, amount):
        return self._store.add(key, amount)

    def check(self, keys):
        return self._store.check(keys)

    def wait(self, keys, *timeout):
        self._store.wait(keys, *timeout)

    def set_timeout(self, timeout):
        self._store.set_timeout(timeout)

    def delete_key(self, key):
        return self._store.delete_key(key)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def sleeps():
    time.sleep(600)


def dies_when_its_address_is_known():
    """gloo's others then connect to where nobody listens any more."""
    make = dist.init_process_group

    def init_process_group(*args, store, **kwargs):
        make(*args, store=Store(store, die), **kwargs)

    joining.dist.init_process_group = init_process_group


def dies_before_it_connects():
    joining.dist.init_process_group = lambda *_, **__: die()


def hides():
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def names_what_is_not_there():
    os.environ["GLOO_SOCKET_IFNAME"] = "nothing0"


def joined(port, size, patience_s, odd, machines):
    """Joins, the last rank in a way of its own; what it came to, and its seconds."""
    rank = int(os.environ["TEST_RANK"])
    own = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    own |= {"TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({name: str(value) for name, value in own.items()})
    if machines > 1:
        joining._network_stack = lambda: f"machine {rank % machines}"
    if odd is not None and rank == size - 1:
        odd()
    begin = time.monotonic()
    try:
        joining.join(torch.device("cpu"), patience_s, patience_s=patience_s)
        if odd in (None, hides):
            dist.barrier()  # a rank that ends at once may do so while another connects to it
    except (PeerError, ValueError) as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", time.monotonic() - begin


def all_join(ranks, size, odd=None, *, machines=1, patience_s=LONG_S, lost=()):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's
    args = (store.port, size, patience_s, odd, machines)
    return ranks(joined, size, *args, init=False, may_fail=True, without=lost)


def test_ranks_join(ranks):
    for error, words, _ in all_join(ranks, 2):
        assert not error, words


@pytest.mark.parametrize("size", [2, slow(3)])
def test_a_rank_that_does_not_come_is_named_in_time(ranks, size):
    odd = size - 1
    for error, words, seconds in all_join(ranks, size, sleeps, patience_s=SHORT_S, lost=[odd])[:-1]:
        assert error == "PeerError" and seconds < LONG_S, words
        assert words.startswith(f"rank {odd} did not come to the handshake within 3 s"), words


@pytest.mark.parametrize("odd", [dies_when_its_address_is_known, slow(dies_before_it_connects)])
def test_a_rank_that_dies_while_others_connect_to_it_is_no_raw_error(ranks, odd):
    """gloo finds its port closed, waits for it to connect, or has just been in time."""
    *others, died = all_join(ranks, 2, odd, patience_s=SHORT_S)
    assert died == ("died", str(-signal.SIGKILL))
    for error, words, seconds in others:
        if odd is dies_when_its_address_is_known and not error:
            continue
        assert error == "PeerError" and seconds < LONG_S, words
        start = "rank 0 could not be connected to the others within 3 s ("
        assert words.startswith(start) and "one of them has failed meanwhile" in words, words


@pytest.mark.parametrize("machines", [1, 2])
def test_a_loopback_is_for_one_machine_alone(ranks, machines):
    """As Debian's 127.0.1.1; on every rank at once, with the cure."""
    for error, words, seconds in all_join(ranks, 2, hides, machines=machines):
        if machines == 1:
            assert not error, words
            continue
        assert error == "ValueError" and seconds < LONG_S, words
        assert "waits for the others at 127.0.0.1" in words, words
        assert "rank 1 (" in words and "export GLOO_SOCKET_IFNAME=" in words, words
        assert "/etc/hosts" in words, words


def test_an_interface_that_is_not_there_is_told_to_all(ranks):
    first, last = all_join(ranks, 2, names_what_is_not_there)
    assert first[0] == last[0] == "ValueError" and max(first[2], last[2]) < LONG_S
    assert last[1].startswith("GLOO_SOCKET_IFNAME=nothing0: this interface is not there"), last
    assert first[1].startswith("rank 1 cannot take part: ValueError: GLOO_SOCKET_IFNAME"), first


class Breaking:
    """A store whose connection breaks at a call."""

    def __init__(self, at):
        self._at = at

    def _call(self, name):
        if name == self._at or self._at == "everything":
            raise dist.DistNetworkError("Connection reset by peer")

    def set(self, *_):
        self._call("set")

    def wait(self, *_):
        self._call("wait")

    def check(self, *_):
        self._call("check")
        return True

    def get(self, _):
        self._call("get")
        return b" 1"


@pytest.mark.parametrize("at", ["set", "wait", "get", "everything"])
def test_a_store_that_is_lost_is_no_raw_error(at):
    ranks = joining.Ranks(Breaking(at), 0, 2, 1.0)
    with pytest.raises(
        PeerError, match=r"the store .* is lost in the handshake \(Connection reset"
    ):
        joining.exchange(ranks, "hello", 1)


def test_a_rendezvous_that_is_not_there_is_named(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        port = taken.getsockname()[1]
        own = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in own.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(PeerError, match=f"have met at .* 127.0.0.1:{port}, within 0.5 s"):
            joining.join(torch.device("cpu"), 0.5, patience_s=0.5)
