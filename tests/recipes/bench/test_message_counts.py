"""Messages on an accelerator that is not there: their bits, and how much they ask of it.

What is coded on the host stays there. Ceilings are what a message takes today; they may fall.
"""

import json

import pytest
import torch
from torch.utils._pytree import tree_map_only

import mpcomp
from mpcomp import TensorMeta
from mpcomp.core.randomness import generator_for
from mpcomp.core.transfer import to_device, to_host
from mpcomp.entropy import lanes
from recipes.bench.fake_accelerator import DEVICE, FakeAccelerator
from recipes.bench.message_counts import main, rows_of, table

#: Launches, copies to the accelerator, copies from it and waits for it: encode, then decode.
CEILINGS = {
    "none": ((8, 1, 1, 1), (5, 1, 0, 0)),
    "quant:4": ((39, 1, 1, 1), (15, 1, 0, 0)),
    "topk:0.1": ((67, 1, 1, 1), (76, 1, 0, 0)),
    "step:0.3": ((17, 1, 3, 3), (9, 2, 0, 0)),
    "step:1:rounding=dither": ((40, 1, 4, 4), (32, 2, 1, 1)),
    "klt+topk:0.1": ((70, 1, 1, 1), (78, 1, 0, 0)),
    "ef21+topk:0.1": ((75, 1, 1, 1), (80, 1, 0, 0)),
    "aqsgd+step:0.3": ((28, 1, 3, 3), (13, 2, 0, 0)),
    "auto:memory": ((28, 1, 3, 3), (13, 2, 0, 0)),
    "auto:scratch": ((42, 2, 4, 4), (33, 2, 1, 1)),
}


def tensor():
    return torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


@pytest.mark.parametrize("method", CEILINGS)
def test_a_message_asks_no_more_of_an_accelerator(method):
    with FakeAccelerator() as accelerator:
        for row in rows_of(method, tensor().to(DEVICE), accelerator):
            for end, ceiling in zip(("encode", "decode"), CEILINGS[method], strict=True):
                counts = row[end]
                found = counts.launches, counts.up, counts.down, counts.waits
                assert all(a <= b for a, b in zip(found, ceiling, strict=True)), (row, end)


@pytest.mark.parametrize("method", ["quant:4", "topk:0.1", "step:0.3:centre=true", "rotate+step:1"])
def test_payloads_and_tensors_have_the_bits_of_a_cpu(method):
    """And those that were coded on the host lie there, whatever device the tensor is on."""
    compressor, x = mpcomp.parse(method), tensor()
    meta = TensorMeta.of(x)
    payload = compressor.compress(x, generator_for(1))
    expected = compressor.decompress(payload, meta, generator_for(1))
    with FakeAccelerator():
        there = compressor.compress(x.to(DEVICE), generator_for(1))
        assert {part.device.type for part in there} == {"cpu" if compressor.on_host else "ipu"}
        arrived = compressor.decompress_to(DEVICE, there, meta, generator_for(1))
        assert arrived.device == DEVICE
        found, on_host = to_host(arrived), [to_host(part) for part in there]
    assert torch.equal(found, expected)
    assert all(torch.equal(a, b) for a, b in zip(payload, on_host, strict=True))


@pytest.mark.parametrize("method", ["step:0.3:centre=true", "step:1:rounding=dither"])
def test_an_accelerator_that_codes_lanes_is_asked_for_them(method, monkeypatch):
    """Its integers stay there, and the message is that of a CPU that was asked."""
    there = []

    def on_host(run):
        def run_on_host(*args):
            there.append(args[0].device)
            return to_device(run(*tree_map_only(torch.Tensor, to_host, args)), DEVICE)

        return run_on_host

    monkeypatch.setattr(lanes, "MANY", 1 << 14)
    monkeypatch.setattr(lanes, "_MOST", 1.1)
    x = torch.randn(64, 300, generator=torch.Generator().manual_seed(0))
    meta = TensorMeta.of(x)
    plain = mpcomp.parse(method).compress(x, generator_for(1))
    fast = mpcomp.parse(f"{method}:lanes=true").compress(x, generator_for(1))
    expected = mpcomp.parse(method).decompress(fast, meta, generator_for(1))
    for each in (lanes.pushed, lanes.popped):
        monkeypatch.setitem(each.by_device, DEVICE.type, on_host(each.anywhere))
    with FakeAccelerator():
        compressor = mpcomp.parse(method)
        payload = compressor.compress(x.to(DEVICE), generator_for(1))
        assert payload[0].device.type == "cpu" and there == [DEVICE]
        arrived = compressor.decompress_to(DEVICE, payload, meta, generator_for(1))
        assert arrived.device == DEVICE and there == [DEVICE, DEVICE]
        arrived = to_host(arrived)
    assert not torch.equal(plain[0], fast[0]) and torch.equal(payload[0], fast[0])
    assert torch.equal(arrived, expected)


def test_what_is_not_waited_for_is_not_there():
    x = torch.arange(3.0)
    with FakeAccelerator() as accelerator:
        host = torch.empty(3, pin_memory=True).copy_(x.to(DEVICE) + 1, non_blocking=True)
        before = host.clone()
        accelerator.wait()
    assert not torch.equal(before, x + 1) and torch.equal(host, x + 1)


def test_the_table_of_two_commits(tmp_path, capsys):
    out = tmp_path / "new" / "counts.jsonl"
    main(["none", "quant:4", "--shape", "2", "16", "32", "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["method"], row["message"]) for row in rows] == [
        *(("none", "activation"), ("none", "gradient")),
        *(("quant:4", "activation"), ("quant:4", "gradient")),
    ]
    main(["--table", "--out", str(out)])
    assert capsys.readouterr().out == table(rows) + "\n"

    before = [{**row, "commit": "abc"} for row in rows]
    before[1]["decode"] = {**before[1]["decode"], "launches": 1000}
    lines = table([*before[:3], *rows]).splitlines()
    both, gradient, quant, later = (line.split("  ") for line in lines[2:6])
    launches = " / ".join(str(rows[1][end]["launches"]) for end in ("encode", "decode"))
    found = [[cell.strip() for cell in line if cell][:4] for line in (both, gradient, quant, later)]
    encode = launches.split(" / ")[0]
    assert found[0] == ["none", "activation", launches, launches]
    assert found[1] == ["none", "gradient", f"{encode} / 1000", launches]
    assert found[2][:2] == ["quant:4", "activation"] and found[3][2] == "–"
    assert lines[-1].startswith("before: commit abc; now: commit ")
