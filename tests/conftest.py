"""What all tests share: one thread, a seed each, and a guard for torch's global generator."""

import fcntl
import gc
import os
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import PurePath

# Before torch: for fixtures of modules, and for all processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from everyday import LONG, round_of
from hypothesis import settings

# The same examples on every machine, and no limit in seconds on a loaded one.
settings.register_profile("mpcomp", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("mpcomp")


def pytest_report_header() -> str:
    return f"torch: {torch.__version__}, {torch.cuda.device_count()} CUDA devices"


def pytest_configure(config: pytest.Config) -> None:
    """GPUs are hidden, as on a machine without one, but from a run that asks for them (-m gpu)."""
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Looks for no garbage among modules and tests: neither meanwhile, nor while a test runs."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests on GPUs are skipped where there are fewer than their mark says, which is 1 or more."""
    mark = item.get_closest_marker("gpu")
    if mark is not None:
        (needed,) = mark.args or (1,)
        if torch.cuda.device_count() < needed:
            pytest.skip(f"needs {needed} CUDA devices, and pytest -m gpu")


#: Of tests marked ``each_once``, the round in which their parameters are in turn.
ROUND = pytest.StashKey[int | None]()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Of tests marked ``each_once``, all but the cases of the everyday suite are slow."""
    if item.get_closest_marker("each_once") is not None:
        item.stash[ROUND] = round_of(item)
        if item.stash[ROUND] != 0:
            item.add_marker(pytest.mark.slow)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of tests marked ``each_once``, cases that are in no round are left out; long files begin."""
    left_out = [item for item in items if item.stash.get(ROUND, 0) is None]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item.stash.get(ROUND, 0) is not None]
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONG)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Seconds of tests by room, where several were run; tests of ranks wait for each other."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                folders = PurePath(report.nodeid.partition("::")[0]).parts[1:-1]
                seconds["/".join(folders) or "tests"] += report.duration
    if len(seconds) > 1:
        terminalreporter.section("seconds of tests by room")
        for room, spent in seconds.most_common():
            terminalreporter.line(f"{spent:7.0f} {room}")


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread, so that sums have one order; a seed from the test's name, not from its turn."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def global_rng_untouched() -> Callable[[], AbstractContextManager[None]]:
    """A context within which torch's global generator must not move."""

    @contextmanager
    def guard() -> Iterator[None]:
        before = torch.get_rng_state()
        yield
        assert torch.equal(before, torch.get_rng_state()), "torch's global generator was advanced"

    return guard


@pytest.fixture
def _no_walk_through_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coding timed as it comes: the walk before each message takes most of a measurement."""
    monkeypatch.setattr("mpcomp.plan.coding._CACHE_BYTES", 1 << 20)


@pytest.fixture(scope="session")
def _coder_is_compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The entropy coder's machine code: one worker compiles it, all other processes load it."""
    from mpcomp.compressors.compiling import compile_coder

    with (tmp_path_factory.getbasetemp().parent / "coder").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        compile_coder()


@pytest.fixture(scope="session")
def ranks(_coder_is_compiled: None) -> Callable[..., list[object]]:
    """Runs a function in several processes; see `ranks.run_ranks`."""
    from ranks import run_ranks, start_server

    start_server()
    return run_ranks


@pytest.fixture(scope="session", autouse=True)
def _server_of_ranks(request: pytest.FixtureRequest) -> None:
    """The server of ranks, where a test has use for it, is there before a recipe starts another."""
    if any("ranks" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("ranks")
