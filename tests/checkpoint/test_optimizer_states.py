"""Every optimizer of torch, its settings and schedulers go through a checkpoint, or are refused."""

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from methods import same_bits
from models import MLP_SPLIT, mlp, rows

import mpcomp

#: Those that a dense model of matrices and vectors cannot be trained by.
UNFIT = {"Optimizer", "SparseAdam", "Muon"}
OPTIMIZERS = [
    name for name, each in vars(torch.optim).items() if inspect.isclass(each) and name not in UNFIT
]


def tensor(value):
    return torch.tensor(value)


SETTINGS = {
    **{name: (name, {}) for name in OPTIMIZERS},
    "LBFGS, searching": ("LBFGS", {"line_search_fn": "strong_wolfe", "history_size": 3}),
    "SGD, tensor": ("SGD", {"lr": tensor(0.1), "momentum": 0.9}),
    "Adam, tensor": ("Adam", {"lr": tensor(0.1)}),
    "Adam, all tensors": (
        "Adam",
        {"lr": tensor(0.01), "betas": (tensor(0.8), tensor(0.9)), "foreach": False},
    ),
    "AdamW, fp64": ("AdamW", {"lr": torch.tensor(0.1, dtype=torch.float64)}),
    "RMSprop, tensor": ("RMSprop", {"lr": tensor(0.01)}),
    "Adagrad, tensor": ("Adagrad", {"lr": tensor(0.1)}),
    "NAdam, tensor": ("NAdam", {"lr": tensor(0.1)}),
}


def made(case, seed=0, chunks=2):
    name, options = SETTINGS[case]
    torch.manual_seed(seed)
    pipe = mpcomp.pipeline(mlp(), chunks, split=MLP_SPLIT, loss_fn=F.cross_entropy)
    optimizer = getattr(torch.optim, name)(pipe.parameters(), **copy.deepcopy(options))
    return pipe, optimizer


def train(pipe, optimizer, steps):
    for step in steps:

        def closure(step=step):
            optimizer.zero_grad()
            return pipe.forward_backward(*rows(8, step))

        optimizer.step(closure)
    return [p.detach().clone() for p in pipe.parameters()]


@pytest.mark.parametrize("case", SETTINGS)
def test_going_on_is_as_if_never_stopped(case, tmp_path):
    pipe, optimizer = made(case)
    train(pipe, optimizer, range(3))
    pipe.save(tmp_path / "run", optimizer=optimizer)
    expected = train(pipe, optimizer, range(3, 5))
    pipe, optimizer = made(case, seed=1)
    lr = optimizer.param_groups[0]["lr"]
    pipe.load(tmp_path / "run", optimizer=optimizer)
    again = optimizer.param_groups[0]["lr"]
    assert type(again) is type(lr) and again == lr
    if isinstance(lr, torch.Tensor):
        assert again.dtype == lr.dtype
    found = train(pipe, optimizer, range(3, 5))
    assert all(map(same_bits, found, expected))


SCHEDULERS = {
    "StepLR": {"step_size": 2, "gamma": 0.5},
    "CosineAnnealingLR": {"T_max": 7},
    "ExponentialLR": {"gamma": 0.9},
    "LinearLR": {},
    "MultiStepLR": {"milestones": [1, 5]},
    "OneCycleLR": {"max_lr": 0.3, "total_steps": 9},
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_of_a_tensor_goes_on(name, tmp_path):
    def scheduled(seed):
        pipe, optimizer = made("SGD, tensor", seed)
        scheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, **SCHEDULERS[name])
        return pipe, optimizer, scheduler

    def rates(optimizer, scheduler):
        found = []
        for _ in range(3):
            optimizer.step()
            scheduler.step()
            found.append(float(optimizer.param_groups[0]["lr"]))
        return found

    pipe, optimizer, scheduler = scheduled(0)
    rates(optimizer, scheduler)
    pipe.save(tmp_path / "run", optimizer=optimizer, scheduler=scheduler)
    expected = rates(optimizer, scheduler)
    assert len(set(expected)) > 1
    pipe, optimizer, scheduler = scheduled(1)
    pipe.load(tmp_path / "run", optimizer=optimizer, scheduler=scheduler)
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    assert rates(optimizer, scheduler) == expected


def test_a_number_and_a_tensor_take_each_others_rate(tmp_path):
    for saved, loaded in (("SGD, tensor", "SGD"), ("SGD", "SGD, tensor")):
        pipe, optimizer = made(saved)
        optimizer.param_groups[0]["lr"] *= 0.5
        pipe.save(tmp_path / "run", optimizer=optimizer)
        pipe, other = made(loaded, seed=1)
        kind = type(other.param_groups[0]["lr"])
        pipe.load(tmp_path / "run", optimizer=other)
        assert type(other.param_groups[0]["lr"]) is kind
        assert float(other.param_groups[0]["lr"]) == pytest.approx(
            float(optimizer.param_groups[0]["lr"])
        )


def test_a_setting_that_is_an_object_is_named(tmp_path):
    pipe, optimizer = made("SGD")
    optimizer.param_groups[0]["schedule"] = [1, object()]
    with pytest.raises(TypeError, match=r"setting 'schedule'\[1\] is a object: a checkpoint holds"):
        pipe.save(tmp_path / "run", optimizer=optimizer)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("case", ["LBFGS", "LBFGS, searching"])
def test_lbfgs_in_one_process_is_the_plain_models(case):
    pipe, optimizer = made(case, chunks=1)
    found = train(pipe, optimizer, range(2))
    torch.manual_seed(0)
    model = mlp()
    plain = torch.optim.LBFGS(model.parameters(), **SETTINGS[case][1])
    for step in range(2):
        x, y = rows(8, step)

        def closure(x=x, y=y):
            plain.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        plain.step(closure)
    assert all(map(same_bits, found, model.parameters()))
