"""Hosts on one machine: what is limited is as slow as that, and nothing is left behind."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest

from recipes.bench.hosts import HostsUnavailable, Loopback, open_hosts

ECHO = """
import socket
server = socket.create_server(("0.0.0.0", 5555))
print("up", flush=True)
connection, _ = server.accept()
while said := connection.recv(1 << 16):
    connection.sendall(said)
"""
ASK = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5555))
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range(5):
    begin = time.perf_counter()
    connection.sendall(b"!")
    connection.recv(1)
    print(time.perf_counter() - begin, flush=True)
"""


def hosts_of(stack: contextlib.ExitStack, **settings: float) -> Loopback:
    try:
        return stack.enter_context(open_hosts(2, **settings))
    except HostsUnavailable as error:
        pytest.skip(f"no network namespaces: {error}")


@pytest.mark.slow
@pytest.mark.parametrize("mbps", [None, 10.0])
def test_no_answer_comes_before_twice_the_latency(mbps: float | None) -> None:
    with contextlib.ExitStack() as stack:
        hosts = hosts_of(stack, latency_ms=30)
        hosts.set_rate(mbps)
        server = hosts.start(0, [sys.executable, "-c", ECHO], stdout=subprocess.PIPE)
        assert server.stdout is not None
        assert server.stdout.readline() == "up\n"
        asked = [sys.executable, "-c", ASK, hosts.address(0)]
        said, _ = hosts.start(1, asked, stdout=subprocess.PIPE).communicate(timeout=60)
        trips = [float(line) for line in said.splitlines()]
        assert len(trips) == 5
        assert min(trips) >= 0.06
        relay = hosts._relay  # type: ignore[attr-defined]
        assert relay.poll() is None
    assert relay.poll() is not None
