"""What a message weighs: the ratios that are promised, measured on real messages."""

import pytest
import torch
from methods import round_trip

from mpcomp import TensorMeta, parse
from mpcomp.core.wire import HEADER_BYTES
from mpcomp.links.boundary import Link, Step

PROMISED = {
    "topk:0.1+fp16": 0.067,
    "topk:0.1+quant:8": 0.043,
    "topk:0.01+fp16": 0.0085,
    "quant:4": 0.126,
    "quant:4:scale=128": 0.130,
    "quant:2": 0.0635,
    "sign": 0.0325,
}


@pytest.mark.parametrize("shape", [(16, 65536), (1048576,)], ids=str)
@pytest.mark.parametrize("spec", PROMISED)
def test_bytes_of_a_million_elements_are_as_promised(spec, shape):
    """Issue 2, "It must show" 4: message without its header, over fp32."""
    x = torch.randn(shape)
    link = Link(parse(spec), boundary=0, direction="act")
    step = Step(0, train=True)
    message = link.encode(x, step, 0)
    payload = message.numel() - HEADER_BYTES
    assert payload / (4 * 1048576) <= PROMISED[spec]
    # The message says all that there is to say: it decodes to the compressor's result.
    arrived = link.decode(message, TensorMeta.of(x), step, 0)
    assert torch.equal(arrived, round_trip(parse(spec), x)) and not torch.equal(arrived, x)
    assert link.meter.train.wire_bytes == message.numel()
    assert payload - parse(spec).wire_bytes(TensorMeta.of(x)) in range(8)  # alignment
