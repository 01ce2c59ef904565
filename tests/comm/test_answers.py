"""A thread that waits for a silent store is let go, and nothing stays open for it."""

import os
import socket
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from mpcomp.comm.answers import NoAnswer, answered, let_go

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="descriptors are listed on Linux")


def a_file(stack, folder):
    return stack.enter_context((folder / "file").open("w")).fileno()


def a_pipe(stack, folder):
    ends = os.pipe()
    for end in ends:
        stack.callback(os.close, end)
    return ends[0]


def a_folder(stack, folder):
    number = os.open(folder, os.O_RDONLY)
    stack.callback(os.close, number)
    return number


def an_event(stack, folder):
    number = os.eventfd(0)
    stack.callback(os.close, number)
    return number


def a_pair(stack, folder):
    one, other = socket.socketpair()
    stack.enter_context(other)
    return stack.enter_context(one).fileno()


def an_unconnected_socket(stack, folder):
    return stack.enter_context(socket.socket()).fileno()


def a_listening_socket(stack, folder):
    return stack.enter_context(socket.create_server(("127.0.0.1", 0))).fileno()


@pytest.mark.parametrize(
    "other",
    [a_file, a_pipe, a_folder, an_event, a_pair, an_unconnected_socket, a_listening_socket],
)
def test_descriptors_are_as_many_and_work_as_before(tmp_path, other):
    """However often: a link may be away for minutes, and the store is asked again and again."""
    with ExitStack() as stack:
        number = other(stack, tmp_path)
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = silent.getsockname()[1]
        before = None
        for _ in range(4):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                accepted, _ = silent.accept()
                with pytest.raises(NoAnswer) as found:
                    answered(lambda connection=connection: connection.recv(1), 0.05)
                let_go(found.value.thread, port)
                assert not found.value.thread.is_alive()
                accepted.close()
            now = len(list(Path("/proc/self/fd").iterdir()))
            before = now if before is None else before
            assert now == before
        os.fstat(number)


def test_a_thread_without_a_connection_is_left_to_itself():
    gone = threading.Event()
    with pytest.raises(NoAnswer) as found:
        answered(lambda: gone.wait(20), 0.05, unless=lambda: True)
    begin = time.monotonic()
    let_go(found.value.thread, None)
    assert found.value.thread.is_alive() and time.monotonic() - begin < 10
    gone.set()
    found.value.thread.join(20)
    assert not found.value.thread.is_alive()
