"""The example of three containers: its files are whole and fit each other, without Docker."""

import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from recipes import cifar10

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "examples" / "compose"
yaml = pytest.importorskip("yaml", reason="PyYAML comes with mpcomp[test]")


@pytest.fixture(scope="module")
def services():
    return yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]


def test_three_hosts_may_limit_their_links(services):
    assert len(services) == 3
    ranks = {service["environment"]["NODE_RANK"] for service in services.values()}
    assert ranks == {"0", "1", "2"}
    for service in services.values():
        assert service["cap_add"] == ["NET_ADMIN"]
        assert service["environment"]["MBPS"] == "${MBPS:-100}"
        assert service["environment"]["GLOO_SOCKET_IFNAME"] == "eth0"
        build = service["build"]
        context = (FOLDER / build["context"]).resolve()
        assert context == ROOT and (context / build["dockerfile"]).is_file()


def test_the_command_is_one_that_the_recipe_takes(services):
    for service in services.values():
        shell, option, line = service["command"]
        assert (shell, option) == ("sh", "-c")
        words = shlex.split(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", line))
        given = dict(pairwise(words))
        assert given["--nnodes"] == "3" and given["--node-rank"] == "$$NODE_RANK"
        assert given["--master-addr"] in services
        assert given["-m"] == "recipes.cifar10" and given["--split"] == "3"
        parsed = subprocess.run(["sh", "-n", "-c", line.replace("$$", "$")], capture_output=True)
        assert parsed.returncode == 0, parsed.stderr
        own = words[words.index("recipes.cifar10") + 1 :]
        options = {word for word in own if word.startswith("--")}
        source = Path(cifar10.__file__).read_text() + (ROOT / "recipes/command.py").read_text()
        assert all(f'"{option}"' in source for option in options)


def test_the_entry_point_limits_and_then_runs():
    script = FOLDER / "limited.sh"
    subprocess.run(["sh", "-n", script], check=True)
    text = script.read_text()
    assert re.search(r"tc qdisc add dev eth0 root tbf rate \"\$\{MBPS\}mbit\"", text)
    assert text.rstrip().endswith('exec "$@"')
    failed = subprocess.run(["sh", script, "true"], env={}, capture_output=True, text=True)
    assert failed.returncode != 0 and "MBPS" in failed.stderr


def test_what_the_image_copies_is_there():
    lines = (FOLDER / "Dockerfile").read_text().splitlines()
    copies = [line.split()[1] for line in lines if line.startswith("COPY")]
    assert copies and all((ROOT / path).exists() for path in copies)
    assert any("iproute2" in line for line in lines)
