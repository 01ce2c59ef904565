"""The check on a GPU: a toy run of all parts, runs that are cut off, and the tables."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.bench import gpu_check, jobs
from recipes.bench.gpu_check import PARTS, Part, run_parts
from recipes.bench.gpu_report import NOTHING, PartFile, tables
from recipes.lab.results_pages import as_markdown

ROOT = Path(__file__).parents[3]
NAMES = [part.name for part in PARTS]


# -- parts of these tests --------------------------------------------------------------------------


def two_rows(reporter, dry):
    reporter.say({"value": 1})
    reporter.say({"value": 2})


def other_rows(reporter, dry):
    reporter.say({"value": 3})


def two_rows_then_hangs(reporter, dry):
    two_rows(reporter, dry)
    time.sleep(600)


def two_rows_then_dies(reporter, dry):
    two_rows(reporter, dry)
    os.kill(os.getpid(), 9)


def fails(reporter, dry):
    raise ValueError("no such thing")


def of_no_use(reporter, dry):
    reporter.say({"why_skipped": "nothing is there"})


def ends_of_ranks(reporter, dry):
    from recipes.bench.gpu_forks import together

    for name, function in (("sum", rank_of), ("raised", raises), ("slept", sleeps)):
        text, values = together(function, 2, seconds=60 if name != "slept" else 3)
        reporter.say({"name": name, "text": text, "values": values})


def rank_of():
    import torch.distributed as dist

    return dist.get_rank()


def raises():
    if rank_of():
        raise ValueError("the second rank")
    sleeps()


def sleeps():
    time.sleep(600)


def part(name, function, seconds=60.0):
    return Part(name, seconds, "", f"{__name__}:{function.__name__}")


def run(parts, path, *, file=None, **options):
    """Runs toy parts at the toy size; how each ended, without its seconds."""
    ended = run_parts(parts, file or PartFile(path), **{"seconds": 100, "dry": True, **options})
    return {name: re.sub(r" \(\d+ s\)$", "", how) for name, how in ended.items()}


def states(path):
    parts = json.loads(path.read_text())["parts"]
    return {
        name: (one["state"], [row.get("value") for row in one["rows"]])
        for name, one in parts.items()
    }


# -- the whole command -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dry_run_goes_through_all_parts(tmp_path):
    out = tmp_path / "new" / "check.json"
    command = [sys.executable, "-m", "recipes.bench.gpu_check", "--dry-run", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    parts = json.loads(out.read_text())["parts"]
    expected = dict.fromkeys(NAMES, "done")
    if importlib.util.find_spec("triton") is None:
        expected["kernels"] = "skipped"
    assert {name: part["state"] for name, part in parts.items()} == expected
    assert all(part["stamp"]["dry_run"] for part in parts.values())
    rows = {name: part["rows"] for name, part in parts.items()}

    facts = rows["machine"][0] | rows["machine"][1]
    assert facts["cores"] >= 1 and facts["nccl"] is None and facts["in_host_memory_gb_s"] > 0
    assert [row["collected"] > 100 for row in rows["tests"]] == [True]
    assert len(rows["messages"]) == 14
    assert all(row["encode"]["operations"] > 3 for row in rows["messages"])
    for row in rows["kernels"]:
        assert "why_skipped" in row or (row["calls"] > 0 and row["differing"] == 0), row
    for before, in_lanes in zip(rows["lanes"][::2], rows["lanes"][1::2], strict=True):
        assert before["same"] and in_lanes["same"]
        assert 0 < in_lanes["num_bytes"] - before["num_bytes"] < 0.008 * before["num_bytes"]
    assert {row["row"] for row in rows["coding"]} == {"bf16", "auto:scratch"}
    sent = {
        (row["method"], row["background"], row["mbps"]): row["wire_bytes"]
        for row in rows["pipeline"]
    }
    assert 3 < sent["bf16", False, None] / sent["quant:4", False, None] < 4
    ways = ((False, None), (True, None), (True, 1000))
    scratch = {sent[("auto:scratch", *way)] for way in ways}
    assert len(scratch) == 1 and sent["bf16", False, 1000] == sent["bf16", False, None]
    for row in rows["pipeline"]:
        assert (row["outcome"], row["losses_equal"], row["gpu_idle"]) == ("ran", True, None)
        assert row["losses"][-1] < row["losses"][0]
    late, late_beside, *sanitized = (row["outcome"] for row in rows["races"])
    assert late == late_beside == "ran, losses equal"
    assert sanitized == ["not run: a dry run has no GPU"] * 2
    assert [row["case"] for row in rows["nccl"]] == ["fixed", "variable", "tied"]
    assert {row["outcome"] for row in rows["nccl"]} == {"ran, losses as in one process"}

    for name in NAMES:
        assert re.search(rf"^{name}: {expected[name]}.* \(\d+ s\)$", ended.stdout, re.MULTILINE)
    assert ended.stdout.startswith(tables(parts, NAMES))


# -- what is kept, and what is run again -----------------------------------------------------------


class KilledAfterTwoRows(PartFile):
    """The limit is over as soon as two rows are there."""

    def take(self, name, message):
        super().take(name, message)
        if len(self.parts.get(name, {}).get("rows", ())) == 2 and name == "b":
            jobs.GRACE_S = 0.0


@pytest.mark.timeout(120)
def test_a_part_that_hangs_keeps_its_rows_and_is_run_again(tmp_path, monkeypatch):
    path = tmp_path / "check.json"
    monkeypatch.setattr(jobs, "GRACE_S", 100.0)
    parts = [part("a", two_rows), part("b", two_rows_then_hangs, 0.01), part("c", other_rows)]
    ended = run(parts, path, file=KilledAfterTwoRows(path))
    assert ended["a"] == "done" and ended["b"].startswith("stopped: killed after")
    assert states(path) == {"a": ("done", [1, 2]), "b": ("stopped", [1, 2]), "c": ("done", [3])}

    ended = run([parts[0], part("b", other_rows), parts[2]], path)
    before = "done before, by this code"
    assert ended == {"a": before, "b": "done", "c": before}
    assert states(path)["b"] == ("done", [3])


@pytest.mark.timeout(120)
def test_a_part_is_run_again_if_asked_for_or_if_the_code_is_another(tmp_path, monkeypatch):
    path = tmp_path / "check.json"
    run([part("a", two_rows)], path)
    assert run([part("a", other_rows)], path, again=True) == {"a": "done"}
    assert states(path) == {"a": ("done", [3])}
    monkeypatch.setattr(gpu_check, "code_id", lambda: "another")
    assert run([part("a", two_rows)], path, commit="abc") == {"a": "done"}
    assert states(path) == {"a": ("done", [1, 2])}
    assert PartFile(path).parts["a"]["stamp"]["commit"] == "abc"


@pytest.mark.timeout(120)
def test_a_try_without_a_row_loses_nothing_and_others_say_what_happened(tmp_path):
    path = tmp_path / "check.json"
    run([part("a", two_rows)], path)
    parts = [part("a", fails), part("d", two_rows_then_dies), part("s", of_no_use)]
    ended = run(parts, path, again=True)
    assert ended == {
        "a": "failed: ValueError: no such thing",
        "d": "failed: died with exit code -9",
        "s": "skipped: nothing is there",
    }
    assert states(path) == {
        "a": ("done", [1, 2]),
        "d": ("failed", [1, 2]),
        "s": ("skipped", [None]),
    }
    assert run(parts[2:], path) == {"s": "skipped: nothing is there"}


@pytest.mark.timeout(120)
def test_an_interrupted_run_says_so(tmp_path):
    class Interrupts(PartFile):
        def take(self, name, message):
            super().take(name, message)
            if self.parts:
                raise KeyboardInterrupt

    path = tmp_path / "check.json"
    with pytest.raises(KeyboardInterrupt):
        run([part("a", two_rows_then_hangs)], path, file=Interrupts(path))
    assert states(path) == {"a": ("stopped", [1])}
    assert PartFile(path).parts["a"]["why"] == "interrupted"


@pytest.mark.timeout(120)
def test_without_a_gpu_only_a_dry_run_is_one(tmp_path):
    path = tmp_path / "check.json"
    (how,) = run([part("a", two_rows)], path, dry=False).values()
    assert re.fullmatch(r"failed: ValueError: torch .* finds no GPU here; .*--dry-run", how)
    assert not path.exists()


def test_parts_that_would_not_fit_are_not_begun(tmp_path):
    path = tmp_path / "check.json"
    assert run([part("a", two_rows)], path, seconds=0) == {"a": "not begun"}
    assert not path.exists()


@pytest.mark.timeout(120)
def test_ends_of_ranks(tmp_path):
    path = tmp_path / "check.json"
    run([part("a", ends_of_ranks)], path)
    rows = PartFile(path).parts["a"]["rows"]
    assert [(row["text"], row["values"]) for row in rows] == [
        ("ran", [0, 1]),
        ("failed: ValueError: the second rank", None),
        ("hung, killed after 3 s", None),
    ]


# -- what parts read -------------------------------------------------------------------------------


def test_counts_of_a_trace():
    from recipes.bench.gpu_messages import counts_within

    def event(cat, name, ts, number=None, **args):
        if number is not None:
            args["correlation"] = number
        return {"cat": cat, "name": name, "ts": ts, "dur": 1, "args": args}

    events = [
        {"ph": "M", "name": "process_name"},
        {"cat": "user_annotation", "name": "encode", "ts": 10, "dur": 10},
        {"cat": "gpu_user_annotation", "name": "encode", "ts": 90, "dur": 10},
        event("cuda_runtime", "cudaLaunchKernel", 11, 1),
        event("cuda_runtime", "cudaMemcpyAsync", 12, 2),
        event("cuda_runtime", "cudaMemcpyAsync", 13, 3),
        event("cuda_runtime", "cudaStreamSynchronize", 14, 4),
        event("cuda_driver", "cuLaunchKernel", 15, 5),
        event("cuda_runtime", "cudaLaunchKernel", 30, 6),
        event("cuda_runtime", "cudaDeviceSynchronize", 31, 7),
        event("kernel", "add", 90, 1),
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 91, 2, bytes=24),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 92, 3, bytes=1000),
        event("kernel", "triton", 93, 5),
        event("kernel", "later", 94, 6),
        event("kernel", "of nobody", 95),
    ]
    assert counts_within(events, "encode") == {
        "operations": None,
        "kernels": 2,
        "copies": {"HtoD": {"count": 2, "bytes": 1024}},
        "syncs": {"cudaStreamSynchronize": 1},
    }


def test_spans_of_messages_are_in_a_trace_of_torch():
    import torch

    from recipes.bench.gpu_messages import _kernels

    def work(around):
        with around("encode activation"):
            torch.ones(3).sum()

    (counts,) = _kernels(work).values()
    assert counts["kernels"] == 0 and counts["copies"] == {}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            [
                "...F.sE [100%]",
                "FAILED tests/test_a.py::test_b - assert 1 == 2",
                "ERROR tests/c.py",
                "1 failed, 5 passed, 2 skipped, 1 error in 75.21s (0:01:15)",
            ],
            {"passed": 5, "failed": 1, "skipped": 2, "errors": 1, "collected": None},
        ),
        (["2 passed, 2 errors in 3.1s"], {"passed": 2, "failed": 0, "errors": 2}),
        (["220/230 tests collected (10 deselected) in 1.81s"], {"collected": 220, "passed": None}),
        (["1 test collected in 1.81s"], {"collected": 1, "failed": None}),
        (["bringing up nodes...", "...F.. [ 32%]"], {"passed": None, "collected": None}),
        ([], {"passed": None, "last_lines": []}),
    ],
)
def test_result_of_pytest(lines, expected):
    from recipes.bench.gpu_parts import result_of

    found = result_of(lines)
    assert {name: found[name] for name in expected} == expected
    assert found["failures"] == [line for line in lines if "tests/" in line]


def test_nccl_is_tried_where_two_ranks_can_be():
    from recipes.bench.gpu_ranks import why_not

    assert why_not(2, (2, 28, 9)) is None
    assert why_not(1, (2, 31, 0)) is None
    assert why_not(1, (2, 28, 9)) == "NCCL 2.28.9 on one GPU; two ranks on one need 2.31 or later"
    assert why_not(1, None) == "this torch has no NCCL"


def test_layers_gradients_and_messages_are_late(monkeypatch):
    import torch

    from mpcomp.core.context import Step, TensorMeta
    from mpcomp.links.build import boundaries_of
    from recipes.bench import gpu_races

    slept = []
    monkeypatch.setattr(gpu_races.time, "sleep", slept.append)
    layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    (boundary,) = boundaries_of("none", "none", ("cut",), seed=0, replica=0, warmup_steps=0)
    step = Step(index=0, train=True, sample_ids=(((0,), (1,)),))
    with gpu_races.sleeping(torch.device("cpu")):
        y = layer(x)
        assert len(slept) == 1
        y.sum().backward()
        assert len(slept) == 2
        message = boundary.act.encode(x, step, 0)
        assert len(slept) == 3
        boundary.act.decode(message, TensorMeta.of(x), step, 0)
        assert len(slept) == 4
    layer(x)
    assert len(slept) == 4


def test_parts_of_the_check_fit():
    assert sum(part.seconds for part in PARTS) <= 420


# -- tables ----------------------------------------------------------------------------------------


def stamped(state, rows, why="", **stamp):
    origin = {"commit": "abc", "code": "123", "gpu": "H100", "torch": "2.11", "dry_run": False}
    seconds = None if state == "running" else 8.1
    return {
        **{"stamp": {**origin, **stamp}, "state": state, "why": why, "seconds": seconds},
        "rows": rows,
    }


def end_of(kernels, **copies):
    copied = {kind: {"count": 2, "bytes": 500_000} for kind in copies}
    return {"operations": None, "kernels": kernels, "copies": copied, "syncs": {"cudaMemcpy": 3}}


def on_a_gpu():
    """A file of which no part is like another."""
    ranks = {"method": "quant:4", "outcome": "ran", "threads": 8, "step_s": 0.25}
    ranks |= {"one_process_step_s": 0.5, "gpu_idle": 0.25, "wire_bytes": 5_000_000}
    ranks |= {"losses_equal": False, "largest_difference": 1.5e-5}
    hung = {**ranks, "method": "auto:scratch", "outcome": "failed: OutOfMemoryError: none\nat x"}
    hung |= dict.fromkeys(("step_s", "gpu_idle", "wire_bytes", "losses_equal"))
    hung |= {"background": True, "mbps": 1000.0}
    tested = {"command": "-q -m gpu -n 8", "collected": None, "passed": 5, "failed": 1}
    tested |= {"errors": 0, "skipped": 2, "seconds": 61.2, "last_lines": []}
    tested["failures"] = ["FAILED tests/test_cuda.py::test_x - assert"]
    coded = {"row": "auto:scratch", "threads": 16, "encode_act_s": 0.1, "decode_act_s": 0.2}
    return {
        "machine": stamped("done", [{"gpu": "H100", "driver": None, "in_gpu_memory_gb_s": 2944.2}]),
        "tests": stamped("failed", [tested], "RuntimeError: pytest ended\nat line 3", commit=None),
        "messages": stamped(
            "running",
            [
                {
                    **{"method": "quant:4", "message": "gradient"},
                    **{"encode": end_of(45, HtoD=1), "decode": end_of(23, DtoH=1, DtoD=1)},
                }
            ],
        ),
        "kernels": stamped(
            "done",
            [
                {
                    **{"kernel": "rounding.rounded", "calls": 96, "differing": 1},
                    **{"gb_s": 2000.4, "torch_gb_s": None},
                }
            ],
        ),
        "lanes": stamped(
            "done",
            [
                {
                    **{"method": "step:1", "kind": "lanes, blocks alone", "coded_on": "GPU"},
                    **{"num_bytes": None, "encode_gb_s": 20.5, "decode_gb_s": 3.25, "same": True},
                },
                {
                    **{"method": "step:2", "kind": "lanes", "coded_on": "host"},
                    **{"num_bytes": 12345, "encode_gb_s": 0.5, "decode_gb_s": 1.0, "same": False},
                },
            ],
        ),
        "races": stamped(
            "done",
            [{"check": "sleeps, coded in turn", "methods": "none", "outcome": "failed: a\nat x"}],
        ),
        "coding": stamped(
            "stopped", [{**coded, "encode_grad_s": 0.3, "decode_grad_s": 0.4}], "killed after 68 s"
        ),
        "pipeline": stamped(
            "done", [ranks, {**hung, "largest_difference": None}], gpu=None, dry_run=True
        ),
        "nccl": stamped("skipped", [{"why_skipped": "NCCL 2.28.9"}], "NCCL 2.28.9"),
    }


def cells(text, first):
    """The cells of the row of a printed table that begins so."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"{first} "))
    return re.split(r"\s{2,}", line.rstrip())


def test_tables():
    text = tables(on_a_gpu(), NAMES)
    assert cells(text, "tests")[:5] == ["tests", "failed", "8", "H100", "2.11"]
    assert cells(text, "tests")[5:] == ["123", "RuntimeError: pytest ended"]
    assert cells(text, "messages")[1:3] == ["running", "–"]
    assert cells(text, "coding")[1:] == ["stopped", "8", "H100", "2.11", "abc", "killed after 68 s"]
    assert cells(text, "pipeline")[3] == "dry run, CPU"
    assert cells(text, "nccl")[-1] == "NCCL 2.28.9" and "\nnccl\n" not in text
    assert cells(text, "in GPU memory, read and written, GB/s")[1] == "2944.2"
    assert cells(text, "driver") == ["driver", "–"]
    assert cells(text, "-q -m gpu -n 8")[1:] == ["–", "5", "1", "0", "2", "61"]
    assert "FAILED tests/test_cuda.py::test_x - assert" in text
    assert "failed: OutOfMemoryError: none" in text and "at x" not in text


def test_tables_become_markdown():
    page = as_markdown(tables(on_a_gpu(), NAMES))
    assert "| tests | failed | 8 | H100 | 2.11 | 123 | RuntimeError: pytest ended |" in page
    assert "| rounding.rounded | 96 | 1 | 2000 | – |" in page
    assert "| auto:scratch | 16 | 100.0 | 200.0 | 300.0 | 400.0 |" in page
    assert (
        "| quant:4 | gradient | – / – | 45 / 23 | 2 / 0 | 0 / 2 | 0 / 2 | 0.5 / 1.0 | 3 / 3 |"
        in page
    )
    two = "| quant:4 | in turn | – | ran | 8 | 0.250 | 0.500 | 25 | 5.0 | up to 1.5e-05 apart |"
    assert two in page
    hung = "| auto:scratch | in the background | 1000 | failed: OutOfMemoryError: none | 8 |"
    assert f"{hung} – | 0.500 | – | – | – |" in page
    assert "| step:1 | lanes, blocks alone | GPU | – | 20.50 | 3.25 | right |" in page
    assert "| step:2 | lanes | host | 12,345 | 0.50 | 1.00 | WRONG |" in page
    assert "| sleeps, coded in turn | none | failed: a |" in page


def test_a_part_that_was_not_run_is_named():
    text = tables({"machine": on_a_gpu()["machine"]}, NAMES)
    assert cells(text, "nccl")[:2] == ["nccl", "not run"]


def test_no_file_yet(tmp_path, capsys):
    gpu_check.main(["--table", "--out", str(tmp_path / "none.json")])
    assert capsys.readouterr().out == f"{NOTHING}\n"


def test_the_table_of_a_file(tmp_path, capsys):
    path = tmp_path / "check.json"
    path.write_text(json.dumps({"parts": on_a_gpu()}))
    gpu_check.main(["--table", "--out", str(path)])
    assert capsys.readouterr().out == tables(on_a_gpu(), NAMES) + "\n"


def test_the_plan(capsys):
    gpu_check.main(["--plan"])
    out = capsys.readouterr().out
    assert all(cells(out, name)[1].isdigit() for name in NAMES)
    assert cells(out, "all")[1] == f"{sum(part.seconds for part in PARTS):g}"


# -- wrong arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "machine", "grains"], "--parts 'grains': pass some of machine, tests, mess"),
        (["--seconds", "5"], "--seconds 5: pass more than 5, without which no part is begun"),
        (["--seconds", "nan"], "--seconds nan: pass more than 5"),
    ],
)
def test_wrong_arguments(arguments, message, tmp_path):
    with pytest.raises(SystemExit) as caught:
        gpu_check.main([*arguments, "--dry-run", "--out", str(tmp_path / "check.json")])
    assert str(caught.value.code).startswith(f"error: {message}")
    assert "\n" not in str(caught.value.code)


@pytest.mark.parametrize("content", ["{", "[]", '{"rows": []}', '{"parts": {"machine": {}}}'])
def test_a_file_of_something_else_is_left_alone(content, tmp_path):
    path = tmp_path / "check.json"
    path.write_text(content)
    with pytest.raises(SystemExit, match=r"error: .*check\.json .*choose another file"):
        gpu_check.main(["--dry-run", "--out", str(path)])
    assert path.read_text() == content
