"""Mistakes that several ranks would make without a word, each of them by itself."""

import inspect
import warnings

import pytest
import pytorch_optimizer
import torch
import torch.nn.functional as F
from models import MLP_SPLIT, mlp, rows
from ranks import preload

import mpcomp
from mpcomp.engines.gradients import BY_ALL_GRADIENTS, OptimizerWatch

preload("test_ranks_mistakes")


def pipe_of(loss_fn=F.cross_entropy, model=None):
    torch.manual_seed(0)
    return mpcomp.pipeline(model or mlp(), 2, split=MLP_SPLIT[:1], loss_fn=loss_fn, timeout=60.0)


def detached(output, target):
    return F.cross_entropy(output.detach(), target)


def infinite(output, target):
    return F.cross_entropy(output, target) / 0


def raised(call):
    with pytest.raises(Exception) as caught:
        call()
    return type(caught.value).__name__, str(caught.value)


def mistakes(folder):
    found = {}
    torch.manual_seed(0)
    model = mlp()
    pipe = pipe_of(model=model)
    found["model"] = raised(model.state_dict)
    with torch.inference_mode():
        found["inference mode"] = raised(lambda: pipe.forward_backward(*rows(6)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe.save(folder)  # whose parts are meant
        pipe.load(folder)
        whole = pipe.merge()
        assert not caught
        parts = [pipe.state_dict() for _ in range(2)]
    found["pipe"] = [str(each.message) for each in caught]
    assert set(parts[0]) < set(whole.state_dict())
    assert not whole._state_dict_hooks  # nothing of ours goes into a file with it
    frozen = mlp()
    frozen[0].requires_grad_(False)
    frozen[1].requires_grad_(False)
    found["infinite"] = raised(lambda: pipe_of(infinite, frozen).forward_backward(*rows(6)))
    found["detached"] = raised(lambda: pipe_of(detached).forward_backward(*rows(6)))
    return found


def test_mistakes_of_all_ranks(ranks, tmp_path):
    first, last = ranks(mistakes, 2, str(tmp_path / "checkpoint"))
    for rank, found in enumerate((first, last)):
        kind, message = found["model"]
        assert kind == "ValueError" and "trained on other ranks" in message
        assert "pipe.merge()" in message and "pipe.save(folder)" in message
        assert "under torch.inference_mode()" in found["inference mode"][1]
        (message,) = found["pipe"]
        assert f"rank {rank} of 2 is the part" in message and "pipe.merge()" in message
        kind, message = found["infinite"]
        assert kind == "FloatingPointError" and "the loss of step 0 is NaN or Inf" in message
        assert "the loss has no gradient" in found["detached"][1]
    assert first["detached"][0] == "PeerError" and last["detached"][0] == "ValueError"


def other_models(seeds, loads):
    """A model of each rank, of whose weights rank 0 may load some by itself."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(seeds[rank])
    model = mlp()
    if loads and rank == 0:
        model[0].load_state_dict({name: x + 1 for name, x in model[0].state_dict().items()})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mpcomp.pipeline(model, 2, split=MLP_SPLIT[:1], loss_fn=F.cross_entropy, timeout=60.0)
    return [str(each.message) for each in caught if "different models" in str(each.message)]


@pytest.mark.parametrize(
    "seeds, loads, warns", [((0, 0), False, 0), ((0, 1), False, 1), ((0, 0), True, 1)]
)
def test_ranks_that_built_different_models_say_so(ranks, seeds, loads, warns):
    said, silent = ranks(other_models, 2, seeds, loads)  # one rank speaks for all
    assert len(said) == warns and not silent
    assert all("rank 0 and rank 1 have built different models: stage 0" in each for each in said)


def test_replicas_may_build_different_models(ranks):
    """Theirs are replaced by the first replica's."""
    assert not any(ranks(replicas_of_other_seeds, 4))


def replicas_of_other_seeds():
    torch.manual_seed(torch.distributed.get_rank() // 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mpcomp.pipeline(mlp(), 2, split=MLP_SPLIT[:1], loss_fn=F.cross_entropy, replicas=2)
    return [str(each.message) for each in caught if "different models" in str(each.message)]


def stages_on_meta():
    """A rank that has no values for the other's stage."""
    model = mlp()
    for name, block in model.named_children():
        if (name in ("one", "tanh")) != (torch.distributed.get_rank() == 0):
            block.to("meta")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mpcomp.pipeline(model, 2, split=MLP_SPLIT[:1], loss_fn=F.cross_entropy, timeout=60.0)
    return [str(each.message) for each in caught if "different models" in str(each.message)]


def test_a_stage_without_values_on_a_rank_is_not_compared(ranks):
    assert not any(ranks(stages_on_meta, 2))


def clip_in_updates(pipe, optimizer):
    """Each stage by its own norm, as within a step."""

    def update():
        torch.nn.utils.clip_grad_norm_(pipe.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    pipe.forward_backward(*rows(6), update=update, updates=2)


#: What a script does between a step's gradients and the optimizer's step.
CLIPPING = {
    "torch, pipe": lambda pipe, model, _: torch.nn.utils.clip_grad_norm_(pipe.parameters(), 0.01),
    "torch, model": lambda pipe, model, _: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01),
    "torch, a list": lambda pipe, model, _: torch.nn.utils.clip_grad_norm_(
        list(pipe.parameters()), 0.01, foreach=False
    ),
    "torch, too large a norm to clip": lambda pipe, model, _: torch.nn.utils.clip_grad_norm_(
        pipe.parameters(), 1e6
    ),
    "nothing": lambda *_: None,
    "mpcomp": lambda pipe, *_: mpcomp.clip_grad_norm_(pipe, 0.01),
    "values": lambda pipe, *_: torch.nn.utils.clip_grad_value_(pipe.parameters(), 0.01),
    "another step": lambda pipe, *_: pipe.forward_backward(*rows(6)),
    "updates": lambda pipe, _, optimizer: clip_in_updates(pipe, optimizer),
}


def clipped(kind, set_to_none):
    torch.manual_seed(0)
    model = mlp()
    pipe = pipe_of(model=model)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1, momentum=0.9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            pipe.forward_backward(*rows(6))
            CLIPPING[kind](pipe, model, optimizer)
            optimizer.step()
            optimizer.zero_grad(set_to_none)
    return [str(each.message) for each in caught if "changed in place" in str(each.message)]


def all_clipped(set_to_none):
    return {kind: clipped(kind, set_to_none) for kind in CLIPPING}


@pytest.mark.parametrize("set_to_none", [True, False])
def test_clipping_by_one_ranks_norm_is_said_once(ranks, set_to_none):
    for found in ranks(all_clipped, 2, set_to_none):
        for kind, messages in found.items():
            assert len(messages) == kind.startswith("torch"), kind
            assert all("mpcomp.clip_grad_norm_(pipe, max_norm)" in said for said in messages)


@pytest.mark.parametrize("clips", [False, True])
def test_a_loss_scaler_does_not_pass_for_clipping(clips):
    """It divides gradients in place, and clipping after that is found all the same."""
    model = torch.nn.Linear(4, 4)
    watch = OptimizerWatch(model, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.randn(3, 4)).sum()).backward()
    watch.note()
    scaler.unscale_(optimizer)
    if clips:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaler.step(optimizer)
    assert len(caught) == clips


@pytest.mark.parametrize("kind", ["torch, pipe", "torch, model", "mpcomp"])
def test_in_one_process_torch_clips_as_well(kind):
    assert not clipped(kind, True)


def step_by_lbfgs():
    pipe = pipe_of()
    optimizer = torch.optim.LBFGS(pipe.parameters())
    weights = [p.detach().clone() for p in pipe.parameters()]
    error = raised(lambda: optimizer.step(lambda: pipe.forward_backward(*rows(6))))
    assert all(torch.equal(p, w) for p, w in zip(pipe.parameters(), weights, strict=True))
    return error


def test_lbfgs_on_ranks_is_refused_on_each(ranks):
    for kind, message in ranks(step_by_lbfgs, 2):
        assert kind == "ValueError" and "LBFGS on 2 ranks: each would search" in message


#: Optimizers of pytorch_optimizer and their settings, with what is said of them.
STEPS = {
    ("AdamW", ()): None,
    ("Lamb", ()): None,
    ("Lamb", (("pre_norm", True),)): "Lamb on 2 ranks: it goes by a sum over all gradients",
    ("Lamb", (("pre_norm", True), ("max_grad_norm", 0.0))): None,
    ("Prodigy", ()): "Prodigy on 2 ranks: it goes by a sum over all gradients",
}


def warned_by_optimizers():
    found = {}
    for name, settings in STEPS:
        pipe = pipe_of()
        optimizer = getattr(pytorch_optimizer, name)(pipe.parameters(), **dict(settings))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                pipe.forward_backward(*rows(6))
                optimizer.step()
                optimizer.zero_grad()
        found[name, settings] = [str(each.message) for each in caught]
    return found


def test_optimizers_that_go_by_all_gradients_are_named(ranks):
    for found in ranks(warned_by_optimizers, 2):
        for case, expected in STEPS.items():
            said = [message for message in found[case] if "sum over all gradients" in message]
            assert len(said) == (expected is not None)
            assert all(message.startswith(expected) for message in said)
    assert "max_grad_norm=0 turns that off" in found["Lamb", (("pre_norm", True),)][0]


def trained_by(optimizer, groups):
    """Two matrices, trained by one optimizer, or each by its own as on two ranks."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(6, 4)) for _ in range(2)]
    optimizers = [optimizer([weights[i] for i in group]) for group in groups]
    torch.manual_seed(1)  # of those that draw
    for step in range(40):
        noise = torch.Generator().manual_seed(step)
        for k, weight in enumerate(weights, 1):
            away = (weight.detach() - k) * k
            weight.grad = away + 0.1 * torch.randn(6, 4, generator=noise)
        for each in optimizers:
            each.step()
    return torch.cat([weight.detach() for weight in weights])


#: They want a model, a closure, an inner optimizer, or a package; or draw one number for both.
OTHER_SHAPES = {
    *("AdaGO", "AdaHessian", "AdaLOMO", "AdaMuon", "AdamMini", "AliG", "BSAM", "DeMo"),
    *("DistributedMuon", "FriendlySAM", "GSAM", "LBFGS", "LOMO", "LoRARite", "LookSAM"),
    *("Lookahead", "Muon", "MuonClip", "NorMuon", "OrthoGrad", "PCGrad", "Ranger21", "SAM"),
    *("SafeFP16Optimizer", "ScheduleFreeWrapper", "SophiaH", "TRAC", "WSAM"),
}
#: Differs by the rounding of batched products alone.
ROUNDS = {"SCIONLight"}


@pytest.mark.slow
def test_these_optimizers_and_no_others_go_by_all_gradients():
    classes = {
        name: each
        for name, each in vars(pytorch_optimizer).items()
        if inspect.isclass(each)
        and issubclass(each, torch.optim.Optimizer)
        and name not in OTHER_SHAPES | ROUNDS
    }
    assert len(classes) > 100
    differ = {
        name
        for name, each in classes.items()
        if not torch.allclose(
            trained_by(each, [[0, 1]]), trained_by(each, [[0], [1]]), rtol=1e-6, atol=1e-9
        )
    }
    assert differ == BY_ALL_GRADIENTS & {*classes}
