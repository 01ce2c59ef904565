"""Law 7 with several processes: save, load, go on = never stopped; and all fail, or none.

Asserts are in the processes: the first that fails ends the test.
"""

import json
import math
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from everyday import slow, slow_after
from methods import FEEDBACK, beside, same_bits
from models import (
    CONV_SPLIT,
    MLP_SPLIT,
    adamw,
    assert_same_state,
    assert_same_training,
    convnet,
    images,
    links_state,
    mlp,
    names_in,
    rows,
    sgd,
)
from runs import deep
from safetensors.torch import load_file, save_file

import mpcomp
from mpcomp.checkpoint import files
from mpcomp.checkpoint.replacing import Replacement
from mpcomp.comm.failures import PeerError

pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")
STATEFUL = {"act": "ef21+topk:0.3", "grad": "ef+topk:0.3"}


@dataclass(frozen=True)
class Setting:
    """A pipeline and what a loop has besides."""

    split: Any = MLP_SPLIT
    act: Any = None
    grad: Any = None
    optim: Any = sgd
    model: Any = mlp
    schedule: str | None = None
    replicas: int = 1
    timeout: float = 60.0

    @property
    def batch(self):
        return images if self.model is convnet else rows

    def make(self, seed=0, model=None, **kwargs):
        torch.manual_seed(seed)
        return mpcomp.pipeline(
            self.model() if model is None else model,
            2,
            split=self.split,
            act_comp=self.act,
            grad_comp=self.grad,
            loss_fn=F.cross_entropy,
            scaler=torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2),
            schedule=self.schedule,
            replicas=self.replicas,
            timeout=self.timeout,
            **kwargs,
        )


class Loop:
    """An ordinary training loop, with all that a checkpoint restores."""

    def __init__(self, setting, seed=0, **kwargs):
        self.setting = setting
        self.pipe = setting.make(seed, **kwargs)
        self.optimizer = setting.optim(self.pipe)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=9)
        torch.manual_seed(seed + 5)

    @property
    def parts(self):
        return {"optimizer": self.optimizer, "scheduler": self.scheduler}

    def run(self, first, last):
        """The losses; random numbers of torch's stand for augmentation."""
        losses = []
        for step in range(first, last):
            x, y = self.setting.batch(6, step)
            x = x + 0.01 * torch.randn_like(x)
            ids = [(step + i) % 9 for i in range(6)]
            losses.append(self.pipe.forward_backward(x, y, sample_ids=ids))
            self.pipe.scaler.step(self.optimizer)
            self.pipe.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return torch.stack(losses)

    def save(self, folder, **extra):
        self.pipe.save(folder, **self.parts, extra=extra)

    def load(self, folder):
        return self.pipe.load(folder, **self.parts)


def assert_same_loops(one, two):
    """All that training depends on or counts, of this rank."""
    assert_same_training(one.pipe, two.pipe)
    assert_same_state(links_state(one.pipe), links_state(two.pipe))
    assert one.pipe.num_steps == two.pipe.num_steps
    assert one.pipe.scaler.state_dict() == two.pipe.scaler.state_dict()
    assert one.scheduler.state_dict() == two.scheduler.state_dict()
    assert (one.pipe.wire_bytes, one.pipe.dense_bytes) == (
        two.pipe.wire_bytes,
        two.pipe.dense_bytes,
    )
    for link, twin in zip(one.pipe.links, two.pipe.links, strict=True):
        for phase, traffic in link.meter.phases.items():
            mine, theirs = traffic.to_dict(), twin.meter.phases[phase].to_dict()
            for name in mine.keys() - {"seconds"}:
                same = mine[name] == theirs[name]
                assert same or (math.isnan(mine[name]) and math.isnan(theirs[name])), name
    for (name, p), q in zip(one.pipe.named_parameters(), two.pipe.parameters(), strict=True):
        assert_same_moments(one.optimizer.state[p], two.optimizer.state[q], name)


def assert_same_moments(mine, theirs, name):
    assert mine.keys() == theirs.keys()
    for key, value in mine.items():
        other = theirs[key]
        same = same_bits(value, other) if isinstance(value, torch.Tensor) else value == other
        assert same, (name, key)


def disk(root, rank, shared):
    """Where a rank writes: one folder stands for a shared file system, or for its own."""
    return Path(root) if shared else Path(root) / f"disk{rank}"


# -- the same ranks -------------------------------------------------------------------------------


def goes_on(settings, root, shared):
    for number, setting in enumerate(settings):
        straight = Loop(setting)
        folder = disk(root, straight.pipe.rank, shared) / str(number)
        straight.run(0, 2)
        straight.pipe.evaluate([setting.batch(6, 0)])
        straight.save(folder / "last", epoch=1)
        at_save = straight.pipe.wire_bytes
        expected = straight.run(2, 4)
        drawn = torch.rand(3)

        resumed = Loop(setting, seed=99)  # other weights, other generator
        resumed.run(0, 1)
        assert resumed.load(folder / "last") == {"epoch": 1}
        assert resumed.pipe.num_steps == 2
        assert resumed.pipe.wire_bytes == at_save
        resumed.pipe.zero_grad()
        assert torch.equal(resumed.run(2, 4), expected), setting
        assert torch.equal(torch.rand(3), drawn)
        assert_same_loops(resumed, straight)
        assert not straight.pipe.dense_bytes or straight.pipe.wire_bytes > 0
        straight.pipe.collect(None)  # nobody deletes what another still reads
        assert names_in(folder) == ["last"]
    return resumed.pipe.rank


def both_ways(method):
    """A method as it may stand at a cut."""
    return method, beside(method, None if isinstance(method, mpcomp.AQSGD) else method)


def settings_of(num_ranks, optim):
    """Of two ranks the first method of each class; of three all others, two to a pipeline."""
    first = list({type(method): method for method in reversed(FEEDBACK)}.values())
    pairs = [
        ("randomk:0.3", "quant:4:rounding=stochastic"),
        ("ef21+topk:0.3", "same"),
        ("aqsgd+quant:4", "ef+topk:0.2"),
    ]
    if num_ranks == 2:
        pairs += map(both_ways, first)
        return [Setting(CONV_SPLIT[-1:], *pair, optim, model=convnet) for pair in pairs]
    pairs = [("ef+topk:0.3", "same"), (None, "ef21+topk:0.2"), *pairs]
    pairs += [both_ways(method) for method in FEEDBACK if method not in first]
    pairs += [("topk:0.3", None)] * (len(pairs) % 2)
    return [
        Setting(CONV_SPLIT[-2:], *map(list, zip(*two, strict=True)), optim, model=convnet)
        for two in zip(pairs[::2], pairs[1::2], strict=True)
    ]


@pytest.mark.parametrize("num_ranks, optim, shared", [(2, sgd, False), slow(3, adamw, True)])
def test_going_on_is_as_if_never_stopped(ranks, num_ranks, optim, shared, tmp_path):
    """Every stateful method, with dropout, BatchNorm, scheduler and loss scaler."""
    ranks(goes_on, num_ranks, settings_of(num_ranks, optim), str(tmp_path), shared)
    names = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.glob("**/*.json"))
    parts = [f"rank-{rank:05d}-of-{num_ranks:05d}/checkpoint.json" for rank in range(num_ranks)]
    if shared:
        assert [n for n in names if n.startswith("0/")] == [
            f"0/last/{name}" for name in ["checkpoint.json", *parts]
        ]
    else:  # each disk has what its rank has written, and nothing else
        for rank, part in enumerate(parts):
            own = [n for n in names if n.startswith(f"disk{rank}/0/")]
            assert own == [f"disk{rank}/0/last/{name}" for name in ("checkpoint.json", part)]


@pytest.mark.slow
def test_two_stages_on_a_rank_go_on(ranks, tmp_path):
    """One link of the V lies within a rank, which has both of its ends."""
    settings = [
        Setting(4, **STATEFUL, optim=adamw, model=deep, schedule=schedule)
        for schedule in ("ZBVZeroBubble", "Interleaved1F1B")
    ]
    ranks(goes_on, 2, settings, str(tmp_path), False)


@pytest.mark.parametrize("shared", slow_after(1, [True, False]))
def test_replicas_go_on(ranks, shared, tmp_path):
    """Each with its own links' state and BatchNorm statistics."""
    ranks(replicas_go_on, 4, str(tmp_path), shared)


def replicas_go_on(root, shared):
    setting = Setting(CONV_SPLIT[:1], "ef21+topk:0.3", "ef+topk:0.3", model=convnet, replicas=2)
    straight, resumed = Loop(setting), Loop(setting, seed=99)
    folder = disk(root, straight.pipe.rank, shared) / "a"

    def run(loop, first, last):
        losses = []
        for step in range(first, last):
            x, y = images(6, 10 * step + loop.pipe.replica)
            losses.append(loop.pipe.forward_backward(x, y))
            loop.pipe.scaler.step(loop.optimizer)
            loop.pipe.scaler.update()
            loop.optimizer.zero_grad()
        return torch.stack(losses)

    run(straight, 0, 2)
    straight.save(folder)
    expected = run(straight, 2, 4)
    run(resumed, 0, 1)
    resumed.load(folder)
    assert torch.equal(run(resumed, 2, 4), expected)
    assert_same_loops(resumed, straight)


# -- other ranks ----------------------------------------------------------------------------------


def train_and_save(setting, folder, last):
    loop = Loop(setting)
    losses = loop.run(0, last)
    if folder is not None:
        loop.save(folder, note="x")
    return losses, loop


def in_rank_train_and_save(setting, folder, last):
    train_and_save(setting, folder, last)


def load_and_go_on(setting, folder, first, last, model=None, **kwargs):
    loop = Loop(setting, seed=99, model=model, **kwargs)
    if model is None:
        loop.run(0, 1)
    assert loop.load(folder) == {"note": "x"}
    sent = loop.pipe.wire_bytes
    loop.pipe.zero_grad()
    losses = loop.run(first, last)
    weights = {name: value.clone() for name, value in loop.pipe.merge().state_dict().items()}
    own = {name: loop.optimizer.state[p] for name, p in loop.pipe.named_parameters()}
    moments = {f"{name} {k}": v for name, entry in own.items() for k, v in entry.items()}
    return losses, weights, moments, links_state(loop.pipe), sent, loop.pipe.wire_bytes


def assert_goes_on_like(straight, results, expected, sent=None):
    """Whatever processes there are now, they have become what one would be."""
    weights = straight.pipe.merge().state_dict()
    theirs = {name: straight.optimizer.state[p] for name, p in straight.pipe.named_parameters()}
    moments = {f"{name} {k}": v for name, entry in theirs.items() for k, v in entry.items()}
    state = links_state(straight.pipe)
    seen, ends = set(), set()
    for losses, own_weights, own_moments, own_links, sent_before, sent_after in results:
        assert torch.equal(losses, expected)
        assert own_weights.keys() == weights.keys()
        assert all(same_bits(own_weights[name], weights[name]) for name in weights)
        for name, value in own_moments.items():
            assert same_bits(value, moments[name]), name
        seen |= own_moments.keys()
        for name, of_link in own_links.items():
            ends |= {(name, key) for key in of_link}
            for key, value in of_link.items():
                same = value == state[name][key] if key == "sample" else (
                    same_bits(value, state[name][key]))  # fmt: skip
                assert same, (name, key)
        if sent is not None:
            assert (sent_before, sent_after) == (sent, straight.pipe.wire_bytes)
    assert seen == moments.keys()  # nothing got lost on the way
    assert ends == {(name, key) for name, of_link in state.items() for key in of_link}


CHANGES = [
    (Setting(MLP_SPLIT, **STATEFUL, optim=adamw), 3),
    (Setting(MLP_SPLIT, ["aqsgd+quant:4", "ef21+topk:0.3"], "ef+topk:0.3"), 3),
    (Setting(4, **STATEFUL, model=deep, schedule="ZBVZeroBubble"), 2),
]


@pytest.mark.parametrize("setting, num_ranks", CHANGES, ids=["adamw", "aqsgd", "v"])
def test_from_one_process_to_several_and_back(ranks, setting, num_ranks, tmp_path):
    local = replace(setting, schedule=None)
    _, straight = train_and_save(local, tmp_path / "local", 2)
    sent = straight.pipe.wire_bytes
    expected = straight.run(2, 4)
    counts = None if setting.schedule else sent  # a cut within a rank sends nothing
    results = ranks(load_and_go_on, num_ranks, setting, tmp_path / "local", 2, 4)
    assert_goes_on_like(straight, results, expected, counts)
    assert {result[4] for result in results} == {sent}

    ranks(in_rank_train_and_save, num_ranks, setting, tmp_path / "ranks", 2)
    results = [load_and_go_on(local, tmp_path / "ranks", 2, 4)]
    assert_goes_on_like(straight, results, expected, counts)


@pytest.mark.slow
def test_from_ranks_to_other_ranks(ranks, tmp_path):
    """Four stages on 2 ranks as a V, on 4, on 2 alternating."""
    setting = Setting(4, **STATEFUL, optim=adamw, model=deep)
    _, straight = train_and_save(setting, None, 2)
    expected = straight.run(2, 4)
    v, alternating = (replace(setting, schedule=s) for s in ("ZBVZeroBubble", "Interleaved1F1B"))
    for count, one, other_count, other in ((2, v, 4, setting), (4, setting, 2, alternating)):
        folder = tmp_path / f"{count} to {other_count}"
        ranks(in_rank_train_and_save, count, one, folder, 2)
        results = ranks(load_and_go_on, other_count, other, folder, 2, 4)
        assert_goes_on_like(straight, results, expected)


def test_another_cut_where_links_remember_nothing(ranks, tmp_path):
    setting = Setting(MLP_SPLIT, "topk:0.3", optim=adamw)
    ranks(in_rank_train_and_save, 3, setting, tmp_path / "a", 2)
    straight = train_and_save(setting, None, 2)[1]
    ranks(loads_another_cut, 2, tmp_path / "a", straight.pipe.merge().state_dict())


def loads_another_cut(folder, weights):
    loop = Loop(Setting(["one"], "quant:4", optim=adamw), seed=1)
    assert loop.load(folder) == {"note": "x"} and loop.pipe.num_steps == 2
    merged = loop.pipe.merge().state_dict()
    assert all(same_bits(merged[name], weights[name]) for name in weights)
    assert all(loop.optimizer.state[p]["step"] == 2 for p in loop.pipe.parameters())
    loop.run(2, 3)


def test_other_replicas(ranks, tmp_path):
    ranks(in_rank_train_and_save, 4, Setting(["tanh"], **STATEFUL, replicas=2), tmp_path / "two", 2)
    ranks(in_rank_train_and_save, 2, Setting(["tanh"], **STATEFUL), tmp_path / "one", 2)
    ranks(in_rank_train_and_save, 2, Setting(["tanh"], "topk:0.3"), tmp_path / "none", 2)
    (tmp_path / "two" / "rank-00002-of-00004").rename(tmp_path / "elsewhere")
    ranks(fewer_replicas, 2, tmp_path)
    ranks(more_replicas, 4, tmp_path)


def fewer_replicas(root):
    """The state of the first replica goes on; so do the bytes of all."""
    loop = Loop(Setting(["tanh"], **STATEFUL), seed=1)
    loop.load(root / "two")
    meta = json.loads((root / "two" / "checkpoint.json").read_text())
    sent = sum(link["traffic"]["train"]["wire_bytes"] for link in meta["links"].values())
    assert loop.pipe.wire_bytes == sent > 0
    state = load_file(root / "two" / f"rank-{loop.pipe.rank:05d}-of-00004" / "state.safetensors")
    own = {
        f"link.{link.boundary}.{link.direction}.{key}": value
        for link in loop.pipe.links
        for key, value in link.endpoint.state_dict().items()
        if key != "sample"
    }
    assert own and all(same_bits(value, state[key]) for key, value in own.items())


def more_replicas(root):
    loop = Loop(Setting(["tanh"], **STATEFUL, replicas=2), seed=1)
    message = "rank 2: .*one holds state of links of 1 replicas, and none for replica 1"
    assert_load_fails(loop, root / "one", message)
    assert_load_fails(loop, root / "two", "rank 2: .*lacks rank-00002-of-00004: each part lies")
    other = Loop(Setting(["tanh"], "topk:0.3", replicas=2), seed=1)
    other.load(root / "none")
    other.run(2, 3)
    weights = other.pipe.collect([p.sum().item() for p in other.pipe.parameters()])
    assert weights[:2] == weights[2:]


# -- weights --------------------------------------------------------------------------------------


def test_weights_of_both_forms(ranks, tmp_path):
    """A model without memory takes them, and so does the plain model."""
    setting = Setting(CONV_SPLIT, "ef21+topk:0.3", model=convnet, optim=adamw)
    _, straight = train_and_save(setting, tmp_path / "one", 2)
    ranks(in_rank_train_and_save, 3, setting, tmp_path / "several", 2)
    expected = straight.run(2, 4)
    weights = straight.pipe.merge().state_dict()
    for form in ("one", "several"):
        folder = tmp_path / form
        results = [meta_goes_on(setting, folder), *ranks(meta_goes_on, 3, setting, folder)]
        assert_goes_on_like(straight, results, expected)
    plain = convnet()
    for path in (tmp_path / "several").glob("*/weights.safetensors"):
        plain.load_state_dict(load_file(path), strict=False)
    saved = load_file(tmp_path / "one" / "weights.safetensors")
    assert saved.keys() == weights.keys()
    assert all(same_bits(value, saved[name]) for name, value in plain.state_dict().items())


def meta_goes_on(setting, folder):
    with torch.device("meta"):
        model = convnet()
    return load_and_go_on(setting, folder, 2, 4, model=model, weights=folder)


def test_weights_of_a_rank_are_enough_for_it(ranks, tmp_path):
    ranks(own_weights, 2, str(tmp_path))


def own_weights(root):
    setting = Setting(["tanh"])
    pipe = setting.make()
    folder = disk(root, pipe.rank, False) / "a"
    pipe.save(folder)
    with torch.device("meta"):
        model = mlp()
    again = setting.make(model=model, weights=folder)
    for path in folder.glob("*/weights.safetensors"):  # not mapped into memory: files may change
        path.write_bytes(b"\xff" * path.stat().st_size)
    assert_same_training(again, pipe)
    other = folder.parent.parent / f"disk{1 - pipe.rank}" / "a"
    with torch.device("meta"):
        model = mlp()
    with pytest.raises(ValueError, match="safetensors files there lack|truncated or foreign"):
        mpcomp.pipeline(model, 2, split=["tanh"], weights=other, engine="local")


# -- loads that fail ------------------------------------------------------------------------------


def assert_load_fails(loop, folder, message):
    """With the same error on all ranks; nothing has changed on any, and training goes on."""
    pipe = loop.pipe
    loop.run(0, 1)
    before = {name: p.detach().clone() for name, p in pipe.named_parameters()}
    moments = {n: {k: v.clone() for k, v in loop.optimizer.state[p].items()}
               for n, p in pipe.named_parameters()}  # fmt: skip
    state, steps, sent = links_state(pipe), pipe.num_steps, pipe.wire_bytes
    generator, rate = torch.get_rng_state(), loop.scheduler.get_last_lr()
    with pytest.raises(ValueError, match=message) as caught:
        loop.load(folder)
    texts = {text.replace(str(folder), "FOLDER") for text in pipe.collect(str(caught.value))}
    assert len(texts) == 1 or len(set(pipe.collect(str(folder)))) > 1
    for name, p in pipe.named_parameters():
        assert same_bits(p, before[name])
        assert_same_moments(loop.optimizer.state[p], moments[name], name)
    assert_same_state(links_state(pipe), state)
    assert (pipe.num_steps, pipe.wire_bytes) == (steps, sent)
    assert torch.equal(torch.get_rng_state(), generator) and loop.scheduler.get_last_lr() == rate
    loop.run(1, 2)


def test_a_load_that_fails_on_one_rank_changes_nothing_on_any(ranks, tmp_path):
    ranks(failing_loads, 2, str(tmp_path))


def failing_loads(root):
    setting = Setting(["tanh"], **STATEFUL)
    loop = Loop(setting)
    pipe, own = loop.pipe, disk(root, loop.pipe.rank, False)
    loop.run(0, 2)
    loop.save(own / "a")
    part = own / "a" / f"rank-{pipe.rank:05d}-of-00002"

    def damaged(name, change):
        """A copy, changed on rank 1 alone."""
        shutil.copytree(own / "a", own / name)
        if pipe.rank == 1:
            change(own / name / part.name)
        return own / name

    def truncate(name):
        def change(folder):
            content = (folder / name).read_bytes()
            (folder / name).write_bytes(content[: len(content) * 3 // 4])

        return change

    for name in ("weights.safetensors", "state.safetensors", "checkpoint.json"):
        folder = damaged(f"short {name}", truncate(name))
        message = rf"^rank 1: .*rank-00001-of-00002/{name} is (truncated|damaged) or foreign"
        assert_load_fails(loop, folder, message)
        folder = damaged(f"no {name}", lambda part, name=name: (part / name).unlink())
        message = f"^rank 1: .*rank-00001-of-00002 is no complete checkpoint: {name} missing"
        assert_load_fails(loop, folder, message)
    folder = damaged("no part", shutil.rmtree)
    assert_load_fails(loop, folder, "^rank 1: .*no part lacks rank-00001-of-00002: each part lies")
    folder = damaged("nothing", lambda part: shutil.rmtree(part.parent))
    assert_load_fails(loop, folder, "^rank 1: .*nothing is no complete checkpoint: checkpoint.json")
    folder = damaged("foreign", lambda part: (part.parent / "checkpoint.json").write_text("{}"))
    assert_load_fails(loop, folder, "^rank 1: .*checkpoint.json was not written by Pipeline.save")

    loop.save(own / "b")  # one step later, or more
    folder = damaged("another save", lambda part: _replace(part.parent, own / "b"))
    message = r"not of the same save on all ranks: step \d+ on rank 1, step 2 on rank 0"
    assert_load_fails(loop, folder, message)
    folder = damaged("another part", lambda part: _replace(part, own / "b" / part.name))
    assert_load_fails(loop, folder, "^rank 1: .* is not of the same save as the rest of")

    quantized = Loop(Setting(["tanh"], "ef21+quant:4", "ef+topk:0.3"))
    assert_load_fails(quantized, own / "a", r"state of ef21\+topk:0.3 for .*same compressors")
    message = "holds state of links for the cut .*same split"
    assert_load_fails(Loop(Setting(["relu"], **STATEFUL)), own / "a", message)
    assert_load_fails(Loop(Setting(["tanh"], **STATEFUL, optim=adamw)), own / "a", "state of SGD")
    loop.load(own / "a")
    assert pipe.num_steps == 2


def _replace(folder, other):
    shutil.rmtree(folder)
    shutil.copytree(other, folder)


def test_parts_on_other_machines_are_missing_in_one_process(ranks, tmp_path):
    setting = Setting(MLP_SPLIT, **STATEFUL)
    ranks(in_rank_train_and_save, 3, setting, tmp_path / "a", 1)
    for part in ("rank-00000-of-00003", "rank-00002-of-00003"):
        (tmp_path / "a" / part).rename(tmp_path / part)
    message = (
        "a lacks rank-00000-of-00003, rank-00002-of-00003: each part lies where its rank ran. "
        "Copy them into this folder, or start the 3 ranks"
    )
    assert_load_fails(Loop(setting), tmp_path / "a", message)
    for part in ("rank-00000-of-00003", "rank-00002-of-00003"):
        (tmp_path / part).rename(tmp_path / "a" / part)
    Loop(setting).load(tmp_path / "a")
    with pytest.raises(ValueError, match="state of links for the cut .*same split"):
        Loop(Setting(["one"], **STATEFUL)).load(tmp_path / "a")


# -- saves that fail ------------------------------------------------------------------------------


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("shared", [True, False])
def test_a_save_that_fails_on_one_rank_leaves_the_old_checkpoint(ranks, shared, tmp_path):
    ranks(failing_saves, 3, str(tmp_path), shared)


def failing_saves(root, shared):
    loop = Loop(Setting(MLP_SPLIT, **STATEFUL))
    pipe, own = loop.pipe, disk(root, loop.pipe.rank, shared)
    loop.run(0, 1)
    loop.save(own / "a")
    old = contents(own)
    loop.run(1, 2)
    pipe.collect(None)

    def failing(error, after=0):
        written = []

        def fails(tensors, path):
            if pipe.rank == 1 and len(written) == after:
                raise error
            written.append(path)
            save_file(tensors, path)

        return mock.patch.object(files, "save_file", fails)

    move = Replacement.move

    def moves(self, meta=None):
        if pipe.rank == 1 and not shared:
            raise PermissionError("read-only")
        move(self, meta)
        if pipe.rank == 1 and shared:
            raise PermissionError("read-only")

    cases = [
        (failing(OSError("disk full")), OSError, "^rank 1: disk full"),
        (failing(OSError("disk full"), after=1), OSError, "^rank 1: disk full"),
        (failing(torch.OutOfMemoryError("too much")), RuntimeError, "^rank 1: too much"),
        (mock.patch.object(Replacement, "move", moves), OSError, "^rank 1: read-only"),
    ]
    for patch, kind, message in cases:
        with patch, pytest.raises(kind, match=message):
            loop.save(own / "a")
        pipe.collect(None)
        assert contents(own) == old
        assert names_in(own) == ["a"], message
        pipe.collect(None)
    with pytest.raises(TypeError, match="rank 2: .*JSON"):
        loop.save(own / "a", note=object() if pipe.rank == 2 else 1)
    pipe.collect(None)
    assert contents(own) == old and names_in(own) == ["a"]
    pipe.collect(None)

    elsewhere = own / ("mine" if pipe.rank == 1 else "free")
    if pipe.rank == 1:
        elsewhere.mkdir()
        (elsewhere / "notes.txt").write_text("precious")
    with pytest.raises(ValueError, match="rank 1: .*mine exists and is no checkpoint"):
        loop.save(elsewhere)
    pipe.collect(None)
    assert not (own / "free").exists()
    assert pipe.rank != 1 or contents(elsewhere) == {"notes.txt": b"precious"}

    loop.save(own / "a")
    again = Loop(Setting(MLP_SPLIT, **STATEFUL), seed=1)
    again.load(own / "a")
    assert_same_loops(again, loop)


def test_one_ranks_bad_weights_or_head_are_refused_on_all(ranks, tmp_path):
    ranks(refusing, 2, str(tmp_path))


def refusing(root):
    loop = Loop(Setting(["tanh"]))
    pipe, own = loop.pipe, disk(root, loop.pipe.rank, False)
    loop.run(0, 1)
    loop.save(own / "a")
    old = contents(own)
    if pipe.rank == 0:
        with torch.no_grad():
            next(iter(pipe.parameters())).view(-1)[0] = float("nan")
    with pytest.raises(FloatingPointError, match="^rank 0: .* is not finite after step 1, so .*a"):
        loop.save(own / "a")
    assert contents(own) == old
    if pipe.rank == 1:
        (own / "a" / "checkpoint.json").unlink()
    pipe.collect(None)
    with (
        mpcomp.Checkpoints(pipe, own / "b"),
        mpcomp.Checkpoints(pipe, own / "a") as checkpoints,
        pytest.raises(ValueError, match=r"^rank 1: .*a lacks checkpoint.json beside rank-00001-of"),
    ):
        checkpoints.restore()


def test_a_checkpoint_of_one_process_is_replaced_by_one_of_several(ranks, tmp_path):
    setting = Setting(["tanh"])
    train_and_save(setting, tmp_path / "a", 1)
    ranks(in_rank_train_and_save, 2, setting, tmp_path / "a", 2)
    assert Loop(setting).load(tmp_path / "a") == {"note": "x"}
    assert names_in(tmp_path) == ["a"]
    train_and_save(setting, tmp_path / "a", 1)
    assert len(list((tmp_path / "a").iterdir())) == 3


@pytest.mark.parametrize("shared", [True, False])
def test_a_rank_that_dies_while_saving_leaves_the_old_checkpoint(ranks, shared, tmp_path):
    results = ranks(dying, 2, str(tmp_path), shared, may_fail=True)
    assert results[1] == ("died", "3") and results[0] == "old"
    for rank in range(2):
        own = disk(tmp_path, rank, shared)
        metas = [json.loads(p.read_text()) for p in (own / "a").glob("**/checkpoint.json")]
        assert metas and all(meta["num_steps"] == 1 for meta in metas)
        beside = [path.name for path in own.iterdir() if path.name.startswith(".a-")]
        assert not beside or (rank == 1 and not shared)
    again = ranks(steps_loaded, 2, str(tmp_path), shared)
    assert again == [1, 1]


def dying(root, shared):
    loop = Loop(Setting(["tanh"], timeout=5.0))
    own = disk(root, loop.pipe.rank, shared)
    loop.run(0, 1)
    loop.save(own / "a")
    loop.run(1, 2)

    def dies(tensors, path):
        if loop.pipe.rank == 1:
            os._exit(3)
        save_file(tensors, path)

    with mock.patch.object(files, "save_file", dies), pytest.raises(PeerError):
        loop.save(own / "a")
    return "old" if contents(own / "a") else ""


@pytest.mark.parametrize("moved", [slow(False), True])
def test_a_machine_that_dies_while_moving_leaves_one_whole_checkpoint(ranks, moved, tmp_path):
    """Nobody can tell then whether it has moved its part: the others keep both.

    All go on from the newest that is whole on all disks, which gets its name back.
    """
    results = ranks(dying_while_moving, 2, str(tmp_path), moved, may_fail=True)
    assert results == ["both", ("died", "3")]
    expected = 2 if moved else 1
    assert ranks(steps_loaded, 2, str(tmp_path), False) == [expected, expected]
    if not moved:  # and if there is none, that is an error
        for path in (tmp_path / "disk1").iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for kind, text in ranks(steps_loaded, 2, str(tmp_path), False, may_fail=True):
            assert kind == "ValueError" and "rank 1: " in text and "no complete checkpoint" in text


def dying_while_moving(root, moved):
    loop = Loop(Setting(["tanh"], timeout=5.0))
    own = disk(root, loop.pipe.rank, False)
    loop.run(0, 1)
    loop.save(own / "a")
    loop.run(1, 2)
    move = Replacement.move

    def moves(self, meta=None):
        if loop.pipe.rank == 0 or moved:
            move(self, meta)
        if loop.pipe.rank == 1:
            os._exit(3)

    with mock.patch.object(Replacement, "move", moves), pytest.raises(PeerError):
        loop.save(own / "a")
    assert [p.name for p in own.glob(".a-*/*") if p.is_dir()] == ["old"]
    return "both"


def steps_loaded(root, shared):
    loop = Loop(Setting(["tanh"]))
    loop.load(disk(root, loop.pipe.rank, shared) / "a")
    return loop.pipe.num_steps
