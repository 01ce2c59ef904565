"""Hosts whose name leads to 127.0.1.1, Debian's default: all say so at once, with what cures it.

Hosts are network namespaces, each with an /etc/hosts of its own; without the rights for them the
tests are skipped.
"""

import os
import shutil
import socket
import subprocess
import sys
import textwrap
from contextlib import ExitStack
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 120
SCRIPT = """
    import sys
    import torch
    import torch.distributed as dist
    import mpcomp
    from mpcomp.comm.joining import join

    try:
        join(torch.device("cpu"), 60.0, patience_s=60.0)
        total = torch.ones(1)
        dist.all_reduce(total)
        print("joined", int(total))
    except (ValueError, mpcomp.PeerError) as error:
        print(type(error).__name__, error)
"""


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no network namespaces: {' '.join(command)}: {done.stderr.strip()}")


@pytest.fixture
def hosts():
    """The names of two namespaces with a link between them, of 10.99.0.1 and 10.99.0.2."""
    if sys.platform != "linux" or shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("no network namespaces: they want Linux, iproute2 and root")
    names = [f"nt-{os.getpid()}-{which}" for which in "ab"]
    with ExitStack() as stack:
        for name in names:
            run("ip", "netns", "add", name)
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
            folder = Path("/etc/netns") / name  # `ip netns exec` puts its files over those of /etc
            folder.mkdir(parents=True)
            stack.callback(shutil.rmtree, folder)
        run(
            *("ip", "link", "add", "link0", "netns", names[0], "type", "veth"),
            *("peer", "name", "link0", "netns", names[1]),
        )
        for number, name in enumerate(names, 1):
            run("ip", "-n", name, "addr", "add", f"10.99.0.{number}/24", "dev", "link0")
            for device in ("lo", "link0"):
                run("ip", "-n", name, "link", "set", device, "up")
        yield names


def name_leads_to(hosts, addresses):
    for host, address in zip(hosts, addresses, strict=True):
        lines = f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n"
        (Path("/etc/netns") / host / "hosts").write_text(lines)


def joined(hosts, script, *, master="10.99.0.1", **environment):
    script.write_text(textwrap.dedent(SCRIPT))
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    processes = []
    try:
        for rank, host in enumerate(hosts):
            own = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": master}
            own |= {"MASTER_PORT": "29555", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
            processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", host, sys.executable, str(script)],
                    env={**os.environ, **own, **environment},
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        return [process.communicate(timeout=LIMIT_S)[0].strip() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.mark.slow
def test_both_hosts_say_it_and_how_to_cure_it(hosts, tmp_path):
    name_leads_to(hosts, ["127.0.1.1", "127.0.1.1"])
    for words in joined(hosts, tmp_path / "script.py"):
        assert words.startswith("ValueError rank 0 ("), words
        for rank in (0, 1):
            assert (
                f"rank {rank} ({socket.gethostname()}) waits for the others at 127.0.1.1" in words
            )
        assert "export GLOO_SOCKET_IFNAME=link0 there" in words and "/etc/hosts" in words, words


@pytest.mark.slow
def test_one_host_is_enough(hosts, tmp_path):
    name_leads_to(hosts, ["10.99.0.1", "127.0.1.1"])
    for words in joined(hosts, tmp_path / "script.py"):
        assert words.startswith("ValueError rank 1 ("), words


@pytest.mark.slow
def test_the_interface_cures_it(hosts, tmp_path):
    name_leads_to(hosts, ["127.0.1.1", "127.0.1.1"])
    said = joined(hosts, tmp_path / "script.py", GLOO_SOCKET_IFNAME="link0")
    assert said == ["joined 2", "joined 2"]


@pytest.mark.slow
def test_the_right_entry_cures_it(hosts, tmp_path):
    name_leads_to(hosts, ["10.99.0.1", "10.99.0.2"])
    assert joined(hosts, tmp_path / "script.py") == ["joined 2", "joined 2"]
