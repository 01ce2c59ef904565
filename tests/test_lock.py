"""The lock of uv: the versions of constraints.txt, from the public index."""

from urllib.parse import urlsplit

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pages import ROOT

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 has it")
LOCK = tomllib.loads((ROOT / "uv.lock").read_text())["package"]


def test_the_lock_has_the_versions_of_the_constraints():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    wanted = [Requirement(line) for line in lines if not line.startswith("#")]
    locked = {(package["name"], package.get("version")) for package in LOCK}
    missing = {(canonicalize_name(r.name), str(r.specifier)[2:]) for r in wanted} - locked
    assert not missing, "uv lock -P NAME==VERSION"


def test_the_lock_has_the_requirements_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    (own,) = (package for package in LOCK if package["name"] == project["name"])
    for extra, required in {"": project["dependencies"], **extras}.items():
        locked = {
            (each["name"], each.get("specifier", ""))
            for each in own["metadata"]["requires-dist"]
            if each.get("marker", "") == (f"extra == '{extra}'" if extra else "")
        }
        wanted = {(canonicalize_name(r.name), str(r.specifier)) for r in map(Requirement, required)}
        assert locked == wanted, "uv lock"


def test_the_lock_names_no_host_but_the_public_index():
    files = [
        file["url"]
        for package in LOCK
        for file in [*package.get("wheels", []), *filter(None, [package.get("sdist")])]
    ]
    sources = [p["source"]["registry"] for p in LOCK if "registry" in p["source"]]
    assert {urlsplit(url).hostname for url in files} == {"files.pythonhosted.org"}
    assert set(sources) == {"https://pypi.org/simple"}
