"""Hooks of a parameter's gradient, such as optimizers that step in backward: once a step."""

import pytest
import torch
import torch.nn.functional as F
from methods import same_bits
from models import MLP_SPLIT, assert_same_training, clone, mlp, plain_step, rows
from ranks import preload
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

import mpcomp
from mpcomp.core.microbatch import rows_of_chunks

preload("test_gradient_hooks")
CHUNKS, STEPS, ROWS = 4, 3, 10


def pipe_of(model, **options):
    options = {"split": MLP_SPLIT, "loss_fn": F.cross_entropy, "timeout": 60.0, **options}
    return mpcomp.pipeline(model, CHUNKS, **options)


class Stepping:
    """An optimizer for each parameter, as torchtune and GaLore (by layer) have them."""

    def __init__(self, make):
        self._make, self._of = make, {}

    def __call__(self, parameter):
        if parameter not in self._of:
            self._of[parameter] = self._make([parameter])
        self._of[parameter].step()
        self._of[parameter].zero_grad()


def descending(parameter):
    """A step by hand."""
    parameter.data.add_(parameter.grad, alpha=-0.1)
    parameter.grad = None


def clipping(parameter):
    nn.utils.clip_grad_norm_([parameter], 0.01)


def averaging(parameter):
    """As if by an exchange of one's own, and then by hand."""
    parameter.grad.mul_(0.5)
    descending(parameter)


#: Each gives a hook, for a model of its own.
HOOKS = {
    "SGD": lambda: Stepping(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "AdamW": lambda: Stepping(lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
    "Adafactor": lambda: Stepping(lambda p: torch.optim.Adafactor(p, lr=0.01)),
    "by hand": lambda: descending,
    "clipping": lambda: clipping,
    "averaging": lambda: averaging,
}


def hooked(model, hook):
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


def expected_of(model, hook):
    """Training as with one backward: the gradient of all microbatches, then the hook."""
    losses = []
    for step in range(STEPS):
        losses.append(plain_step(model, *rows(ROWS, step), rows_of_chunks(ROWS, CHUNKS)))
        with torch.no_grad():
            for parameter in model.parameters():
                hook(parameter)
    return losses


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_runs_once_a_step_with_the_whole_gradient(name, recompute):
    model = mlp()
    plain = clone(model)
    expected = expected_of(plain, HOOKS[name]())
    pipe = pipe_of(model, recompute=recompute)
    hooked(pipe, HOOKS[name]())
    found = [pipe.forward_backward(*rows(ROWS, step)) for step in range(STEPS)]
    assert all(map(same_bits, found, expected))
    assert_same_training(pipe, plain)


def test_hooks_of_the_model_from_before_are_kept():
    model, seen = mlp(), []
    hooked(model, seen.append)
    pipe = pipe_of(model)
    pipe.forward_backward(*rows(ROWS))
    assert len(seen) == len(list(pipe.parameters()))


def test_hooks_that_only_look_are_right_and_can_be_removed():
    pipe, norms = pipe_of(mlp()), []
    first = next(pipe.parameters())
    handle = first.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm().item()))
    for step in range(3):
        pipe.forward_backward(*rows(ROWS, step))
        assert norms[step:] == [first.grad.norm().item()]
        pipe.zero_grad()
    F.cross_entropy(pipe(rows(ROWS)[0]), rows(ROWS)[1]).backward()
    assert len(norms) == 4  # once in one backward, as torch has it
    handle.remove()
    pipe.forward_backward(*rows(ROWS))
    assert len(norms) == 4


def test_no_hook_runs_in_a_step_that_fails():
    pipe, seen = pipe_of(mlp()), []
    hooked(pipe, seen.append)
    x, y = rows(ROWS)
    with pytest.raises(FloatingPointError):
        pipe.forward_backward(x * torch.inf, y)
    assert not seen
    pipe.zero_grad()
    pipe.forward_backward(x, y)
    assert len(seen) == len(list(pipe.parameters()))


def test_a_parameter_without_a_gradient_has_nothing_to_say():
    pipe, seen = pipe_of(mlp()), []
    hooked(pipe, seen.append)
    frozen = next(pipe.parameters()).requires_grad_(False)
    pipe.forward_backward(*rows(ROWS))
    assert all(parameter is not frozen for parameter in seen) and seen


def test_optimizers_that_torch_puts_into_backward_are_refused_before_a_step():
    pipe = pipe_of(mlp())
    before = clone(pipe.merge()).state_dict()
    _apply_optimizer_in_backward(torch.optim.SGD, pipe.parameters(), {"lr": 0.1})
    with pytest.raises(ValueError, match=r"steps in backward \(SGD.*pipe.parameters\(\)"):
        pipe.forward_backward(*rows(ROWS))
    after = pipe.merge().state_dict()
    assert all(same_bits(before[key], after[key]) for key in before)


def test_updates_within_a_step_have_no_hooks_beside_them():
    pipe = pipe_of(mlp())
    hooked(pipe, descending)
    with pytest.raises(ValueError, match="'?one.weight.* has a hook.*leave update out"):
        pipe.forward_backward(*rows(ROWS), update=lambda: None, updates=2)


def trained_by_hooks(names, options):
    """Of each hook: losses, and the weights of this rank's stages."""
    found = {}
    for name in names:
        torch.manual_seed(0)
        pipe = pipe_of(mlp(), **options)
        hooked(pipe, HOOKS[name]())
        losses = []
        for step in range(STEPS):
            losses.append(pipe.forward_backward(*rows(ROWS, step + 7 * pipe.replica)))
        weights = {key: p.detach().clone() for key, p in pipe.named_parameters()}
        found[name] = losses, weights
    return found


def test_two_ranks_do_what_one_process_does(ranks):
    options = {"split": MLP_SPLIT[:1]}
    (alone,) = [trained_by_hooks(HOOKS, options)]
    for of_rank in ranks(trained_by_hooks, 2, list(HOOKS), options):
        for name, (losses, weights) in of_rank.items():
            assert all(map(same_bits, losses, alone[name][0]))
            assert weights
            assert all(same_bits(p, alone[name][1][key]) for key, p in weights.items())


def test_a_schedule_that_splits_backward(ranks):
    """torch's own way of it runs no hook at all."""
    options = {"split": ["one", "tanh", "two"], "schedule": "ZBVZeroBubble"}
    names = ["SGD", "clipping"]
    alone = trained_by_hooks(names, {"split": options["split"]})
    for of_rank in ranks(trained_by_hooks, 2, names, options):
        for name, (_, weights) in of_rank.items():
            assert all(same_bits(p, alone[name][1][key]) for key, p in weights.items())


def test_replicas_step_by_the_mean(ranks):
    options = {"split": MLP_SPLIT[:1], "replicas": 2}
    results = ranks(trained_by_hooks, 4, ["SGD", "averaging"], options)
    for name in ("SGD", "averaging"):
        for first, second in zip(results[:2], results[2:], strict=True):
            ours, theirs = first[name][1], second[name][1]
            assert ours and all(same_bits(p, theirs[key]) for key, p in ours.items())
