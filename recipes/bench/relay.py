"""A switch that takes its time, and loses packets: what leaves does so some milliseconds later.

    python -m recipes.bench.relay --latency-ms 20 port0 port1 port2

Runs where the ports are, in the namespace of `recipes.bench.hosts`, in place of a bridge: not every
kernel has netem. A packet goes to the port behind which its address was seen, or to all others.
Packets pass as they are, with what the kernel notes of their checksums and lengths beside them
(``PACKET_VNET_HDR``), so TCP does not know the relay from a long cable.

A line on its standard input, ``port1 0.05``, has it lose that share of the packets that come to a
port from then on: all of them, ``port1 1``, is a cable that is cut. It ends when its input does.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import itertools
import os
import random
import select
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Final, TextIO

# Of Linux, for which Python has no names: see packet(7) and linux/if_packet.h.
ETH_P_ALL: Final = 3
SOL_PACKET: Final = 263
PACKET_VNET_HDR: Final = 15
VNET_HEADER_BYTES: Final = 10
#: Longer than any packet that the kernel hands over in one piece.
LARGEST: Final = 1 << 17
BUFFER_BYTES: Final = 1 << 24
#: Of the packets that are lost.
SEED: Final = 0


def main(argv: Sequence[str] | None = None) -> None:
    """Relays until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m recipes.bench.relay", description=__doc__)
    parser.add_argument("--latency-ms", type=float, required=True, help="of each packet")
    parser.add_argument("ports", nargs="+", help="devices to relay between")
    options = parser.parse_args(argv)
    ports = [_open(name) for name in options.ports]
    print("ready", flush=True)
    _relay(dict(zip(options.ports, ports, strict=True)), options.latency_ms / 1e3)


def _open(name: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    for size in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        port.setsockopt(socket.SOL_SOCKET, size, BUFFER_BYTES)
    port.bind((name, 0))
    port.setblocking(False)
    return port


def _relay(named: Mapping[str, socket.socket], latency_s: float) -> None:
    waiting: list[tuple[float, int, bytes, socket.socket]] = []
    numbers = itertools.count()  # packets that came at one moment leave in their order
    seen: dict[bytes, socket.socket] = {}
    ports = list(named.values())
    lost = dict.fromkeys(ports, 0.0)
    drawn = random.Random(SEED)
    inputs: list[socket.socket | TextIO] = [*ports, sys.stdin]
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select(inputs, [], [], pause)
        if sys.stdin in readable:
            text = os.read(sys.stdin.fileno(), LARGEST).decode()
            if not text:
                return
            for line in text.splitlines():  # each was written at once
                name, share = line.split()
                lost[named[name]] = float(share)
        now = time.monotonic()
        for port in ports:
            for packet in _packets(port):
                seen[_source(packet)] = port
                if drawn.random() >= lost[port]:
                    heapq.heappush(waiting, (now + latency_s, next(numbers), packet, port))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, packet, came_from = heapq.heappop(waiting)
            known = seen.get(_target(packet))
            for port in [known] if known else [each for each in ports if each is not came_from]:
                _send(port, packet)


def _packets(port: socket.socket) -> list[bytes]:
    """All packets that have come to a port, and none that left by it."""
    packets: list[bytes] = []
    while True:
        try:
            packet, address = port.recvfrom(LARGEST)
        except BlockingIOError:
            return packets
        if address[2] != socket.PACKET_OUTGOING:
            packets.append(packet)


def _target(packet: bytes) -> bytes:
    """Ethernet's address of the one that it is for."""
    return packet[VNET_HEADER_BYTES : VNET_HEADER_BYTES + 6]


def _source(packet: bytes) -> bytes:
    """Ethernet's address of the one that sent it."""
    return packet[VNET_HEADER_BYTES + 6 : VNET_HEADER_BYTES + 12]


def _send(port: socket.socket, packet: bytes) -> None:
    # Where the port's queue is full the packet is lost, as it is at any switch.
    with contextlib.suppress(BlockingIOError):
        port.send(packet)


if __name__ == "__main__":
    main()
