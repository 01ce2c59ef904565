"""A store that is started anew at the same address is not taken for the one before."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from mpcomp import PeerError
from mpcomp.comm.lasting_store import LastingStore
from recipes.bench.hosts import free_port

QUESTIONS = {
    "set": lambda store: store.set("a", "b"),
    "get": lambda store: store.get("a"),
    "check": lambda store: store.check(["a"]),
}


def server(port):
    return dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
    )


@pytest.fixture
def port():
    return free_port()


def client(port):
    store = LastingStore("127.0.0.1", port, is_host=False, say=lambda words: None)
    store.patience_s = 20.0
    return store


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("first", [True, False], ids=["first of both", "first of none"])
def test_another_store_is_an_error(port, question, first):
    """Also where this process was the first to ask both, and so has named them."""
    host = server(port)
    others = [client(port)]
    store = client(port)
    for each in [store, *others] if first else [*others, store]:
        each.set("a", "b")
    del host
    host = server(port)
    if not first:
        client(port).set("a", "b")
    with pytest.raises(PeerError, match="another than before"):
        QUESTIONS[question](store)
    assert not host.check(["a"]) or not first


def test_the_same_store_is_found_again(port):
    host = server(port)
    store = client(port)
    store.set("a", "b")
    store._client = None
    assert store.get("a") == b"b"
    assert host.get("a") == b"b"
