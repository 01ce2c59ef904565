"""Seconds a step of a race takes on given links: measured work, simulated messages.

What a stage computes and what its messages take to code is measured on this machine, on one core
and with nothing else running. The links are those of `mpcomp.plan`, so rates and latencies that are
not here can be asked for. The bytes are those that the race itself has counted.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from mpcomp.plan import Coding, Compute, CutCost, Messages, Network, measure_coding, predict
from mpcomp.plan.network import FIRST_WINDOW, PACKET_SHARE
from recipes.bench.workers import machine
from recipes.decoder import (
    SIZES,
    Size,
    activation_of,
    decoder,
    equal_stages,
    token_batch,
    token_loss,
)
from recipes.placement import device_name
from stages.clock import now

_REPEATS: Final = 9


class Links(NamedTuple):
    """Links between all neighbours.

    Attributes:
        mbps: Mbit/s each way.
        latency_ms: one way.
        connections: of each, each way.
    """

    mbps: float
    latency_ms: float
    connections: int = 1

    def __str__(self) -> str:
        return f"{self.mbps:g} Mbit/s, {self.latency_ms:g} ms"


class Bits(NamedTuple):
    """Bits that an element of a cut took, each way."""

    act: float
    grad: float

    def messages(self, size: Size) -> Messages:
        """Of a microbatch of a model of some size."""
        return Messages(*(each * size.message_elements / 8 for each in self))


def measure(
    size: Size, methods: Mapping[str, tuple[str, str]], device: torch.device
) -> dict[str, Any]:
    """Compute of every stage, and coding of every row, of one microbatch.

    Args:
        size: of the decoder.
        methods: of activations and gradients, by row.
        device: of activations; what is not done there is done on one core.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x = activation_of(size, device)
        coding = {}
        for row, (act, grad) in methods.items():
            coding[row], _ = measure_coding(act, grad, x, x.clone(), repeats=_REPEATS)
        return {
            "elements": x.numel(),
            "compute": _compute(size, device),
            "coding": coding,
            "machine": {**machine(), "device": device_name(device)},
        }
    finally:
        torch.set_num_threads(before)


def _compute(size: Size, device: torch.device) -> list[list[float]]:
    """Seconds of each stage's forward and backward, medians."""
    model = decoder(
        num_blocks=size.num_blocks,
        width=size.width,
        num_heads=size.num_heads,
        vocab=size.vocab,
        context=size.context,
    )
    blocks, stages = list(model), []
    for count in equal_stages(size.num_blocks, size.num_blocks):
        stages.append(torch.nn.Sequential(*blocks[:count]))
        del blocks[:count]
    rows = size.batch // size.chunks
    tokens, targets = token_batch(batch=rows, context=size.context, vocab=size.vocab)
    tokens, targets = tokens.to(device), targets.to(device)
    between = torch.randn(rows, size.context, size.width).to(device).requires_grad_()
    found = []
    for i, stage in enumerate(stages):
        stage.to(device)
        times: list[tuple[float, float]] = []
        for _ in range(_REPEATS):
            begin = now()
            out = stage(tokens if i == 0 else between)
            if i == len(stages) - 1:
                out = token_loss(out, targets)
            middle = now()
            out.backward(torch.ones_like(out))
            times.append((middle - begin, now() - middle))
        found.append([statistics.median(each) for each in zip(*times, strict=True)])
    return found


def step_s(
    size: Size,
    bits: Bits,
    links: Links,
    compute: Sequence[Sequence[float]],
    coding: Coding,
    updates: int = 1,
) -> float:
    """Seconds of a step with a stage on each host.

    Args:
        size: of the model and of a step.
        bits: of an element.
        links: between all neighbours.
        compute: of each stage, forward and backward of a microbatch.
        coding: of a microbatch at a cut.
        updates: steps between which the pipeline does not drain; a share of all of them.
    """
    return predict(
        [Compute(*own) for own in compute],
        [CutCost(coding, bits.messages(size))] * (size.num_blocks - 1),
        Network.alike(
            size.num_blocks,
            links.mbps,
            links.latency_ms / 1e3,
            window_bytes=FIRST_WINDOW,
            connections=links.connections,
        ),
        chunks=size.chunks,
        updates=updates,
    ).step_s


def benchmark_step_s(bits: Bits, coding: Coding) -> float:
    """Seconds of a step of Protocol NanoGPT by its own rules: 200 Mbit/s, 50 ms a message.

    Its latency occupies the wire, packets have no headers, and computing is hidden. That gives both
    of its records within 1 %, with as many microbatches in flight as mpcomp has by itself.

    Args:
        bits: of an element.
        coding: of an element at a cut.
    """
    size = SIZES["203M"]
    num_stages = size.num_blocks
    sent = Messages(*(num_bytes * PACKET_SHARE for num_bytes in bits.messages(size)))
    network = Network.alike(num_stages, 200.0, message_s=0.05)
    return predict(
        [Compute(0.0, 0.0)] * num_stages,
        [CutCost(coding.times(size.message_elements), sent)] * (num_stages - 1),
        network,
        chunks=size.chunks,
    ).step_s
