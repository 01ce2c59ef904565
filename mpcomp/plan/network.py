"""The links between hosts that stand in a row, as far as a message's arrival depends on them.

    host r                                                       host r + 1
    leaves: one message after the other   ── latency of the ──>  arrives: one after the other
    at the host's rate                        link between       at the host's rate

A host has one wire, which carries both directions of all of its cuts; ways out and in do not
disturb each other. A message's last byte has arrived when it has passed both hosts' wires, which
it does at once and not one after the other, and the latency. A link's own rate, where it is slower
than its hosts', holds back the messages of that link alone.

Where the first host has the last stage as well (`stages.split`, ``together``), there is one cut
more, between the last host and the first. Its messages go over the same wires, on connections of
their own; with two hosts their link is the one that there is.

Long links have a second limit. After a pause TCP sends no more than a small window before the first
acknowledgement, and doubles it with each round trip (slow start, RFC 5681, 3.1 and 4.1), so the
first messages of a step take several round trips however fast the link is. Linux does so by default
(``net.ipv4.tcp_slow_start_after_idle``). A link of several connections has as many windows, as each
message goes in stripes over all of them.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["Network", "link_of"]

#: Bytes of Linux' first window: ten packets (RFC 6928).
FIRST_WINDOW = 14_480
#: Of 1514 bytes of a packet on Ethernet, 1448 are payload: headers of Ethernet, IPv4 and TCP.
PACKET_SHARE = 1448 / 1514

_MBPS: Final = {"bit/s": 1e-6, "kbit/s": 1e-3, "Mbit/s": 1.0, "Gbit/s": 1e3}
_SECONDS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LINK: Final = re.compile(
    rf"(?P<rate>[\d.]+) ?(?P<unit>{'|'.join(_MBPS)})(?:, ?(?P<time>[\d.]+) ?(?P<of>us|ms|s))?"
)


def link_of(link: str) -> tuple[float, float]:
    """Mbit/s of a link, each way, and its latency in seconds, one way.

    Args:
        link: such as "100 Mbit/s, 20 ms", or "1 Gbit/s" for no latency.

    Raises:
        ValueError: it says something else.
        TypeError: no string.
    """
    if not isinstance(link, str):
        raise TypeError(f"link={link!r}: expected a string such as '100 Mbit/s, 20 ms'")
    found = _LINK.fullmatch(link)
    try:
        rate, latency = (float(found[name] or 0) for name in ("rate", "time")) if found else (0, 0)
    except ValueError:  # as of 1.2.3
        rate = 0
    if not (found and rate):
        raise ValueError(
            f"link={link!r}: expected a rate and a latency one way, such as '100 Mbit/s, 20 ms'; "
            f"rates are above 0 in {', '.join(_MBPS)} (1 MB/s is 8 Mbit/s), latencies in "
            f"{', '.join(_SECONDS)}"
        )
    return rate * _MBPS[found["unit"]], latency * _SECONDS[found["of"] or "s"]


@dataclass(frozen=True)
class Network:
    """Hosts in a row, each with one wire, and the links between neighbours.

    Args:
        host_mbps: Mbit/s of every host, each way; infinite for no limit.
        latency_s: of every link, one way; one fewer than hosts. One more is of the way between the
            last host and the first, which else has the largest of the others.
        link_mbps: of every link, each way; None for those of its hosts. One more likewise, else
            the smallest.
        message_s: for which each message occupies a wire beyond its bytes, such as a latency that
            a benchmark charges to the wire.
        window_bytes: of each connection at the beginning of a step, `FIRST_WINDOW` with Linux as it
            comes; infinite where connections keep theirs over a pause.
        connections: of each link, each way.

    Raises:
        ValueError: numbers of hosts and links that do not fit, a rate, window or number of
            connections that is not above 0, or a time below 0.
    """

    host_mbps: tuple[float, ...]
    latency_s: tuple[float, ...]
    link_mbps: tuple[float, ...] | None = None
    message_s: float = 0.0
    window_bytes: float = math.inf
    connections: int = 1

    def __post_init__(self) -> None:
        num_links = len(self.host_mbps) - 1
        for name in ("latency_s", "link_mbps"):
            values = getattr(self, name)
            if values is not None and len(values) not in (num_links, num_links + 1):
                raise ValueError(
                    f"{name} has {len(values)} values for {num_links} links between "
                    f"{num_links + 1} hosts: pass one for each"
                )
        rates = (*self.host_mbps, *(self.link_mbps or ()))
        if not all(rate > 0 for rate in rates):
            raise ValueError(f"rates are {rates} Mbit/s: pass numbers above 0, or inf for no limit")
        if not self.window_bytes > 0:
            raise ValueError(f"window_bytes={self.window_bytes}: pass a number above 0")
        if not self.connections >= 1:
            raise ValueError(f"connections={self.connections}: pass a whole number, 1 or more")
        times = (*self.latency_s, self.message_s)
        if not all(0 <= seconds < math.inf for seconds in times):
            raise ValueError(f"latencies are {times} s: pass numbers from 0 up")

    @classmethod
    def alike(
        cls,
        num_hosts: int,
        mbps: float,
        latency_s: float = 0.0,
        *,
        message_s: float = 0.0,
        window_bytes: float = math.inf,
        connections: int = 1,
    ) -> Network:
        """So many hosts of one rate, with links of one latency; other arguments as above."""
        return cls(
            (mbps,) * num_hosts,
            (latency_s,) * (num_hosts - 1),
            message_s=message_s,
            window_bytes=window_bytes,
            connections=connections,
        )

    def latency_of(self, link: int) -> float:
        """Seconds of a link, one way; the last one's number is that of the last host."""
        known = self.latency_s
        return known[link] if link < len(known) else max(known)

    def rate_of(self, host: int, link: int) -> float:
        """Mbit/s at which a host can use one of its links; numbers as in `latency_of`."""
        known = self.link_mbps or (math.inf,)
        return min(self.host_mbps[host], known[link] if link < len(known) else min(known))

    def occupied_s(self, host: int, link: int, num_bytes: float) -> float:
        """Seconds for which a message of so many bytes over a link occupies a host's wire."""
        rate = self.rate_of(host, link)
        return self.message_s + num_bytes / PACKET_SHARE * 8e-6 / rate

    def between_s(self, source: int, target: int, num_bytes: float) -> float:
        """Seconds of a message between any two hosts, on a connection of its own and after a pause.

        Its latency and rate are those of the way between the last host and the first.
        """
        wires = [_Wire() for _ in self.host_mbps]
        way = _Connections(self, len(wires) - 1, (source, target), wires)
        return way.arrival(num_bytes, 0.0)


class Wires:
    """The wires and connections of a network in use: what is on its way when.

    A direction of a cut has connections of its own, so both of its stages name them.

    Args:
        network: of the hosts.
        num_stages: one to a host; one more is on the first host.
    """

    def __init__(self, network: Network, num_stages: int) -> None:
        wires = [_Wire() for _ in network.host_mbps]
        host_of = [stage % len(wires) for stage in range(num_stages)]
        self._connections = {
            (source, target): _Connections(network, cut, [host_of[source], host_of[target]], wires)
            for cut in range(num_stages - 1)
            for source, target in ((cut, cut + 1), (cut + 1, cut))
        }

    def arrival(self, source: int, target: int, num_bytes: float, now: float) -> float:
        """The moment at which a message between two stages that is handed over now has arrived."""
        return self._connections[source, target].arrival(num_bytes, now)


class _Wire:
    """A host's wire: when it is free, each way."""

    def __init__(self) -> None:
        self.out_free = self.in_free = 0.0


class _Connections:
    """The way of messages over a link from one host to another, on one connection or several."""

    def __init__(
        self, network: Network, link: int, hosts: Sequence[int], wires: Sequence[_Wire]
    ) -> None:
        self._out, self._into = (wires[host] for host in hosts)
        self._latency_s = network.latency_of(link)
        self._bytes_per_s = min(network.rate_of(host, link) for host in hosts) * 1e6 / 8
        #: Of both wires. Kept, as the messages of a step are many and of few sizes.
        self._occupied_s = functools.cache(
            lambda num_bytes: [network.occupied_s(host, link, num_bytes) for host in hosts]
        )
        self._window = network.connections * network.window_bytes
        #: When the last message had left.
        self._left = 0.0

    def arrival(self, num_bytes: float, now: float) -> float:
        """The moment at which a message that is handed over now has arrived."""
        out, into, latency = self._out, self._into, self._latency_s
        taken_out, taken_in = self._occupied_s(num_bytes)
        waits = self._waits_for_window(num_bytes) if num_bytes > self._window else 0.0
        self._window += num_bytes  # of what arrives, all is acknowledged
        leaves = max(now, out.out_free, self._left)
        left = leaves + taken_out
        begins = max(leaves + latency, into.in_free)
        arrived = max(left + latency, begins + taken_in)
        # While a connection waits for acknowledgements its wire is free for others.
        out.out_free, self._left, into.in_free = left, left + waits, arrived
        return arrived + waits

    def _waits_for_window(self, num_bytes: float) -> float:
        """Seconds in which the sender may send nothing, as all of its window is on its way."""
        round_trip = 2 * self._latency_s
        waits, left, window = 0.0, num_bytes, self._window
        while left > window and window < self._bytes_per_s * round_trip:
            waits += round_trip - window / self._bytes_per_s
            left -= window
            window *= 2
        return waits
