"""Whether another machine's port can be reached, and this machine's own addresses.

Plain sockets, before any process group: where these fail, every rendezvous would, without saying
why.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
from collections.abc import Mapping
from typing import Final

import psutil

__all__ = [
    "INTERFACES",
    "addresses",
    "connect",
    "endpoint",
    "gloo_address",
    "is_loopback",
    "listen_once",
    "server_on",
    "towards",
]

#: The environment's variable of interfaces that gloo connects over.
INTERFACES: Final = "GLOO_SOCKET_IFNAME"
#: Begins what `listen_once` says to whoever comes.
GREETING = b"mpcomp doctor "
#: Seconds that a greeting may take: other servers say nothing of themselves.
_GREETING_S = 1.0

_REFUSED = (
    "nothing listens at that port, or a firewall rejects it. Start torchrun on that machine first, "
    "or `mpcomp doctor --listen {port}` to try the port alone, and compare the port's number"
)
_TIMED_OUT = (
    "no answer within {timeout:g} s, as when a firewall drops what is sent there. Let TCP port "
    "{port} through the firewalls of both machines (and the security group, in a cloud), or pass "
    "one that is open as torchrun's --master-port"
)
_NO_ROUTE = (
    "{reason}: that machine is off, in another network, or a firewall rejects this one. Look at "
    "`ip route get {host}`, and use the address of a network that both machines are in"
)


def endpoint(text: str) -> tuple[str, int]:
    """Host and port of "HOST:PORT", or "[IPV6]:PORT".

    Raises:
        ValueError: it is neither.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{text!r}: pass HOST:PORT, as in 10.0.0.1:29500, with a port below 65536")
    return host, int(port)


def connect(host: str, port: int, timeout_s: float) -> tuple[float, str]:
    """A connection to a port, made and closed again.

    Returns:
        Seconds that it took, and the words of `listen_once`, "" where something else listens.

    Raises:
        ValueError: it cannot be reached; says why, and what to do.
    """
    at = f"{host}:{port}"
    try:
        begin = time.perf_counter()
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            seconds = time.perf_counter() - begin
            return seconds, _greeting(connection)
    except socket.gaierror as error:
        raise ValueError(
            f"{at}: this machine knows no {host!r} ({error.strerror}). Pass the address in digits, "
            "or add the name to /etc/hosts or DNS"
        ) from error
    except ConnectionRefusedError as error:
        raise ValueError(f"{at}: refused, {_REFUSED.format(port=port)}") from error
    except TimeoutError as error:
        cause = _TIMED_OUT.format(timeout=timeout_s, port=port)
        raise ValueError(f"{at}: timed out, {cause}") from error
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise ValueError(f"{at}: {_NO_ROUTE.format(reason=reason, host=host)}") from error


def _greeting(connection: socket.socket) -> str:
    """The words of `listen_once`, if it is that: silence and a reset are as good an answer."""
    connection.settimeout(_GREETING_S)
    try:
        said = connection.recv(256)
    except (TimeoutError, ConnectionResetError):
        return ""
    words = said.removeprefix(GREETING) if said.startswith(GREETING) else b""
    return words.decode("ascii", "replace").strip()


def listen_once(port: int, words: str, timeout_s: float) -> str:
    """The address of the first that connects to a port; it is told ``words``.

    Raises:
        ValueError: the port cannot be had, or nobody came; says why, and what to do.
    """
    with server_on("", port) as server:
        server.settimeout(timeout_s)
        try:
            connection, address = server.accept()
        except TimeoutError as error:
            known = ", ".join(f"{name} {own}" for name, own in addresses().items())
            raise ValueError(
                f"--listen {port}: nobody came within {timeout_s:g} s. If --connect timed out on "
                f"the other machine, let TCP port {port} through this machine's firewall; else "
                f"compare the address: this machine has {known}"
            ) from error
        with connection:
            connection.sendall(GREETING + words.encode() + b"\n")
    return str(address[0])


def server_on(address: str, port: int) -> socket.socket:
    """A socket that listens; all addresses for "", a free port for 0.

    Raises:
        ValueError: the port is taken, or not for this user.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            cure = f"find out who has it with `ss -ltnp 'sport = :{port}'`, or choose another"
        elif error.errno == errno.EACCES:
            cure = "choose one from 1024 on"
        else:
            cure = f"choose an address of this machine: {', '.join(addresses().values())}"
        reason = os.strerror(error.errno or 0).lower()
        raise ValueError(f"port {port} cannot be listened on ({reason}): {cure}") from error


def addresses() -> dict[str, str]:
    """One address of each interface of this machine that has any; an IPv4 one where it can be."""
    found = {}
    for name, entries in psutil.net_if_addrs().items():
        by_family = {entry.family: entry.address for entry in reversed(entries)}
        own = by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6)
        if own:
            found[name] = own
    return found


def gloo_address(environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Interface and address at which gloo will wait for other ranks.

    Like gloo itself: that of ``GLOO_SOCKET_IFNAME``, else the one of the machine's name, else the
    loopback's, where no other machine finds it.

    Raises:
        ValueError: ``GLOO_SOCKET_IFNAME`` names what is not there, or has no address.
    """
    own = addresses()
    for name in filter(None, environment.get(INTERFACES, "").split(",")):
        if name not in own:
            known = ", ".join(f"{known} ({address})" for known, address in own.items())
            why = "has no address" if name in psutil.net_if_addrs() else "is not there"
            raise ValueError(
                f"GLOO_SOCKET_IFNAME={name}: this interface {why}. Export the name of one that "
                f"leads to the other machines: this one has {known}"
            )
        return name, own[name]
    for address in _of_host_name():
        names = [name for name, other in own.items() if other == address]
        return (names[0] if names else "?"), address
    return "lo", own.get("lo", "127.0.0.1")


def _of_host_name() -> list[str]:
    """Addresses of the machine's own name that are its own."""
    found = []
    try:
        entries = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return []  # a machine whose name nobody knows, which gloo takes like this as well
    for family, kind, protocol, _, address in entries:
        with socket.socket(family, kind, protocol) as trial:
            try:
                trial.bind(address)
            except OSError:
                continue  # of another machine
        found.append(str(address[0]))
    return found


def is_loopback(address: str) -> bool:
    """Whether an address leads to the machine itself, whichever that is."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def towards(host: str, port: int) -> str | None:
    """The interface by which packets would leave for a host; None where there is no way."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as trial:
            trial.connect(address)  # of a datagram's socket: nothing is sent
            own = str(trial.getsockname()[0])
    except OSError:
        return None
    names = [name for name, address in addresses().items() if address == own]
    return names[0] if names else None
