"""The measurement of sharded training: its arithmetic by hand, and one short run of it."""

import json

import pytest

from recipes.bench import shard_report, slow_shards
from recipes.bench.replica_turns import rate_for
from recipes.bench.replica_variants import ALONE
from recipes.bench.shard_worker import REFERENCE, specs_of

CONEF = "conef:0.2+topk:0.1"
ROUNDED = "quant:4:scale=128,quant:8:scale=128"


def turn(variant, seconds, *, limited=True, sent=4000, **rest):
    where = {"variant": variant, "limited": limited, "repeat": 0, "steps": 2, "loss": 1.0}
    counted = [{"tx_bytes": sent}, {"tx_bytes": sent}]
    return {**where, "seconds": seconds, "factors": [], "at": {}, "interfaces": counted, **rest}


def test_compared_to_dense_fsdp():
    at = {"memory_bytes": 77}
    dense, method = shard_report.summarise(
        [
            turn(ALONE, 0.5, limited=False),
            turn(REFERENCE, 1.0, limited=False),
            turn(REFERENCE, 4.0),
            turn("mpcomp a", 2.0, sent=1000, encode_s=0.1, gather_s=0.2, at=at),
        ]
    )
    assert (dense["variant"], dense["host_bytes"], dense["memory_bytes"]) == (REFERENCE, 2000, None)
    assert dense["encode_s"] is dense["gather_s"] is None
    assert method["speedup"]["median"] == 2.0
    assert method["of_ceiling"]["median"] == 0.5
    assert (method["host_bytes"], method["memory_bytes"]) == (500, 77)
    assert (method["encode_s"], method["gather_s"]) == (0.1, 0.2)


def test_rate_leaves_the_share_to_communication():
    # 12 Mbit take 4 s beside 1 s of computation, and at least 0.75 of the step if it overlaps all
    assert rate_for(1_500_000, 1.0, share=0.75) == 3.0


def test_variants_say_what_gradients_and_weights_go_as():
    assert specs_of(f"mpcomp {CONEF}") == (CONEF, None)
    assert specs_of(f"mpcomp {CONEF}, quant:8") == (CONEF, "quant:8")
    options = slow_shards.parse_args(["--variants", "none", CONEF, "none"])
    assert slow_shards.names_of(options) == [REFERENCE, "mpcomp none", f"mpcomp {CONEF}"]


def test_variants_of_one_method_share_a_colour():
    names = [REFERENCE, "mpcomp a", "mpcomp a,b", "mpcomp c,b", "mpcomp c"]
    drawn = shard_report.looks(names)
    assert drawn["mpcomp a"]["color"] == drawn["mpcomp a,b"]["color"]
    assert len({drawn[name]["color"] for name in (REFERENCE, "mpcomp a", "mpcomp c")}) == 3
    assert drawn["mpcomp a,b"]["ls"] == drawn["mpcomp c,b"]["ls"] != drawn["mpcomp c"]["ls"]


@pytest.mark.slow
def test_short_run(tmp_path, capsys):
    out, picture = tmp_path / "figures" / "shards.json", tmp_path / "shards.png"
    tiny = "--blocks 1 --width 32 --context 16 --batch 2 --vocab 300 --train-limit 10 --threads 1"
    few = "--loopback --ranks 2 --repeats 1 --steps 1 --warmup-steps 1 --eval-limit 5"
    train = "--train-steps 3 --loss-every 2"
    slow_shards.main(
        [
            *f"{tiny} {few} {train} --variants none {CONEF} {ROUNDED}".split(),
            *("--json", str(out), "--plot", str(picture)),
        ]
    )
    result = json.loads(out.read_text())
    dense, none, conef, rounded = result["figures"]
    assert [dense["variant"], none["variant"]] == [REFERENCE, "mpcomp none"]
    # every rank sends half of all gradients to the other, and half of what it has rounded
    assert none["traffic_bytes"] == pytest.approx(result["dense_bytes"] / 2, rel=0.01)
    assert conef["traffic_bytes"] < none["traffic_bytes"] / 3
    assert rounded["traffic_bytes"] < none["traffic_bytes"] / 4
    assert none["gather_traffic_bytes"] is None
    assert 0 < rounded["gather_traffic_bytes"] < result["dense_bytes"] / 2
    # a sketch of a fifth, on every rank of the whole model
    assert none["memory_bytes"] == 0 < conef["memory_bytes"] < 0.25 * result["dense_bytes"]
    trained = result["trainings"]
    assert [one["variant"] for one in trained] == [one["variant"] for one in result["figures"]]
    assert [look["step"] for look in trained[0]["losses"]] == [2, 3]
    losses = [[look["loss"] for look in one["losses"]] for one in trained]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert losses[2] != losses[0]
    assert trained[1]["held_out"] == pytest.approx(trained[0]["held_out"], abs=1e-5)
    assert result["mbps"] is None and result["machine"]["mpcomp"]
    assert "--train-steps 3" in result["command"]
    assert picture.stat().st_size > 1000
    printed = capsys.readouterr().out
    assert CONEF in printed and "held-out" in printed


def test_bad_options():
    for options, message in {
        "--ranks 1": "ranks is 1; pass at least 2",
        "--steps 0": "steps is 0; pass at least 1",
        "--width 30": "width is 30; pass a multiple of 4",
        "--mbps 0": "mbps is 0; pass Mbit/s above 0",
        "--share 1": "share is 1; pass a fraction",
        "--train-steps -1": "train_steps is -1; pass at least 1, or 0",
        "--variants topq:0.1": "topq",
        "--variants none,quint:8": "quint",
        "--vocab 3": "vocab_size is 3",
        "--train-limit 1 --context 100000": "sequences of|fewer than one block",
    }.items():
        with pytest.raises(SystemExit, match=message):
            slow_shards.main(options.split())
