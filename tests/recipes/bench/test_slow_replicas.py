"""The measurement of replicas: its arithmetic by hand, and short runs of it."""

import contextlib
import json
import subprocess
import threading

import pytest

from mpcomp.data_parallel.methods import replica_method_of
from recipes.bench import (
    replica_report,
    replica_turns,
    replica_variants,
    replica_worker,
    slow_replicas,
)
from recipes.bench.hosts import HostsUnavailable, open_hosts
from recipes.bench.replica_variants import ALONE, REFERENCE

TINY = [
    "--width",
    "4",
    "--batch",
    "4",
    "--replicas",
    "2",
    "--train-limit",
    "64",
    "--test-limit",
    "32",
    "--threads",
    "1",
]


def turn(variant, seconds, *, repeat=0, limited=True, **rest):
    where = {"variant": variant, "limited": limited, "repeat": repeat, "steps": 2}
    sent = {"wire_bytes": 1000.0, "floats": 250.0, "loss": 1.0, "factors": [None, None]}
    counted = [{"tx_bytes": 4000}, {"tx_bytes": 2000}]
    return {**where, "seconds": seconds, **sent, "at": {}, "interfaces": counted, **rest}


def turns():
    """Two repetitions of dense steps and of one method."""
    own = {"wire_bytes": 100.0, "encode_s": 0.01, "wait_s": 0.02, "decode_s": 0.03}
    return [
        turn(ALONE, 0.5, limited=False),
        turn(REFERENCE, 1.0, limited=False),
        turn(REFERENCE, 4.0),
        turn("mpcomp a", 2.0, factors=[20.0, 10.0], at={"paths": {"gather": 3}}, **own),
        turn(ALONE, 0.5, limited=False, repeat=1),
        turn(REFERENCE, 1.5, limited=False, repeat=1),
        turn("mpcomp a", 1.5, repeat=1, factors=[10.0, 10.0], at={"paths": {"gather": 3}}, **own),
        turn(REFERENCE, 6.0, repeat=1),
    ]


def test_compared_to_the_dense_step_of_the_same_repetition():
    dense, method = replica_report.summarise(turns())
    assert dense["variant"] == REFERENCE
    assert dense["speedup"] == {"median": 1.0, "quartiles": (1.0, 1.0)}
    assert dense["of_ceiling"]["median"] == 0.25  # 1 / 4 and 1.5 / 6
    assert method["speedup"]["median"] == 3.0  # of 4 / 2 and 6 / 1.5
    assert method["of_ceiling"]["median"] == 0.75  # of 1 / 2 and 1.5 / 1.5
    # (dense / own) / (dense / unlimited dense) is the same number
    assert method["of_ceiling"]["quartiles"] == (0.625, 0.875)
    assert (method["wire_bytes"], method["host_bytes"]) == (100.0, 1500.0)
    assert (method["decode_s"], dense["decode_s"]) == (0.03, None)
    assert (method["factors"], dense["factors"]) == ([10.0, 20.0], None)


def test_share_of_communication_and_ceiling():
    figures = replica_report.dense_figures(turns())
    assert figures["communication_share"]["median"] == pytest.approx((7 / 8 + 11 / 12) / 2)
    assert figures["ceiling"]["median"] == 4.0
    assert figures["compute_s"]["median"] == 0.5


def training(variant, seconds, *, reached=True):
    looks = [{"steps": 5, "seconds": seconds, "accuracy": 0.9 if reached else 0.2}]
    sent = {"wire_bytes": 10.0, "host_bytes": None}
    return {
        **{"variant": variant, "reached": reached, "best": looks[0]["accuracy"]},
        **{"steps": 5, "seconds": seconds, "looks": looks, **sent},
    }


def test_times_to_an_accuracy_are_those_of_the_seeds_that_reached_it():
    dense, method, lost = replica_report.summarise_trainings(
        [
            training(REFERENCE, 8.0),
            training("mpcomp a", 2.0),
            training("mpcomp b", 1.0, reached=False),
            training(REFERENCE, 9.0),
            training("mpcomp a", 99.0, reached=False),
            training("mpcomp b", 1.0, reached=False),
        ]
    )
    assert dense["seconds"]["median"] == 8.5
    assert (method["num_reached"], method["n"]) == (1, 2)
    assert (method["seconds"]["median"], method["speedup"]["median"]) == (2.0, 4.0)
    assert lost["seconds"] is lost["speedup"] is None
    assert lost["best"]["median"] == 0.2


def test_tables_say_what_is_doubtful():
    result = {
        "settings": {"replicas": 2, "model": "resnet18", "width": 4, "batch": 8}
        | {"hang_timeout": 9.0, "accuracy": 0.5, "data": "digits", "eval_every": 5},
        "mbps": 12.0,
        "dense_bytes": 1000,
        "dense": replica_report.dense_figures(turns()),
        "figures": replica_report.summarise(turns()),
        "tried": {"torch powersgd:2, DDP's own buckets": "hangs"},
        "accuracy": replica_report.summarise_trainings(
            [training(REFERENCE, 8.0), training("mpcomp a", 2.0, reached=False)]
        ),
    }
    shown = replica_report.tables(result)
    assert "torch fp16 / own" in shown and " –" in shown  # which was not measured
    assert "12 Mbit/s" in shown
    assert "10 to 20" in shown  # its factor has not settled
    assert "own buckets: hangs" in shown
    assert "0 of 1" in shown
    assert "NOTE" not in shown
    result["dense"]["communication_share"]["median"] = 0.79
    assert "NOTE: communication is less than 80%" in replica_report.tables(result)


def test_rate_leaves_the_share_to_communication():
    # a ring of 4 sends 1.5 times the gradients: 12 Mbit, in 3 s, beside 1 s of computation
    sends = replica_turns.ring_bytes(1_000_000, num_replicas=4)
    mbps = replica_turns.rate_for(sends, 1.0, share=0.75)
    assert mbps == 3.0  # even if the step is no longer than these 3 s, 0.67 of it; so 4 s:
    assert 12 / mbps == pytest.approx(1.0 / (1 - 0.75))


def test_methods_are_compared_once_and_the_dense_one_first():
    options = slow_replicas.parse_args(
        ["--torch", "fp32", "fp16", "--methods", "onebitsgd", "topk:0.1", "onebitsgd"]
    )
    assert slow_replicas.names_of(options) == [
        *(REFERENCE, "torch fp16", "mpcomp onebitsgd", "mpcomp topk:0.1")
    ]


@pytest.fixture
def time_passes(monkeypatch):
    """Lets seconds pass, and no other time does."""
    now = [100.0]

    def passes(seconds):
        now[0] += seconds

    monkeypatch.setattr(replica_variants.time, "perf_counter", lambda: now[0])
    return passes


def test_stopwatch_stands_still_between_turns(time_passes):
    watch = replica_variants.Stopwatch()
    with watch:
        time_passes(1.0)
    time_passes(5.0)
    assert watch.now() == 1.0
    with watch:
        assert watch.now() == 1.0
        time_passes(2.0)
    assert watch.now() == 3.0


def test_adaptive_methods_do_not_time_the_turns_of_others(time_passes):
    watch = replica_variants.Stopwatch()
    method = replica_method_of("gravac:window=5+topk:0.1")
    replica_variants.time_by(method, watch)
    clock = method.clock()
    with watch:
        clock.lap(0.0, 0)
    time_passes(5.0)
    with watch:
        time_passes(2.0)
        assert clock.lap(0.0, 0) == 2.0
    modelled = replica_method_of("gravac:bandwidth_mbps=8:compute_ms=500+topk:0.1")
    replica_variants.time_by(modelled, watch)
    assert modelled.clock().lap(1e6, 1) == 1.5  # as it was told


@pytest.mark.parametrize(
    ("spec", "left"),
    [
        ("dgc:0.01", 0.0),
        ("gravac:momentum=0.9+topk:0.1", 0.0),
        ("gravac+topk:0.1", 0.9),
        ("ef+topk:0.1", 0.9),
    ],
)
def test_the_optimizer_keeps_its_momentum_unless_the_method_has_one(spec, left):
    assert replica_variants.momentum_beside(replica_method_of(spec), 0.9) == left


def test_hang_is_told_from_end_and_error():
    assert not replica_worker.hangs(lambda: None, 60.0)
    leave = threading.Event()
    assert replica_worker.hangs(leave.wait, 0.05)
    leave.set()
    with pytest.raises(ZeroDivisionError):
        replica_worker.hangs(lambda: 1 / 0, 60.0)


@pytest.mark.slow
def test_short_run(tmp_path, capsys):
    out, picture = tmp_path / "figures" / "replicas.json", tmp_path / "replicas.png"
    few = "--loopback --repeats 2 --steps 2 --warmup-steps 2 --hang-timeout 0"
    chosen = "--torch fp16 powersgd:2 --methods powersgd:2 dgc:0.01 gravac:window=2+topk:0.1"
    train = "--accuracy 0.99 --seeds 1 --max-steps 4 --eval-every 3"
    slow_replicas.main(
        [*TINY, *f"{few} {chosen} {train}".split(), "--json", str(out), "--plot", str(picture)]
    )
    result = json.loads(out.read_text())
    figures = {figure["variant"]: figure for figure in result["figures"]}
    dense = figures[REFERENCE]
    assert dense["wire_bytes"] == result["dense_bytes"] == 4 * dense["floats"]
    assert figures["torch fp16"]["wire_bytes"] == dense["wire_bytes"] / 2
    assert figures["torch powersgd:2"]["wire_bytes"] < dense["wire_bytes"] / 4
    assert figures["mpcomp powersgd:2"]["wire_bytes"] < dense["wire_bytes"] / 4
    assert figures["mpcomp dgc:0.01"]["wire_bytes"] < dense["wire_bytes"] / 4
    assert figures["mpcomp gravac:window=2+topk:0.1"]["factors"] is not None
    assert all(figure["n"] == 2 for figure in figures.values())
    assert [one["variant"] for one in result["trainings"]] == list(figures)
    assert all(one["steps"] == 4 and not one["reached"] for one in result["trainings"])
    assert result["mbps"] is None and result["machine"]["mpcomp"]
    assert "--accuracy 0.99" in result["command"]
    assert picture.stat().st_size > 1000
    assert "mpcomp dgc:0.01" in capsys.readouterr().out


def hosts_left():
    shown = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in shown.stdout.splitlines() if "mpcomp-" in line]


@pytest.mark.slow
def test_hosts_are_gone_after_a_failure(capfd):
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(open_hosts(2))
        except HostsUnavailable as error:
            pytest.skip(f"no network namespaces: {error}")
    before = hosts_left()
    with pytest.raises(RuntimeError, match="ended with exit code 1"):
        slow_replicas.main([*TINY, *["--torch", "--methods", "powersgd:100000"]])
    assert "100000" in capfd.readouterr().err  # the worker says why
    assert hosts_left() == before


def test_bad_options():
    for options, message in {
        "--replicas 1": "replicas is 1; pass at least 2",
        "--steps 0": "steps is 0; pass at least 1",
        "--mbps 0": "mbps is 0; pass Mbit/s above 0",
        "--share 1": "share is 1; pass a fraction between 0 and 1",
        "--accuracy 95": "accuracy is 95; pass a fraction",
        "--torch fp8": "'fp8' is none of torch's hooks: pass fp32, fp16 or powersgd:<rank>",
        "--methods aqsgd+quant:4": "between replicas",
        "--methods topq:0.1": "topq",
    }.items():
        with pytest.raises(SystemExit, match=message):
            slow_replicas.main(options.split())
