"""The links between hosts that stand in a row, as far as a message's arrival depends on them.

    host r                                                       host r + 1
    leaves: one message after the other   ── latency of the ──>  arrives: one after the other
    at the host's rate                        link between       at the host's rate

A host has one wire, which carries both directions of both of its cuts; ways out and in do not
disturb each other. A message's last byte has arrived when it has passed both hosts' wires, which
it does at once and not one after the other, and the latency. A link's own rate, where it is slower
than its hosts', holds back the messages of that link alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Network"]

#: Of 1514 bytes of a packet on Ethernet, 1448 are payload: headers of Ethernet, IPv4 and TCP.
PACKET_SHARE = 1448 / 1514


@dataclass(frozen=True)
class Network:
    """Hosts in a row, each with one wire, and the links between neighbours.

    Args:
        host_mbps: Mbit/s of every host, each way; infinite for no limit.
        latency_s: of every link, one way; one fewer than hosts.
        link_mbps: of every link, each way; None for those of its hosts.
        message_s: for which each message occupies a wire beyond its bytes, such as a latency that
            a benchmark charges to the wire.

    Raises:
        ValueError: numbers of hosts and links that do not fit, a rate that is not above 0, or a
            time below 0.
    """

    host_mbps: tuple[float, ...]
    latency_s: tuple[float, ...]
    link_mbps: tuple[float, ...] | None = None
    message_s: float = 0.0

    def __post_init__(self) -> None:
        num_links = len(self.host_mbps) - 1
        for name in ("latency_s", "link_mbps"):
            values = getattr(self, name)
            if values is not None and len(values) != num_links:
                raise ValueError(
                    f"{name} has {len(values)} values for {num_links} links between "
                    f"{num_links + 1} hosts: pass one for each"
                )
        rates = (*self.host_mbps, *(self.link_mbps or ()))
        if not all(rate > 0 for rate in rates):
            raise ValueError(f"rates are {rates} Mbit/s: pass numbers above 0, or inf for no limit")
        times = (*self.latency_s, self.message_s)
        if not all(0 <= seconds < math.inf for seconds in times):
            raise ValueError(f"latencies are {times} s: pass numbers from 0 up")

    @classmethod
    def alike(
        cls, num_hosts: int, mbps: float, latency_s: float = 0.0, *, message_s: float = 0.0
    ) -> Network:
        """So many hosts of one rate, with links of one latency."""
        latencies = (latency_s,) * (num_hosts - 1)
        return cls((mbps,) * num_hosts, latencies, message_s=message_s)

    def occupied_s(self, host: int, link: int, num_bytes: float) -> float:
        """Seconds for which a message of so many bytes over a link occupies a host's wire."""
        own = math.inf if self.link_mbps is None else self.link_mbps[link]
        rate = min(self.host_mbps[host], own)
        return self.message_s + num_bytes / PACKET_SHARE * 8e-6 / rate


class Traffic:
    """The wires of a network in use: what is on its way when."""

    def __init__(self, network: Network) -> None:
        self._network = network
        num_hosts = len(network.host_mbps)
        self._out_free = [0.0] * num_hosts
        self._in_free = [0.0] * num_hosts

    def arrival(self, source: int, target: int, num_bytes: float, now: float) -> float:
        """The moment at which a message that is handed over now has arrived at a neighbour."""
        network, link = self._network, min(source, target)
        leaves = max(now, self._out_free[source])
        gone = leaves + network.occupied_s(source, link, num_bytes)
        latency = network.latency_s[link]
        begins = max(leaves + latency, self._in_free[target])
        there = max(gone + latency, begins + network.occupied_s(target, link, num_bytes))
        self._out_free[source], self._in_free[target] = gone, there
        return there
