"""Optimizers and rates for large batches: the papers' steps, wherever the model is cut."""

import copy
import dataclasses
import json
import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from endings import check_success, end_of, history, weights
from everyday import slow
from models import assert_same_training

import mpcomp
import stages
from recipes import cifar10, wikitext
from recipes.cifar10 import ImageTrainer, load_data
from recipes.config import OPTIMIZERS
from recipes.image_config import ImageConfig
from recipes.optimizers import make_optimizer, warm_up
from recipes.text_config import TextConfig
from recipes.wikitext import TextTrainer
from recipes.wikitext import load_data as load_text

RATES = {"sgd": 0.05, "adamw": 1e-3, "nadam": 1e-3, "lars": 5.0, "lamb": 0.01, "muon": 1e-3}
TINY = [
    *("--data", "digits", "--width", "4", "--epochs", "2", "--batch-size", "16", "--chunks", "2"),
    *("--train-limit", "40", "--test-limit", "20", "--precision", "fp32", "--device", "cpu"),
]


def chosen(optimizer: str, **more: object) -> ImageConfig:
    return ImageConfig(optimizer=optimizer, lr=RATES[optimizer], weight_decay=0.01, **more)


def images(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(8, 3, 16, 16, generator=draw), torch.randint(10, (8,), generator=draw)


def paper_step(w: torch.Tensor, g: torch.Tensor, v: torch.Tensor, lr: float) -> torch.Tensor:
    """The next weights: You et al. 2017, algorithm 1; the velocity changes."""
    adapted = w.dim() > 1
    decay = 0.01 if adapted else 0.0
    rate = 0.001 * w.norm() / (g.norm() + decay * w.norm()) if adapted else 1.0
    v.mul_(0.9).add_(lr * rate * (g + decay * w))
    return w - v


def test_steps_of_lars_are_the_papers():
    """Of a matrix with a large norm, which a bound would show, and of a bias; at changing rates.

    The velocity holds the rate at which a gradient was taken into it, and goes on at rate 0.
    """
    layer = torch.nn.Linear(30, 20)
    with torch.no_grad():
        layer.weight *= 20
    optimizer = make_optimizer(chosen("lars"), layer)
    expected = [one.detach().double() for one in layer.parameters()]
    velocities = [torch.zeros_like(one) for one in expected]
    for part in (0.25, 1.0, 1.0, 0.1, 0.0):
        rate = RATES["lars"] * part
        for group in optimizer.param_groups:
            group["lr"] = rate
        grads = [torch.randn_like(one) for one in layer.parameters()]
        for one, grad in zip(layer.parameters(), grads, strict=True):
            one.grad = grad.clone()
        optimizer.step()
        expected = [
            paper_step(w, g.double(), v, rate)
            for w, g, v in zip(expected, grads, velocities, strict=True)
        ]
        for ours, theirs in zip(layer.parameters(), expected, strict=True):
            torch.testing.assert_close(ours.detach().double(), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "nesterov"),
    [("lars", True), *(slow(name, False) for name in OPTIMIZERS), slow("sgd", True)],
)
def test_cut_changes_nothing(name, nesterov):
    """Three stages, with one optimizer and with one each, as on three ranks, are the model."""
    config = chosen(name, nesterov=nesterov)
    plain = stages.resnet18(width=4)
    first, cut, apart = (copy.deepcopy(plain) for _ in range(3))
    pipes = [
        mpcomp.pipeline(
            one, chunks=1, split=3, act_comp="none", grad_comp="none", loss_fn=F.cross_entropy
        )
        for one in (cut, apart)
    ]
    of_plain = make_optimizer(config, plain, outputs=10)
    of_cut = [make_optimizer(config, pipes[0], outputs=10)]
    of_apart = [make_optimizer(config, stage, outputs=10) for stage in pipes[1].stages]
    assert len(of_apart) == 3
    for seed in range(3):
        x, y = images(seed)
        F.cross_entropy(plain(x), y).backward()
        for pipe in pipes:
            pipe.forward_backward(x, y)
        for optimizer in (of_plain, *of_cut, *of_apart):
            optimizer.step()
            optimizer.zero_grad()
    for pipe in pipes:
        assert_same_training(pipe, plain)
    for before, after in zip(first.parameters(), plain.parameters(), strict=True):
        assert not before.equal(after)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_biases_and_norms_do_not_decay(name):
    """But for plain SGD on images."""
    model = stages.resnet18(width=4)
    *matrices, rest = make_optimizer(chosen(name), model).param_groups
    for group in matrices:
        assert group["weight_decay"] == 0.01
        assert all(one.dim() >= 2 for one in group["params"])
    assert rest["weight_decay"] == 0.0
    assert all(one.dim() < 2 for one in rest["params"])
    everything = make_optimizer(chosen(name), model, decay_all=True).param_groups
    assert len(everything) == (1 if name == "sgd" else 2)
    assert sum(len(group["params"]) for group in everything) == len([*model.parameters()])


def test_muon_is_for_hidden_matrices(sentences):
    """Embeddings, the output layer, biases and norms are AdamW's, in every stage."""
    config = TextConfig.for_model(
        **{"model": "tiny", "data": sentences(30), "vocab_size": 270, "seq_len": 16, "split": "2"},
        **{"batch_size": 4, "optimizer": "muon", "lr": 1e-3},
    )
    trainer = TextTrainer(config, load_text(config))
    names = {id(one): name for name, one in trainer.pipe.named_parameters()}
    by_muon, by_adamw = (
        {names[id(one)] for group in groups for one in group["params"]}
        for groups in (
            [group for group in trainer.optimizer.param_groups if group["use_muon"] == chosen]
            for chosen in (True, False)
        )
    )
    assert by_muon and all(".attn." in name or ".mlp." in name for name in by_muon)
    assert by_adamw == set(names.values()) - by_muon
    assert {one.rsplit(".", 1)[1] for one in by_muon} == {"weight"}
    assert len(by_muon) == 4 * 4  # of four blocks: attention in and out, MLP in and out


def test_what_is_not_trained_is_left_out():
    layer = torch.nn.Linear(3, 2)
    layer.bias.requires_grad_(False)
    (group,) = make_optimizer(chosen("lamb"), layer).param_groups
    assert group["params"] == [layer.weight]


def test_package_is_asked_for_only_where_it_is_needed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    layer = torch.nn.Linear(2, 2)
    make_optimizer(chosen("sgd"), layer)
    make_optimizer(chosen("lars"), layer)
    for name in ("lamb", "muon"):
        with pytest.raises(ValueError, match=f"optimizer is {name}, but pytorch-optimizer is not"):
            make_optimizer(chosen(name), layer)


# -- the rate -------------------------------------------------------------------------------------


def test_rate_follows_the_batch():
    assert ImageConfig(batch_size=512, base_batch=128, lr=0.1).peak_lr == pytest.approx(0.4)
    assert ImageConfig(batch_size=64, base_batch=128, lr=0.1).peak_lr == pytest.approx(0.05)
    assert ImageConfig(batch_size=512, lr=0.1).peak_lr == 0.1
    text = TextConfig(batch_size=8, accumulate=4, base_batch=16, lr=0.1)
    assert text.peak_lr == pytest.approx(0.2)


def test_warm_up_rises_from_the_given_rate():
    config = ImageConfig(batch_size=512, base_batch=128, lr=0.1)
    rates = [config.peak_lr * warm_up(config, step, 6) for step in range(6)]
    assert rates == pytest.approx([0.1 + 0.3 * step / 6 for step in range(6)])
    alone = [warm_up(ImageConfig(), step, 3) for step in range(3)]
    assert alone == pytest.approx([0.25, 0.5, 0.75])
    smaller = ImageConfig(batch_size=64, base_batch=128)
    assert [warm_up(smaller, step, 3) for step in range(3)] == [1.0] * 3


def rates_of(trainer, num_steps: int) -> list[float]:
    """The rate of each step, as far as the schedule goes by steps."""
    rates = []
    for _ in range(num_steps):
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        trainer.optimizer.step()
        trainer.end_step()
    return rates


def test_images_after_the_warm_up(tiny):
    """40 images: 2 steps an epoch. The cosine then goes by epochs and ends when it would."""
    config = tiny(lr=0.1, base_batch=4, lr_warmup_epochs=2, epochs=6, batch_size=16)
    trainer = ImageTrainer(config, load_data(config))
    cosine = [0.2 * (1 + math.cos(math.pi * epoch / 4)) for epoch in range(4)]
    expected = [0.1, 0.175, 0.25, 0.325, *(rate for rate in cosine for _ in range(2))]
    assert rates_of(trainer, 12) == pytest.approx(expected)


def test_text_after_the_warm_up(sentences):
    """The rate falls linearly from the end of the warm-up to the end of the training."""
    config = TextConfig.for_model(
        "tiny",
        data=sentences(60),
        vocab_size=270,
        seq_len=16,
        batch_size=4,
        chunks=2,
        base_batch=2,
        lr_warmup_epochs=1,
        epochs=3,
        split="2",
        precision="fp32",
        device="cpu",
        optimizer="lamb",
        lr=0.01,
    )
    trainer = TextTrainer(config, load_text(config))
    num = trainer.steps_per_epoch
    rates = rates_of(trainer, 3 * num)
    assert num > 2
    assert rates[0] == pytest.approx(0.01) and rates[num] == pytest.approx(0.02) == max(rates)
    rises = [after - before for before, after in pairwise(rates[: num + 1])]
    falls = [before - after for before, after in pairwise([*rates[num:], 0.0])]
    assert rises == pytest.approx([0.01 / num] * num)
    assert falls == pytest.approx([0.02 / (2 * num)] * (2 * num))


def test_images_by_milestones(tiny):
    """2 steps an epoch; a warm-up keeps its place, and the milestones theirs."""
    config = tiny(lr=0.1, lr_milestones=(2, 3), lr_factor=0.5, epochs=4, batch_size=16)
    expected = [0.1] * 4 + [0.05] * 2 + [0.025] * 2
    assert rates_of(ImageTrainer(config, load_data(config)), 8) == pytest.approx(expected)
    warm = dataclasses.replace(config, lr_warmup_epochs=1)
    rises = [0.1 / 3, 0.2 / 3]
    assert rates_of(ImageTrainer(warm, load_data(warm)), 8) == pytest.approx(rises + expected[2:])


def test_text_by_milestones(sentences):
    """The whole schedule of ConEF's LSTM, by epochs."""
    config = TextConfig.for_model(
        "lstm",
        data=sentences(40),
        vocab_size=270,
        hidden=4,
        batch_size=4,
        chunks=1,
        epochs=60,
        split="2",
        device="cpu",
        optimizer="sgd",
        lr=2.0,
        lr_milestones=(15, 30, 45),
        lr_factor=0.25,
    )
    trainer = TextTrainer(config, load_text(config))
    num = trainer.steps_per_epoch
    rates = rates_of(trainer, 60 * num)
    expected = [rate for rate in (2.0, 0.5, 0.125, 0.03125) for _ in range(15 * num)]
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize("dp_comp", ["dgc:0.01", "gravac:momentum=0.9+topk:0.1", "ef+topk:0.01"])
def test_weight_decay_beside_momentum_on_replicas(dp_comp):
    """Weights that get no gradient shrink as in momentum SGD, whoever has the momentum."""
    own = dp_comp.startswith("ef")
    config = ImageConfig(
        **{"optimizer": "sgd", "lr": 0.01, "weight_decay": 0.01, "replicas": 2},
        **{"dp_comp": dp_comp, "momentum": 0.9 if own else 0.0},
    )
    ended = []
    for weight_decay in (None, 0.01):
        w = torch.nn.Parameter(torch.ones(2, 3))
        optimizer = make_optimizer(config, torch.nn.ParameterList([w]))
        if weight_decay is not None:
            optimizer = torch.optim.SGD([w], lr=0.01, momentum=0.9, weight_decay=weight_decay)
        for _ in range(1000):
            w.grad = torch.zeros_like(w)
            optimizer.step()
        ended.append(1 - float(w.detach()[0, 0]))
    assert ended[0] == pytest.approx(ended[1], rel=0.02)
    assert ended[1] > 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr_milestones": (0, 4)}, "lr_milestones is 0 4, epochs is 100, .* pass numbers"),
        ({"lr_milestones": (4, 4)}, "pass numbers of epochs that rise"),
        ({"lr_milestones": (80, 100)}, "all before that of the training"),
        ({"lr_milestones": (2,), "lr_warmup_epochs": 3}, "none before the end of the warm-up"),
        ({"lr_factor": 0.0}, "lr_factor is 0.0; pass more than 0 and at most 1"),
        ({"lr_factor": 4.0}, "lr_factor is 4.0; pass more than 0 and at most 1"),
        ({"optimizer": "adam"}, "optimizer is 'adam'; pass one of sgd, adamw, nadam, lars"),
        ({"base_batch": 0}, "base_batch is 0; pass at least 1"),
        ({"base_batch": -8}, "base_batch is -8; pass at least 1"),
        ({"lr_warmup_epochs": -1}, "lr_warmup_epochs is -1; pass at least 0"),
        ({"lr_warmup_epochs": 9, "epochs": 9}, "lr_warmup_epochs is 9, epochs is 9; pass fewer"),
        ({"lr_warmup_epochs": 5, "schedule_epochs": 4}, "schedule_epochs is 4; pass fewer"),
        ({"momentum": 1.0}, "momentum is 1.0; pass at least 0 and less than 1"),
        ({"nesterov": True, "optimizer": "lamb"}, "nesterov is set, optimizer is lamb"),
        ({"nesterov": True, "momentum": 0.0}, "momentum is 0.0; leave it out, or pass sgd or lars"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        ImageConfig(**options)


def test_another_optimizer_needs_its_own_rate():
    with pytest.raises(ValueError, match="optimizer is 'lars', and lr is not given; pass both"):
        ImageConfig.for_data("digits", optimizer="lars")
    with pytest.raises(ValueError, match="the default rate is for adamw"):
        TextConfig.for_model("tiny", optimizer="sgd")
    assert ImageConfig.for_data("digits", optimizer="sgd").lr == 0.05
    with pytest.raises(ValueError, match="lr_milestones and schedule_epochs are both given"):
        ImageConfig.for_data("digits", lr_milestones=(3,), schedule_epochs=5)
    with pytest.raises(
        ValueError, match="lr_warmup_steps is 3 and lr_warmup_epochs is 1; pass one"
    ):
        TextConfig(lr_warmup_steps=3, lr_warmup_epochs=1)


def test_mistakes_end_with_one_line_and_leave_nothing(tmp_path):
    for options, message in (
        (["--optimizer", "adam"], "invalid choice: 'adam'"),
        (["--base-batch", "0"], "base_batch is 0"),
        (["--lr-warmup-epochs", "2"], "epochs is 2; pass fewer"),
        (["--optimizer", "lamb"], "lr is not given"),
    ):
        with pytest.raises(SystemExit) as caught:
            cifar10.main([*TINY, *options, "--out", str(tmp_path / "run")])
        said = caught.value.code
        assert isinstance(said, str) and said.startswith("error: ") and "\n" not in said
        assert message in said
    assert not (tmp_path / "run").exists()


# -- runs -----------------------------------------------------------------------------------------


def large(name: str) -> list[str]:
    rate = ["--optimizer", name, "--lr", str(RATES[name]), "--base-batch", "8"]
    return [*TINY, *rate, "--lr-warmup-epochs", "1", "--weight-decay", "0.01"]


def check_same_run(one, other):
    """Bitwise, all but the seconds."""
    assert history(one) == history(other)
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_resumed_run_keeps_its_milestones(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    falls = ["--epochs", "3", "--lr-milestones", "1", "2", "--lr-factor", "0.5"]
    cifar10.main([*TINY, *falls, "--lr", "0.4", "--out", str(whole)])
    cifar10.main([*TINY, *falls, "--lr", "0.4", "--out", str(parts), "--stop-after", "1"])
    cifar10.main(["--resume", str(parts)])
    check_same_run(whole, parts)
    assert [row["lr"] for row in history(whole)] == [0.4, 0.2, 0.1]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumed_run_is_the_uninterrupted_run(tmp_path, name):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    more = ["--nesterov"] if name in ("sgd", "lars") else ["--clip", "1.0"]
    cifar10.main([*large(name), *more, "--out", str(whole)])
    cifar10.main([*large(name), *more, "--out", str(parts), "--stop-after", "1"])
    cifar10.main(["--resume", str(parts)])
    check_same_run(whole, parts)
    assert [row["lr"] for row in history(whole)] == [RATES[name], 2 * RATES[name]]


@pytest.mark.slow
def test_resumed_text_run_is_the_uninterrupted_run(tmp_path, sentences):
    command = [
        *("--model", "tiny", "--data", sentences(30), "--vocab-size", "270", "--seq-len", "16"),
        *("--batch-size", "4", "--chunks", "2", "--epochs", "2", "--eval-limit", "5", "--split"),
        *("2", "--precision", "fp32", "--device", "cpu", "--optimizer", "lamb", "--lr", "0.005"),
        *("--base-batch", "2", "--lr-warmup-epochs", "1", "--weight-decay", "0.01"),
    ]
    wikitext.main([*command, "--out", str(tmp_path / "whole")])
    wikitext.main([*command, "--out", str(tmp_path / "parts"), "--stop-after", "1"])
    wikitext.main(["--resume", str(tmp_path / "parts")])
    check_same_run(tmp_path / "whole", tmp_path / "parts")


def both(*commands: list[str]) -> list[object]:
    """In each process: runs the recipe with each of the commands."""
    return [end_of(cifar10.main, command) for command in commands]


@pytest.mark.slow
def test_processes_train_the_run_of_one(ranks, tmp_path):
    """Two stages of which each process has one; and a resumption there."""
    commands = {name: [*large(name), "--split", "2"] for name in ("lars", "lamb")}
    ended = ranks(
        both,
        2,
        *([*one, "--out", str(tmp_path / name)] for name, one in commands.items()),
        [*commands["lamb"], "--out", str(tmp_path / "parts"), "--stop-after", "1"],
        ["--resume", str(tmp_path / "parts")],
    )
    for ends in zip(*ended, strict=True):
        check_success(ends)
    for name, one in commands.items():
        cifar10.main([*one, "--out", str(tmp_path / f"{name}-alone")])
        check_same_run(tmp_path / f"{name}-alone", tmp_path / name)
    check_same_run(tmp_path / "lamb", tmp_path / "parts")
    config = json.loads((tmp_path / "lamb" / "config.json").read_text())
    assert (config["optimizer"], config["base_batch"]) == ("lamb", 8)
