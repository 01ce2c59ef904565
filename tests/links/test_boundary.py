"""A cut's two links together: what SameIndices shares, and settling both."""

import pytest
import torch
from methods import same_bits
from models import store_of

from mpcomp import (
    AQSGD,
    ECSQ,
    EF21,
    Boundary,
    Cast,
    ErrorFeedback,
    Identity,
    Link,
    RandomBlock,
    RandomK,
    SameIndices,
    TensorMeta,
    TopK,
    parse,
)
from mpcomp.core.context import Step
from mpcomp.core.wire import HEADER_BYTES
from mpcomp.links.build import method_of

SHAPE = (4, 100)


def boundary_of(act, grad, **kwargs) -> Boundary:
    return Boundary(
        Link(act, boundary=0, direction="act", **kwargs),
        Link(grad, boundary=0, direction="grad", **kwargs),
    )


def forward(boundary: Boundary, x: torch.Tensor, step: Step, microbatch: int = 0) -> torch.Tensor:
    message = boundary.act.encode(x, step, microbatch)
    return boundary.act.decode(message, TensorMeta.of(x), step, microbatch)


def backward(boundary: Boundary, g: torch.Tensor, step: Step, microbatch: int = 0):
    """(what arrives, bytes of the payload)"""
    message = boundary.grad.encode(g, step, microbatch)
    arrived = boundary.grad.decode(message, TensorMeta.of(g), step, microbatch)
    return arrived, message.numel() - HEADER_BYTES


def step_of(index=0, train=True, ids=(0, 1, 2, 3), **kwargs) -> Step:
    return Step(index, train, sample_ids=(tuple((i,) for i in ids),) * 2, **kwargs)


@pytest.mark.parametrize(
    "act", [TopK(0.1), TopK(0.1, values=Cast("fp16")), RandomK(0.1), RandomBlock(0.1)], ids=str
)
def test_gradients_travel_where_activations_did_and_nowhere_else(act):
    """Zero where the activation was dropped, exact elsewhere, and no index bytes."""
    boundary = boundary_of(act, SameIndices())
    x, g = torch.randn(2, *SHAPE)
    kept = forward(boundary, x, step_of()) != 0
    arrived, payload = backward(boundary, g, step_of())
    assert same_bits(arrived, torch.where(kept, g, torch.zeros(())))
    assert payload == 40 * 4 and kept.sum() == 40


@pytest.mark.parametrize("shape", [SHAPE, (4, 5, 6, 7)], ids=["rows", "channels-last"])
@pytest.mark.parametrize("act", ["none", "step:0.5", "aqsgd:first=step/0.5+step:0.5", "quant:4"])
def test_gradients_travel_where_a_nonzero_activation_arrived(act, shape):
    """Beside any method; nothing that a ReLU before the cut leaves of a gradient is lost."""
    boundary = boundary_of(method_of("act_comp", act), SameIndices(where="nonzero"))
    for index in range(3):
        x, g = torch.randn(shape).relu(), torch.randn(shape)
        if len(shape) == 4:
            x, g = (one.contiguous(memory_format=torch.channels_last) for one in (x, g))
        there = forward(boundary, x, step_of(index)) != 0
        arrived, payload = backward(boundary, g, step_of(index))
        assert same_bits(arrived, torch.where(there, g, torch.zeros(())))
        assert payload == 4 * there.sum() and 0 < there.sum() < there.numel()
        boundary.finish_step(finite=True)


@pytest.mark.parametrize("shape", [SHAPE, (4, 5, 6, 7)], ids=["rows", "images"])
def test_a_sender_knows_what_arrived_without_decoding_its_message(shape, monkeypatch):
    """Of every microbatch, not of those alone whose figures are measured."""
    boundary = boundary_of(parse("step:0.5"), SameIndices(where="nonzero"))
    x, g, step = torch.randn(shape).relu(), torch.randn(shape), step_of()
    assert not step.samples(1)
    with monkeypatch.context() as patch:
        patch.setattr(ECSQ, "decompress", None)
        patch.setattr(ECSQ, "decompress_to", None)
        message = boundary.act.encode(x, step, 1)
    there = boundary.act.decode(message, TensorMeta.of(x), step, 1) != 0
    arrived, _ = backward(boundary, g, step, 1)
    assert same_bits(arrived, torch.where(there, g, torch.zeros(())))


def test_gradients_whose_length_is_known_after_coding_at_positions_that_are():
    boundary = boundary_of(Identity(), parse("same:where=nonzero+step:1:scale=tensor"))
    x, g = torch.randn(SHAPE).relu(), torch.randn(SHAPE)
    there = forward(boundary, x, step_of()) != 0
    arrived, payload = backward(boundary, g, step_of())
    assert (arrived[~there] == 0).all() and payload < there.sum() / 2  # under 4 bits a value
    error = (arrived - g)[there].square().mean()
    assert 0 < error < 1.1 * g[there].square().mean() / 12  # of a step of the rms


def test_a_nonfinite_activation_has_one_selection_on_both_sides():
    """Ranks raise its error together, later, and the gradient's message must fit till then."""
    boundary = boundary_of(parse("step:0.5"), SameIndices(where="nonzero"))
    boundary.act.defers_nonfinite = True
    x = torch.randn(SHAPE).relu()
    x[0, 0] = torch.nan
    assert forward(boundary, x, step_of()).isnan().all()
    with pytest.warns(UserWarning, match=r"same:where=nonzero would not shrink"):  # of all elements
        _, payload = backward(boundary, torch.randn(SHAPE), step_of())
    assert payload == 4 * x.numel()


def test_values_of_the_gradient_may_be_narrower():
    boundary = boundary_of(TopK(0.1), SameIndices(Cast("fp16")))
    x, g = torch.randn(2, *SHAPE)
    kept = forward(boundary, x, step_of()) != 0
    arrived, payload = backward(boundary, g, step_of())
    assert torch.equal(arrived, torch.where(kept, g.half().float(), torch.zeros(())))
    assert payload == 40 * 2


def test_relu_zeros_that_were_sent_count_as_sent():
    """The mask is what the message carried, not where the activation is non-zero."""
    boundary = boundary_of(TopK(0.1), SameIndices())
    x = torch.zeros(SHAPE)
    x[:, 50] = 1
    forward(boundary, x, step_of())
    arrived, _ = backward(boundary, torch.ones(SHAPE), step_of())
    assert (arrived.sum(dim=1) == 10).all() and (arrived[:, :9] == 1).all()


@pytest.mark.parametrize(
    "act", [EF21(TopK(0.1)), AQSGD(TopK(0.1)), ErrorFeedback(TopK(0.1))], ids=str
)
def test_dense_where_the_activation_went_dense(act):
    """First visits and warm-up send gradients whole; once rows are selected, so are gradients."""
    boundary = boundary_of(act, SameIndices(), warmup_steps=1)
    dense = []
    for index in range(4):
        g = torch.randn(SHAPE)
        forward(boundary, torch.randn(SHAPE), step_of(index))
        arrived, payload = backward(boundary, g, step_of(index))
        dense.append(payload == g.numel() * 4)
        assert same_bits(arrived, g) == dense[-1]
        boundary.finish_step(finite=True)
    assert dense == [True, False, False, False]


def test_first_visits_without_a_warm_up():
    boundary = boundary_of(AQSGD(TopK(0.1)), SameIndices())
    dense = []
    for index, ids in enumerate([(0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 9)]):
        forward(boundary, torch.randn(SHAPE), step_of(index, ids=ids))
        dense.append(backward(boundary, torch.randn(SHAPE), step_of(index, ids=ids))[1] == 1600)
        boundary.finish_step(finite=True)
    assert dense == [True, False, True]


def test_every_microbatch_has_its_own_mask():
    """Whatever the order of the backward passes."""
    boundary = boundary_of(TopK(0.1), SameIndices())
    kept = [forward(boundary, torch.randn(SHAPE), step_of(), m) != 0 for m in range(2)]
    assert not torch.equal(*kept)
    for m in (1, 0):
        arrived, _ = backward(boundary, torch.ones(SHAPE), step_of(), m)
        assert torch.equal(arrived != 0, kept[m])


def test_evaluation_between_forward_and_backward_leaves_the_masks_alone():
    """Law 6, module style: y = pipe(x); pipe.evaluate(...); loss(y).backward()."""
    boundary = boundary_of(TopK(0.1), SameIndices())
    x, other, g = torch.randn(3, *SHAPE)
    kept = forward(boundary, x, step_of()) != 0
    forward(boundary, other, step_of(train=False))
    arrived, _ = backward(boundary, g, step_of())
    assert torch.equal(arrived, torch.where(kept, g, torch.zeros(())))


def test_masks_are_forgotten_with_their_step():
    """A mask of an old step is never used for a new one; without one, dense."""
    boundary = boundary_of(TopK(0.1), SameIndices())
    forward(boundary, torch.randn(SHAPE), step_of(0))
    boundary.finish_step(finite=True)
    g = torch.randn(SHAPE)
    assert same_bits(backward(boundary, g, step_of(0))[0], g)
    assert same_bits(backward(boundary, g, step_of(1))[0], g)


def test_gradient_compression_off_sends_gradients_whole():
    boundary = boundary_of(TopK(0.1), SameIndices())
    step = step_of(compress_grad=False)
    forward(boundary, torch.randn(SHAPE), step)
    g = torch.randn(SHAPE)
    assert same_bits(backward(boundary, g, step)[0], g)


@pytest.mark.parametrize("finite", [True, False])
def test_settling_stores_or_forgets_both_links(finite):
    boundary = boundary_of(EF21(TopK(0.1)), EF21(TopK(0.1)))
    forward(boundary, torch.randn(SHAPE), step_of())
    backward(boundary, torch.randn(SHAPE), step_of())
    boundary.finish_step(finite)
    for link in boundary.links:
        assert [len(store_of(end)) for end in link.endpoint.ends.values()] == [4 * finite] * 2
        assert not any(end.open_slots for end in link.endpoint.ends.values())


def test_links_are_activations_then_gradients():
    boundary = boundary_of(Identity(), TopK(0.1))
    assert boundary.links == (boundary.act, boundary.grad)
    assert [link.name for link in boundary.links] == ["boundary 0 act", "boundary 0 grad"]
