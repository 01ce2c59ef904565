"""`mpcomp doctor`: each failure is one line with its cause and cure, and the exit status is 1."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpcomp.comm import reach
from mpcomp.command import main
from mpcomp.version import __version__
from recipes.bench import hosts as bench
from recipes.bench.hosts import HostsUnavailable, Loopback, open_hosts

PORT = 29431
#: `mpcomp` of another version, as somebody may have installed on one of the machines.
OLDER = """
import mpcomp.version
mpcomp.version.__version__ = "0.0.1"
from mpcomp.command import main
main()
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(["doctor", *arguments])
    return capsys.readouterr().out


def refusal(*arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", *arguments])
    return str(caught.value.code)


def test_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys)
    assert f"mpcomp           {__version__}" in out
    assert "no problem found" in out


def test_an_interface_that_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with pytest.raises(SystemExit) as caught:
        main(["doctor"])
    assert caught.value.code == 1
    out = capsys.readouterr().out
    assert "problem: GLOO_SOCKET_IFNAME=eth77: this interface is not there. Export" in out
    assert "lo (127.0.0.1)" in out
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert reach.gloo_address() == ("lo", "127.0.0.1")


def test_a_port_that_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with reach.server_on("127.0.0.1", 0) as server:
        port = server.getsockname()[1]
        # Silent, as a rendezvous is.
        assert f"127.0.0.1:{port}: answers" in run(capsys, "--connect", f"127.0.0.1:{port}")
        assert f"port {port} cannot be listened on" in refusal("--listen", str(port))
    assert f"127.0.0.1:{port}: refused" in refusal("--connect", f"127.0.0.1:{port}")


def test_both_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with reach.server_on("", 0) as server:
        port = server.getsockname()[1]
    came: list[str] = []
    listening = threading.Thread(target=lambda: came.append(reach.listen_once(port, "1.2", 20)))
    listening.start()
    for _ in range(200):
        with contextlib.suppress(ValueError):
            _, words = reach.connect("127.0.0.1", port, 5)
            break
        listening.join(0.05)
    listening.join()
    assert came == ["127.0.0.1"]
    assert words == "1.2"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--connect", "12"], "pass HOST:PORT"),
        (["--connect", "a:99999"], "pass HOST:PORT"),
        (["--connect", "no.such.host.invalid:1"], "knows no 'no.such.host.invalid'"),
        (["--listen", "0"], "pass a port between 1 and 65535"),
        (["--timeout", "-1"], "pass a positive number"),
    ],
)
def test_mistakes(arguments: list[str], says: str) -> None:
    assert says in refusal(*arguments)


def test_nobody_comes() -> None:
    with reach.server_on("", 0) as server:
        port = server.getsockname()[1]
    assert "nobody came within 0.1 s" in refusal("--listen", str(port), "--timeout", "0.1")


# -- two machines ------------------------------------------------------------------------------


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loopback]:
    monkeypatch.setattr(bench, "PREFIX", "mpcomp-doctor-")
    with contextlib.ExitStack() as stack:
        try:
            two = stack.enter_context(open_hosts(2))
        except HostsUnavailable as error:
            pytest.skip(f"no network namespaces: {error}")
        yield two


def on(hosts: Loopback, number: int, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mpcomp", "doctor", *options]
    return hosts.start(number, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def block(hosts: Loopback, *what: str) -> None:
    """Has a firewall on host 0 drop its answers, so that whoever asks hears nothing."""
    name = hosts._names[0]  # type: ignore[attr-defined]
    rule = ["ip", "-n", name, "rule", "add", "ipproto", "tcp", *what, "blackhole"]
    # Above that of local addresses, which would answer first.
    done = subprocess.run([*rule, "priority", "1"], capture_output=True, text=True)
    if "not supported" in done.stderr:
        pytest.skip(f"this kernel has no rules of ports: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr


def together(
    hosts: Loopback, interfaces: tuple[str, str], programs: tuple[list[str], list[str]]
) -> list[tuple[int, str]]:
    """Exit status and output of the command under torchrun on both hosts."""
    started = [
        hosts.start(
            number,
            [
                *(["env", f"GLOO_SOCKET_IFNAME={interface}"] if interface else ["env"]),
                *[sys.executable, "-m", "torch.distributed.run", "--nnodes=2"],
                *[f"--node-rank={number}", "--nproc-per-node=1"],
                *[f"--master-addr={hosts.address(0)}", f"--master-port={PORT}"],
                *program,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for number, (interface, program) in enumerate(zip(interfaces, programs, strict=True))
    ]
    said = [process.communicate(timeout=240)[0] for process in started]
    return [(process.returncode, out) for process, out in zip(started, said, strict=True)]


DOCTOR = ["-m", "mpcomp", "doctor", "--timeout", "40"]


@pytest.mark.slow
def test_ports_of_another_machine(hosts: Loopback) -> None:
    at = f"{hosts.address(0)}:{PORT}"
    listening = on(hosts, 0, "--listen", str(PORT), "--timeout", "120")
    assert listening.stdout is not None
    assert "waiting" in listening.stdout.readline()
    out, err = on(hosts, 1, "--connect", at).communicate(timeout=120)
    assert f"{at}: answers" in out and f"mpcomp {__version__} listens there" in out, err
    assert "10.0.0.2 came" in listening.communicate(timeout=120)[0]

    refused = on(hosts, 1, "--connect", at)
    assert f"{at}: refused, nothing listens" in refused.communicate(timeout=120)[1]
    nobody = on(hosts, 1, "--connect", "10.0.0.9:1", "--timeout", "30")
    assert "no route to host: that machine is off" in nobody.communicate(timeout=120)[1]

    block(hosts, "sport", str(PORT))
    on(hosts, 0, "--listen", str(PORT), "--timeout", "60")
    blocked = on(hosts, 1, "--connect", at, "--timeout", "3")
    err = blocked.communicate(timeout=120)[1]
    assert f"{at}: timed out, no answer within 3 s, as when a firewall drops" in err
    assert f"Let TCP port {PORT} through the firewalls" in err
    assert [refused.returncode, nobody.returncode, blocked.returncode] == [1, 1, 1]
    assert len(err.splitlines()) == 1


@pytest.mark.slow
def test_machines_that_are_well(hosts: Loopback) -> None:
    for status, out in together(hosts, ("eth0", "eth0"), (DOCTOR, DOCTOR)):
        assert status == 0, out
        assert "eth0 10.0.0.1" in out and "eth0 10.0.0.2" in out
        assert "rank 0 to 1" in out and "no problem found" in out


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["eth7", ""])
def test_a_wrong_interface(hosts: Loopback, wrong: str) -> None:
    says = {
        "eth7": "GLOO_SOCKET_IFNAME=eth7: this interface is not there. Export the name of one",
        "": "export GLOO_SOCKET_IFNAME=eth0 on this machine",
    }
    for status, out in together(hosts, ("eth0", wrong), (DOCTOR, DOCTOR)):
        assert status == 1, out
        problems = [line for line in out.splitlines() if line.startswith("problem: ")]
        assert len(problems) == 1, out
        assert problems[0].startswith("problem: rank 1 (") and says[wrong] in problems[0]


@pytest.mark.slow
def test_another_version_and_a_blocked_port(hosts: Loopback, tmp_path: Path) -> None:
    older = tmp_path / "older.py"
    older.write_text(OLDER)
    # Not the rendezvous, as where an administrator opened the one port that was asked for.
    block(hosts, "sport", f"{PORT + 1}-65534", "dport", f"{PORT + 1}-65534")
    for status, out in together(hosts, ("eth0", "eth0"), (DOCTOR, [str(older), *DOCTOR[2:]])):
        assert status == 1, out
        problems = [line for line in out.splitlines() if line.startswith("problem: ")]
        assert f"rank 1 ({socket.gethostname()}, machine 1) has mpcomp 0.0.1, rank 0" in problems[0]
        assert f"pip install mpcomp=={__version__}" in problems[0]
        (blocked,) = (line for line in problems if "cannot connect to rank 0" in line)
        assert blocked.startswith("problem: rank 1 (") and "timed out" in blocked
        assert "let all TCP ports through" in blocked
