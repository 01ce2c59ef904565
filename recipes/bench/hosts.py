"""Hosts on one machine: network namespaces whose links are as slow, and as long, as one asks.

    with open_hosts(2, latency_ms=20) as hosts:
        hosts.set_rate(10)  # Mbit/s of every host, each way
        hosts.start(0, ["python", "server.py"]); hosts.start(1, ["python", "client.py"])

            host 0                     switch                     host 1
        eth0  10.0.0.1  ──veth──  port0  bridge  port1  ──veth──  eth0  10.0.0.2
        └ tbf: egress             └ tbf: what host 0 receives

`tc tbf` limits what leaves a device, so a host's device limits what it sends and the port at the
switch what it receives. With a latency, a relay (`recipes.bench.relay`) stands where the bridge is.
Where there is a limit, a packet counted on ``eth0`` is one on the wire: TCP may hand the device
none longer than the MTU (``gso_max_segs 1``), and veth joins none on arrival. Without a limit,
packets stay as long as TCP makes them, as the processor would otherwise be the limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final

from recipes.bench.signals import ENDING, ending_on_signals

PREFIX: Final = "mpcomp-"
RELAY: Final = "recipes.bench.relay"
# Bytes that may leave at once after a pause: small against a message, or a slow link would look
# faster than it is; at high rates a millisecond's worth, which a timer can keep up with.
BURST_BYTES: Final = 4096
BURST_S: Final = 0.001
# Room for packets that wait: as many as Linux lets wait at a device by default, 1000, and at high
# rates what arrives in 20 ms. Two hosts that send to a third at once then seldom lose any.
QUEUE_BYTES: Final = 1_514_000
QUEUE_S: Final = 0.02
# Linux's own default, named because distributions choose others (this bends the curves).
CONGESTION_CONTROL: Final = "cubic"
# What a device starts with.
UNLIMITED_SEGMENTS: Final = 65535


class HostsUnavailable(RuntimeError):
    """Network namespaces cannot be made or changed here: no rights, or no tools."""


@dataclass(frozen=True)
class Counters:
    """The traffic of a host's device, in whole Ethernet frames without their checksum."""

    tx_bytes: int = 0
    tx_packets: int = 0
    rx_bytes: int = 0
    rx_packets: int = 0

    def __sub__(self, other: Counters) -> Counters:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Counters(*(own - before for own, before in pairs))


def free_port() -> int:
    """A TCP port of the machine that nobody has.

    It is drawn below the ports that Linux gives to connections: a port that `bind` chose may
    belong to another program's connection before the caller listens there.

    Raises:
        OSError: a hundred ports that were drawn are taken.
    """
    drawn = random.SystemRandom()
    for _ in range(100):
        port = drawn.randrange(20_000, 32_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError("no port of a hundred that were drawn from 20000 to 32767 is free")


class Loopback:
    """All hosts are this one, and talk over its loopback device: nothing is limited or counted."""

    device: str = "lo"

    def __init__(self, num_hosts: int) -> None:
        self.num_hosts = num_hosts
        self._processes: list[subprocess.Popen[str]] = []

    def address(self, host: int) -> str:
        """The IPv4 address of a host."""
        return "127.0.0.1"

    def start(self, host: int, command: Sequence[str], **settings: Any) -> subprocess.Popen[str]:
        """Starts a process on a host, its pipes in text; `close` ends it."""
        # A session of its own: Ctrl-C reaches this process alone, which then ends the others.
        process = subprocess.Popen(
            [*self._on(host), *command], text=True, start_new_session=True, **settings
        )
        self._processes.append(process)
        return process

    def set_rate(self, mbps: float | None) -> None:
        """Limits every host to ``mbps`` Mbit/s each way; None lifts the limit.

        Raises:
            ValueError: a limit on a device that has none.
        """
        if mbps is not None:
            raise ValueError(f"mbps={mbps}: the loopback device is not limited; pass None")

    def lose(self, host: int, share: float) -> None:
        """Has a share of what a host sends lost from now on; 1 cuts it off, 0 restores it.

        Raises:
            ValueError: these links lose nothing; they need a latency.
        """
        raise ValueError("these links lose nothing: open the hosts with latency_ms, on namespaces")

    def unplug(self, host: int) -> None:
        """Takes a host off the switch: what it sends is lost, and nothing reaches it.

        Raises:
            ValueError: these hosts have no switch.
        """
        raise ValueError("these hosts have no switch: open them on namespaces, without latency_ms")

    def plug_in(self, host: int) -> None:
        """Puts a host back, which `unplug` has taken off."""

    def reset(self, host: int) -> None:
        """Resets all connections of a host to others, as a router does that has forgotten them.

        Raises:
            ValueError: these hosts have no links.
        """
        raise ValueError("these hosts have no links: open them on namespaces")

    def pids(self, host: int) -> list[int]:
        """Numbers of the processes of a host."""
        return [process.pid for process in self._processes if process.poll() is None]

    def counters(self) -> list[Counters]:
        """The traffic of every host so far; empty where it is not counted."""
        return []

    def describe(self) -> dict[str, Any]:
        """Facts about these links that a reader of measurements needs."""
        return {"kind": "loopback", "device": self.device}

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(timeout=3)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def _on(self, host: int) -> list[str]:
        return []


class Namespaces(Loopback):
    """Hosts that are network namespaces, joined by a bridge in a namespace of its own."""

    device = "eth0"

    def __init__(self, num_hosts: int, *, latency_ms: float = 0.0) -> None:
        super().__init__(num_hosts)
        names = [f"{PREFIX}{os.getpid()}-{name}" for name in ("switch", *range(num_hosts))]
        self._switch, *self._names = names
        self._made: list[str] = []
        self._latency_ms = latency_ms
        self._relay: subprocess.Popen[str] | None = None
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def address(self, host: int) -> str:
        return f"10.0.0.{host + 1}"

    def set_rate(self, mbps: float | None) -> None:
        for name in self._names:
            segments = UNLIMITED_SEGMENTS if mbps is None else 1
            _run("ip", "-n", name, "link", "set", self.device, "gso_max_segs", str(segments))
            # Replacing the route makes open connections look at the device again. It also chooses
            # the congestion control: the setting of that name is closed to most namespaces.
            route = f"10.0.0.0/24 dev {self.device} congctl {CONGESTION_CONTROL}".split()
            _run("ip", "-n", name, "route", "replace", *route)
        for name, device in self._limited():
            tc = ["tc", "-n", name]
            if mbps is None:
                queues = json.loads(_run(*tc, "-j", "qdisc", "show", "dev", device))
                if any(queue["kind"] == "tbf" for queue in queues):
                    _run(*tc, "qdisc", "del", "dev", device, "root")
            else:
                bytes_per_s = mbps * 1e6 / 8
                burst = max(BURST_BYTES, round(bytes_per_s * BURST_S))
                limit = max(QUEUE_BYTES, round(bytes_per_s * QUEUE_S))
                tbf = f"tbf rate {round(mbps * 1e6)}bit burst {burst} limit {limit}".split()
                _run(*tc, "qdisc", "replace", "dev", device, "root", *tbf)

    def counters(self) -> list[Counters]:
        found = []
        for name in self._names:
            shown = json.loads(_run("ip", "-n", name, "-s", "-j", "link", "show", self.device))
            rx, tx = shown[0]["stats64"]["rx"], shown[0]["stats64"]["tx"]
            found.append(Counters(tx["bytes"], tx["packets"], rx["bytes"], rx["packets"]))
        return found

    def lose(self, host: int, share: float) -> None:
        if self._relay is None:
            super().lose(host, share)
            return
        assert self._relay.stdin is not None
        self._relay.stdin.write(f"port{host} {share}\n")
        self._relay.stdin.flush()

    def unplug(self, host: int) -> None:
        if self._relay is not None:
            super().unplug(host)
        _run("ip", "-n", self._switch, "link", "set", f"port{host}", "nomaster")

    def plug_in(self, host: int) -> None:
        _run("ip", "-n", self._switch, "link", "set", f"port{host}", "master", "bridge")

    def reset(self, host: int) -> None:
        _run("ip", "netns", "exec", self._names[host], "ss", "-K", "-t", "dst", "10.0.0.0/24")

    def pids(self, host: int) -> list[int]:
        return [int(pid) for pid in _run("ip", "netns", "pids", self._names[host]).split()]

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "network namespaces",
            "device": self.device,
            "gso_max_segs": {"limited": 1, "unlimited": UNLIMITED_SEGMENTS},
            "congestion_control": CONGESTION_CONTROL,
            "burst_bytes": BURST_BYTES,
            "queue_bytes": QUEUE_BYTES,
            "latency_ms": self._latency_ms,
        }

    def close(self) -> None:
        super().close()
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
        for name in reversed(self._made):
            subprocess.run(["ip", "netns", "del", name], check=False)
        self._made.clear()

    def _build(self) -> None:
        for name in (self._switch, *self._names):
            _run("ip", "netns", "add", name)
            self._made.append(name)
            # IPv6's neighbour discovery would be counted. A setting's file shows the namespace of
            # whoever opens it.
            setting = "/proc/sys/net/ipv6/conf/all/disable_ipv6"
            _run("ip", "netns", "exec", name, "sh", "-c", f"echo 1 > {setting}")
        switch = ["ip", "-n", self._switch, "link"]
        for host, name in enumerate(self._names):
            port = f"port{host}"
            _run(*switch, "add", port, "type", "veth", "peer", "name", self.device, "netns", name)
            _run(*switch, "set", port, "up")
            for device in ("lo", self.device):
                _run("ip", "-n", name, "link", "set", device, "up")
            _run("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", self.device)
        ports = [port for _, port in self._ports()]
        if self._latency_ms:
            self._relay = self._start_relay(ports)
        else:
            _run(*switch, "add", "bridge", "type", "bridge", "mcast_snooping", "0")
            _run(*switch, "set", "bridge", "up")
            for port in ports:
                _run(*switch, "set", port, "master", "bridge")
        self.set_rate(None)

    def _start_relay(self, ports: Sequence[str]) -> subprocess.Popen[str]:
        """Starts what takes a bridge's place where packets are to take their time."""
        command = [sys.executable, "-m", RELAY, "--latency-ms", str(self._latency_ms), *ports]
        relay = subprocess.Popen(
            ["ip", "netns", "exec", self._switch, *command],
            text=True,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert relay.stdout is not None and relay.stderr is not None
        if relay.stdout.readline() != "ready\n":
            raise HostsUnavailable(f"the relay ended: {relay.stderr.read().strip()}")
        return relay

    def _ports(self) -> Iterator[tuple[str, str]]:
        """The namespace and the device of the switch's end of each link."""
        for host in range(self.num_hosts):
            yield self._switch, f"port{host}"

    def _limited(self) -> Iterator[tuple[str, str]]:
        """The namespace and the device of each limit."""
        for name in self._names:
            yield name, self.device
        yield from self._ports()

    def _on(self, host: int) -> list[str]:
        return ["ip", "netns", "exec", self._names[host]]


@contextlib.contextmanager
def open_hosts(
    num_hosts: int, *, latency_ms: float = 0.0, loopback: bool = False
) -> Iterator[Loopback]:
    """Hosts that are gone, with all their processes, when the block is left in whatever way.

    Raises:
        HostsUnavailable: no rights or tools for network namespaces; ``loopback`` needs none.
    """
    if not loopback:
        _check_tools()
        _remove_left_behind()
    with ending_on_signals():
        hosts = Loopback(num_hosts) if loopback else Namespaces(num_hosts, latency_ms=latency_ms)
        try:
            yield hosts
        finally:
            _ignore_signals()  # a second Ctrl-C must not stop the tidying
            hosts.close()


def _check_tools() -> None:
    if sys.platform != "linux":
        raise HostsUnavailable(f"network namespaces are Linux's; this is {sys.platform}")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise HostsUnavailable(f"{' and '.join(missing)} not found; install iproute2")


def _remove_left_behind() -> None:
    """Removes the hosts of processes that were killed before they could."""
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        pid = name.removeprefix(PREFIX).split("-")[0]
        if name.startswith(PREFIX) and pid.isdecimal() and not Path("/proc", pid).exists():
            _run("ip", "netns", "del", name)


def _ignore_signals() -> None:
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise HostsUnavailable(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
