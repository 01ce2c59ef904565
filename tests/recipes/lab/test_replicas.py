"""Replicas in one process: the bits of as many processes, one error for all, and no thread left."""

import json
import math
import sys
import threading
import time
from collections import OrderedDict
from contextlib import closing

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from methods import same_bits
from models import plain_sgd as sgd
from ranks import preload
from torch import nn

import mpcomp
from mpcomp import ReplicaNetwork
from mpcomp.data_parallel.methods import replica_method_of
from recipes import cifar10, wikitext
from recipes.image_config import ImageConfig
from recipes.lab import conef_study, replica_study, study_runs, thread_group
from recipes.lab.replicas import ReplicaImageTrainer, ReplicaTextTrainer
from recipes.lab.study import line_of
from recipes.lab.study_runs import own_settings
from recipes.lab.together import InOneProcess
from recipes.ranks import joined
from recipes.run_folder import RunFolder
from recipes.text_config import TextConfig

preload("recipes.lab.study_runs", "transformers.models.gpt2.modeling_gpt2")

#: GraVAC's links are described: a clock on the wall never says the same twice.
SPECS = [
    "none",
    "topk:0.1",
    "ef+topk:0.1",
    "dgc:0.01:warmup_steps=2+fp16",
    "powersgd:2",
    "gravac:cf=4-100:eps=0.3:window=2:smoothing=0.5:bandwidth_mbps=10+topk:0.1",
    "accordion:low=topk/0.5:high=topk/0.1:interval=2",
    "conef:0.4:beta=0.9+randomblock:0.1",
    "onebitsgd",
]
#: Each replica forms the mean of a piece.
TWO_PHASE = ReplicaNetwork(path="two-phase", smallest=64)
NETWORKS = {"auto": ReplicaNetwork(smallest=64), "two-phase": TWO_PHASE}
RUNS = [*((spec, "auto") for spec in SPECS), ("ef+topk:0.1", "two-phase")]
STEPS = 6


@pytest.fixture(autouse=True)
def _nothing_is_left():
    """Neither a thread, nor a group that torch.distributed knows, nor a hook of it."""
    hook = sys.excepthook
    yield
    assert not dist.is_initialized() and sys.excepthook is hook
    assert not [t.name for t in threading.enumerate() if t.name.startswith("replica")]


def net():
    torch.manual_seed(0)
    layers = {"conv": nn.Conv2d(3, 7, 3), "relu": nn.ReLU(), "flat": nn.Flatten()}
    return nn.Sequential(OrderedDict(layers, one=nn.Linear(252, 19), two=nn.Linear(19, 5)))


def share_of(replica, num_replicas, step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(6 * num_replicas, 3, 8, 8, generator=generator)
    y = torch.randint(5, (6 * num_replicas,), generator=generator)
    own = slice(6 * replica, 6 * (replica + 1))
    return x[own], y[own]


def train_together(together, model, optimizer, steps):
    """By the shares of the replicas, one after the other."""
    for step in steps:
        gradients = []
        for replica in range(len(together.exchanges)):
            x, y = share_of(replica, len(together.exchanges), step)
            F.cross_entropy(model(x), y).backward()
            gradients.append({name: p.grad for name, p in model.named_parameters()})
            optimizer.zero_grad()
        means = together.average(gradients, lr=optimizer.param_groups[0]["lr"])
        for name, parameter in model.named_parameters():
            parameter.grad = means[name]
        optimizer.step()
        optimizer.zero_grad()


def together_with(model, spec, num_replicas=2, *, network="auto", **options):
    return InOneProcess(
        dict(model.named_parameters()),
        replica_method_of(spec),
        num_replicas,
        network=NETWORKS[network],
        **options,
    )


def weights_of(module):
    """Copies; a `state_dict` in one of several processes comes with a warning."""
    held = [*module.named_parameters(), *module.named_buffers()]
    return {name: value.detach().clone() for name, value in held}


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if not same_bits(ours[name], theirs[name])]


def trainer_of(config):
    if isinstance(config, ImageConfig):
        return ReplicaImageTrainer(config, cifar10.load_data(config))
    return ReplicaTextTrainer(config, wikitext.load_data(config))


def trained(config, settings, _):
    with closing(trainer_of(config)) as trainer:
        summary = trainer.fit(progress=False)
        figures = study_runs.between_replicas(trainer, trainer.together.report())
    return {**study_runs.reached(summary), **figures}


# -- the law --------------------------------------------------------------------------------------


def images(**changes):
    chosen = {
        **{"width": 4, "train_limit": 64, "test_limit": 20, "batch_size": 16, "epochs": 2},
        **{"schedule_epochs": 2, "eval_every": 2, "crop_padding": 2, "lr": 0.05},
        **{"precision": "fp32", "device": "cpu", "threads": 1},
        **{"split": "1", "chunks": 1, "act": ("none",), "grad": ("none",), "replicas": 2},
    }
    return ImageConfig(data="digits", **{**chosen, **changes})


def words(folder, **changes):
    """A model with dropout."""
    path = folder / "words.txt"
    path.write_text("".join(f"the cut number {i} sends a message\n" for i in range(40)))
    chosen = {
        **{"model": "lstm", "hidden": 16, "tokenizer": "bpe", "vocab_size": 270, "seq_len": 16},
        **{"batch_size": 4, "eval_limit": 8, "epochs": 1, "precision": "fp32", "device": "cpu"},
        **{"optimizer": "sgd", "lr": 1.0, "momentum": 0.9, "clip": 0.25, "threads": 1},
        **{"split": "1", "chunks": 1, "act": ("none",), "grad": ("none",), "replicas": 2},
    }
    return TextConfig(data=str(path), **{**chosen, **changes})


def in_processes(configs):
    """In each process: the weights by each method, and what the trainers end with."""
    found = []
    for spec, network in RUNS:
        pipe = mpcomp.pipeline(
            net(),
            1,
            split=1,
            replicas=2,
            dp_comp=spec,
            network=NETWORKS[network],
            loss_fn=F.cross_entropy,
            timeout=60.0,
        )
        optimizer = sgd(pipe.parameters())
        pipe.follow(optimizer)
        for step in range(STEPS):
            pipe.forward_backward(*share_of(pipe.replica, 2, step))
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights_of(pipe))
    ended = []
    with joined() as own:
        for config in configs:
            trainer = study_runs.trainer_of(config, own)
            summary = trainer.fit(progress=False)
            exchange = trainer.pipe.exchange
            ended.append((weights_of(trainer.pipe), summary.history, exchange.report()))
    return found, ended


@pytest.mark.timeout(120)
def test_the_bits_of_as_many_processes(ranks, tmp_path):
    """Weights, and of trainers also what they measure: with BatchNorm, with dropout."""
    configs = [
        images(dp_comp="ef+topk:0.05+fp16", dp_small="bf16", warmup_steps=2, width=8),
        images(dp_comp="ef+topk:0.05", precision="fp16", epochs=1),
        words(tmp_path, dp_comp="conef:0.4:beta=0.9+randomblock:0.1", accumulate=2),
    ]
    found, ended = ranks(in_processes, 2, configs)[0]
    for (spec, network), theirs in zip(RUNS, found, strict=True):
        model = net()
        optimizer = sgd(model.parameters())
        with together_with(model, spec, network=network, optimizer=optimizer) as together:
            train_together(together, model, optimizer, range(STEPS))
        assert_same(weights_of(model), theirs)
    for config, (theirs, history, report) in zip(configs, ended, strict=True):
        with closing(trainer_of(config)) as trainer:
            summary = trainer.fit(progress=False)
        assert_same(weights_of(trainer.pipe), theirs)
        assert [measured(entry) for entry in summary.history] == [measured(e) for e in history]
        ours = counted(trainer.together.report())
        assert ours == pytest.approx(counted(report), rel=0, nan_ok=True)


def measured(entry):
    """Of an epoch, all but the time; a loss is added up in another order.

    Nobody has to agree on a step in one process, and so what is sent in all is less.
    """
    said = {k: v for k, v in entry.items() if k not in ("seconds", "replicas", "wire_bytes")}
    said["account"] = {k: v for k, v in said["account"].items() if k != "agreements"}
    return {**said, "loss": pytest.approx(said["loss"], rel=1e-6)}


def counted(report):
    figures = {name: value for name, value in report.items() if not name.endswith("_s")}
    return {name: value for name, value in figures.items() if not isinstance(value, str | dict)}


def test_the_mean_of_four_is_that_of_the_whole_batch():
    ours, plain = net(), net()
    optimizer, other = sgd(ours.parameters()), sgd(plain.parameters())
    with together_with(ours, "none", 4) as together:
        train_together(together, ours, optimizer, range(3))
        assert together.report()["replicas"] == 4 and together.report()["ratio"] == 1
    for step in range(3):
        shares = (share_of(i, 4, step) for i in range(4))
        x, y = (torch.cat(each) for each in zip(*shares, strict=True))
        F.cross_entropy(plain(x), y).backward()
        other.step()
        other.zero_grad()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("spec", ["ef+topk:0.1", "accordion:low=topk/0.5:high=topk/0.1:interval=4"])
def test_a_run_goes_on_from_its_state(spec, network):
    """After 3 of 6 steps, with replicas made anew; and not with others."""
    model = net()
    optimizer = sgd(model.parameters())
    with together_with(model, spec, 3, network=network) as together:
        train_together(together, model, optimizer, range(3))
        state = json.loads(json.dumps(together.state_dict()["rest"]))
        saved = {"tensors": clones(together.state_dict()["tensors"]), "rest": state}
        weights = weights_of(model)
        train_together(together, model, optimizer, range(3, 6))
        whole = weights_of(model)
        model.load_state_dict(weights)
        with together_with(model, spec, 3, network=network) as anew:
            anew.load_state_dict(saved)
            train_together(anew, model, optimizer, range(3, 6))
            assert_same(clones(anew.state_dict()["tensors"]), together.state_dict()["tensors"])
            assert anew.report()["steps"] == 6
    assert_same(weights_of(model), whole)
    with (
        together_with(model, spec, 2, network=network) as fewer,
        pytest.raises(ValueError, match="3"),
    ):
        fewer.load_state_dict(saved)
    with together_with(model, "none", 3) as others, pytest.raises(ValueError, match="same method"):
        others.load_state_dict(saved)


def clones(tensors):
    return {name: value.clone() for name, value in tensors.items()}


# -- errors ---------------------------------------------------------------------------------------


def boom(*_, **__):
    raise LookupError("boom")


@pytest.mark.parametrize("call", ["begin", "add", "finish", "finish_step"])
def test_the_error_of_one_replica_ends_all(monkeypatch, call):
    model = net()
    together = together_with(model, "ef+topk:0.1", 3)
    optimizer = sgd(model.parameters())
    train_together(together, model, optimizer, range(1))
    monkeypatch.setattr(together.exchanges[1], call, boom)
    with pytest.raises(LookupError, match="boom"):
        train_together(together, model, optimizer, range(1, 2))
    with pytest.raises(RuntimeError, match="shutdown"):
        train_together(together, model, optimizer, range(1, 2))
    assert together.report()["steps"] >= 1
    together.close()


def test_an_error_where_tensors_move_is_told():
    model = net()
    gradients = [{n: torch.ones_like(p) for n, p in model.named_parameters()} for _ in range(3)]
    del gradients[2]["two.bias"]
    with (
        together_with(model, "none", 3) as together,
        pytest.raises(RuntimeError, match="must match the size"),
    ):
        together.average(gradients)


@pytest.mark.timeout(60)
def test_who_does_not_come_is_not_waited_for_ever(monkeypatch):
    monkeypatch.setattr(thread_group, "WAIT_S", 0.1)
    model = net()
    with together_with(model, "ef+topk:0.1") as together:
        late = together.exchanges[1]
        monkeypatch.setattr(late, "finish", lambda: time.sleep(0.5))
        with pytest.raises(RuntimeError, match="has not come within 0.1 seconds"):
            train_together(together, model, sgd(model.parameters()), range(1))


def test_what_is_not_finite_leaves_no_trace():
    model, gradients = net(), []
    for replica in range(2):
        F.cross_entropy(model(share_of(replica, 2, 0)[0]), share_of(replica, 2, 0)[1]).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
        model.zero_grad()
    gradients[1]["one.weight"][0] = math.inf
    with together_with(model, "ef+topk:0.1") as together:
        means = together.average(gradients)
        assert all(bool(mean.isnan().all()) for mean in means.values())
        assert together.first.nonfinite and not together.state_dict()["tensors"]
        with pytest.raises(ValueError, match="gradients of 1 replicas, and there are 2"):
            together.average(gradients[:1])


def test_what_one_model_cannot_do():
    model, hook = net(), sys.excepthook
    for spec, network, says in (
        ("diloco:4+topk:0.1", ReplicaNetwork(), "one model for all"),
        ("none", ReplicaNetwork(per_machine=2), "on one level"),
    ):
        with pytest.raises(ValueError, match=says):
            InOneProcess(
                dict(model.named_parameters()), replica_method_of(spec), 2, network=network
            )
    with pytest.raises(ValueError, match="momentum"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        together_with(model, "dgc:0.01", optimizer=optimizer)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="one of several"):
            together_with(model, "none")
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


# -- training -------------------------------------------------------------------------------------


def test_images_on_four_replicas(tmp_path):
    """The loss falls; a run that is resumed is the uninterrupted one; its line is a study's."""
    config = images(dp_comp="ef+topk:0.1", replicas=4, width=8, train_limit=320)
    line = line_of(trained, "EF Top-1 %", config, own_settings(config, None))
    table = replica_study.render([line, {**line, "row": "dense"}])
    assert "EF Top-1 %" in table and "+0.00" in table
    assert line["steps"] == 40 and line["step_s"] > 0 and line["memory_bytes"] > 0
    assert line["dense_bytes"] == 4 * line["replicas"]["dense_bytes"]
    assert 4 * line["replicas"]["wire_bytes"] == line["wire_bytes"] < 0.5 * line["dense_bytes"]
    folder = RunFolder(tmp_path / "run")
    for stop_after in (1, 2):
        with closing(trainer_of(config)) as trainer:
            summary = trainer.fit(folder, resume=True, stop_after=stop_after, progress=False)
    first, last = (epoch["loss"] for epoch in summary.history)
    assert last < first - 0.1 and last == line["loss"]
    assert summary.on == line["accuracy"] and summary.wire_bytes == line["wire_bytes"]


def test_text_on_replicas_gives_the_line_of_a_study(tmp_path):
    config = words(tmp_path, dp_comp="conef:0.4:beta=0.9+randomblock:0.1")
    line = line_of(trained, "lstm: ConEF 60 %", config, own_settings(config, None))
    assert line["perplexity"] < 200 and "ConEF 60 %" in conef_study.render([line])


def test_a_run_that_diverges_says_so():
    config = images(lr=1e30, dp_comp="topk:0.5")
    assert "NaN or Inf" in line_of(trained, "row", config, {})["diverged"]


@pytest.mark.parametrize(
    "changes",
    [
        *({"split": "2"}, {"chunks": 2}, {"act": ("topk:0.1",)}, {"per_machine": 2}),
        *({"shard": True}, {"replicas": 1}),
    ],
)
def test_runs_that_need_several_processes(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        trainer_of(images(**changes))
