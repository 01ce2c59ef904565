"""Local SGD's memory: the outer step is that of torch's SGD, deltas are the inner memory's."""

import pytest
import torch
from methods import same_bits

from mpcomp import ErrorFeedback, TensorMeta, TopK
from mpcomp.feedback.anchor import ANCHOR, OUTER_VELOCITY, Anchored
from mpcomp.feedback.memory import NO_MEMORY, Sent
from mpcomp.feedback.state import SINGLE_SLOT, EndState

SLOT = TensorMeta((5, 8))


def begun(memory: Anchored, start: torch.Tensor) -> EndState:
    end = EndState(memory, SLOT, torch.device("cpu"))
    end.fields[ANCHOR].load_state_dict(ANCHOR, {ANCHOR: start})
    return end


@pytest.mark.parametrize("lr, momentum", [(0.7, 0.9), (1.0, 0.0), (0.3, 0.5)])
def test_the_outer_step_is_that_of_torch(lr, momentum):
    start = torch.randn(40)
    end = begun(Anchored(NO_MEMORY, lr, momentum), start)
    outer = torch.nn.Parameter(start.clone())
    sgd = torch.optim.SGD([outer], lr=lr, momentum=momentum, nesterov=momentum > 0)
    anchor = start
    for _ in range(6):
        x = anchor + torch.randn(40)
        state = end.open(flat=True)
        delta = end.memory.compensate(x, state)
        assert same_bits(delta, anchor - x)
        anchor = end.memory.received(delta, state)
        end.commit()
        outer.grad = delta
        sgd.step()
        torch.testing.assert_close(anchor, outer.detach(), rtol=1e-6, atol=1e-6)
    assert (OUTER_VELOCITY in end.fields) == (momentum > 0)


def test_a_residual_is_of_deltas_and_the_anchor_is_exact():
    """Also where the residual is kept in few bits; what is discarded leaves no trace."""
    inner = ErrorFeedback(TopK(0.1), storage=4, decay=0.5)
    start = torch.randn(40)
    end = begun(Anchored(inner, 0.7, 0.9), start)
    x = torch.randn(40)
    for keep in (False, True):
        state = end.open(flat=True)
        target = end.memory.compensate(x, state)
        assert same_bits(target, start - x)  # nothing is left over yet
        end.memory.sent(Sent(x, target, lambda y: y * 0.5, alone=False), state)
        anchor = end.memory.received(target / 2, state)
        (end.commit if keep else end.discard)()
    state = end.open(flat=True)
    assert same_bits(state[ANCHOR], anchor)
    residual = state["residual"]
    torch.testing.assert_close(residual, target / 2, rtol=0, atol=float(target.abs().max()) / 10)
    assert same_bits(end.memory.compensate(x, state), anchor - x + 0.5 * residual)
    assert end.fields[ANCHOR].known(SINGLE_SLOT) == [True]
    assert end.row_bytes < 40 * 4 * 2 + 40


def test_the_mean_of_pieces_has_the_inner_memory():
    assert (
        Anchored(ErrorFeedback(TopK(0.1)), 0.7, 0.9).second_stage_memory()
        == ErrorFeedback(TopK(0.1)).second_stage_memory()
    )
