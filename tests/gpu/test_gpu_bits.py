"""Law 4 for kernels in Triton: they have the CPU's bits of whatever compressors ask of them.

On a GPU these are tests like others. Without one, `test_kernels_in_triton.py` has them interpreted,
in a process of their own, as Triton asks before it is loaded.
"""

import os

import pytest
import torch

from mpcomp import TensorMeta, parse
from mpcomp.core.kernels import KERNELS
from mpcomp.core.randomness import generator_for as drawn_from
from mpcomp.entropy import lanes

pytest.importorskip("triton", reason="Triton is no dependency: pip install triton")
from recipes.bench.gpu_kernels import Call, calls_of, drawn, in_triton, methods

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [] if INTERPRETED else pytest.mark.gpu
ROUNDS, MOST = (3, 3000) if INTERPRETED else (40, 100_000)


def test_kernels_have_the_bits_of_the_cpu():
    generator, asked = torch.Generator().manual_seed(49), set()
    there = in_triton()
    for _ in range(ROUNDS):
        for method in methods(generator):
            x = drawn(generator, MOST)
            for call in calls_of(method, x):
                if call.name in there:
                    asked.add(call.name)
                    assert not call.differing(DEVICE), (method, x.shape, x.dtype, call.name)
    assert asked == set(there)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_largest_are_those_of_the_cpu_among_ties(dtype):
    """Zeros of both signs, infinities, NaN, and equal numbers over two blocks."""
    assert "compressors.topk.mask_of_largest" in in_triton()
    few = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-7, 3e4, -torch.inf, torch.inf, torch.nan])
    generator = torch.Generator().manual_seed(7)
    for shape in ((1, 2), (3, 255), (2, 257), (1, 5000)):
        rows = few[torch.randint(len(few), shape, generator=generator)].to(dtype)
        for tied in (
            rows,
            torch.zeros_like(rows),
            torch.randn(shape, generator=generator).to(dtype),
        ):
            for k in {1, max(1, shape[1] // 3), shape[1] - 1}:
                call = Call("compressors.topk.mask_of_largest", (tied, k))
                assert not call.differing(DEVICE), (shape, k, tied)


@pytest.mark.parametrize("method", ["step:0.3:centre=true", "step:0.7:rounding=dither"])
def test_a_message_is_coded_where_its_tensor_is(method, monkeypatch):
    """In lanes, as on a CPU that is asked for them."""
    x = torch.randn(128, 160, generator=torch.Generator().manual_seed(49))
    x[::16, :3] *= 99  # some go by themselves
    meta = TensorMeta.of(x)
    monkeypatch.setattr(lanes, "MANY", 1 << 14)
    monkeypatch.setattr(lanes, "_MOST", 1.1)
    compressor, on_cpu = parse(method), parse(f"{method}:lanes=true")
    assert not torch.equal(*(each.compress(x, drawn_from(1))[0] for each in (compressor, on_cpu)))
    expected = on_cpu.compress(x, drawn_from(1))
    arrived = on_cpu.decompress(expected, meta, drawn_from(1))
    assert {"entropy.lanes.pushed", "entropy.tallies.summed"} <= set(in_triton())
    monkeypatch.setattr("mpcomp.core.kernels._in_triton", lambda device: True)
    if INTERPRETED:
        monkeypatch.setattr(lanes, "codes_on", lambda device: True)
        for each in KERNELS.values():
            if "cuda" in each.by_device:
                monkeypatch.setitem(each.by_device, "cpu", each.by_device["cuda"])
    payload = compressor.compress(x.to(DEVICE), drawn_from(1))
    assert payload[0].device.type == "cpu" and torch.equal(payload[0], expected[0])
    found = compressor.decompress_to(DEVICE, payload, meta, drawn_from(1))
    assert found.device.type == DEVICE.type and torch.equal(found.cpu(), arrived)


@pytest.mark.parametrize("damaged", ["words", "states"])
def test_a_block_that_ends_wrongly_is_refused_alike(damaged):
    """Everything else is looked at on the host, before a kernel is asked."""
    x = torch.randn(70, 40, generator=torch.Generator().manual_seed(49))
    calls = {call.name: call for call in calls_of("step:0.3:scale=tensor", x)}
    call = calls["entropy.lanes.popped"]
    words, lengths, states, *others = call.args
    (words if damaged == "words" else states)[0] += 1
    kernel, said = KERNELS[call.name], []
    for run, on in ((kernel.anywhere, torch.device("cpu")), (kernel.by_device["cuda"], DEVICE)):
        with pytest.raises(RuntimeError) as error:
            run(*call._replace(args=(words, lengths, states, *others)).on(on).args)
        said.append(str(error.value))
    assert said[0] == said[1]
