"""Dockerfile and release workflow, as far as they can be looked at without Docker and the index."""

import re
import shlex
import subprocess

import pytest
import yaml
from pages import ROOT

from mpcomp.version import __version__

DOCKERFILE = (ROOT / "Dockerfile").read_text()
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())


def test_the_container_runs_the_first_command_of_the_readme():
    (extract,) = re.findall(r"^RUN (awk .*) > first\.sh$", DOCKERFILE, re.MULTILINE)
    script = subprocess.run(
        ["sh", "-c", extract], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    assert subprocess.run(["sh", "-n"], input=script, text=True).returncode == 0
    words = shlex.split(script)
    assert "venv" not in script and any(word.startswith("recipes.") for word in words)
    first = re.search(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert first and first[1].endswith(script) and first[1].count("\n") == script.count("\n") + 1
    assert DOCKERFILE.rstrip().endswith('CMD ["sh", "-ex", "first.sh"]')


def test_the_image_has_what_the_readme_installs():
    (line,) = re.findall(r"^RUN pip install (.*)$", DOCKERFILE, re.MULTILINE)
    assert line.removeprefix("--no-cache-dir ") in (ROOT / "README.md").read_text()
    assert "https://" not in DOCKERFILE


def test_only_the_job_that_publishes_may_ask_for_an_identity():
    build, publish = WORKFLOW["jobs"]["build"], WORKFLOW["jobs"]["publish"]
    assert WORKFLOW["permissions"] == {"contents": "read"} and "permissions" not in build
    assert publish["permissions"] == {"id-token": "write"} and publish["needs"] == "build"
    assert publish["environment"] == "pypi"
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert not [step for step in publish["steps"] if "run" in step]


@pytest.mark.parametrize("tag, fits", [("v0.1.0", True), ("v0.1", False), ("v0.1.0rc1", False)])
def test_a_tag_of_another_version_is_refused(tag, fits, tmp_path):
    (step,) = (
        s for s in WORKFLOW["jobs"]["build"]["steps"] if s.get("name", "").endswith("version")
    )
    (tmp_path / "dist").mkdir()
    for ending in (".tar.gz", "-py3-none-any.whl"):
        (tmp_path / "dist" / f"mpcomp-0.1.0{ending}").touch()
    done = subprocess.run(
        ["bash", "-e", "-c", step["run"]],
        cwd=tmp_path,
        env={"GITHUB_REF_NAME": tag, "PATH": "/usr/bin:/bin"},
        capture_output=True,
    )
    assert (done.returncode == 0) == fits


def test_each_command_of_the_workflow_can_be_read():
    lines = [s["run"] for job in WORKFLOW["jobs"].values() for s in job["steps"] if "run" in s]
    assert len(lines) == 3
    for line in lines:
        assert subprocess.run(["bash", "-n"], input=line, text=True).returncode == 0


def test_citation_and_changelog_name_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert citation["version"] == __version__
    assert headings[:2] == ["Unreleased", __version__]
