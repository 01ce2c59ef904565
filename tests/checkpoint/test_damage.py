"""Damage of every kind: a checkpoint loads as it was written, or is refused and changes nothing."""

import copy
import json
import random
import shutil

import pytest
import torch
import torch.nn.functional as F
from methods import same_bits
from models import MLP_SPLIT, assert_same_state, links_state, mlp, rows

import mpcomp
from mpcomp.checkpoint import files

pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")
ADAPTIVE = mpcomp.Adaptive(
    mpcomp.TopK(0.1), cf=(2, 20), eps=0.5, window=2, bandwidth_mbps=1.0, compute_ms=0.5
)
VALUES = [
    None,
    True,
    -1,
    3,
    10**18,
    10**40,
    1e308,
    float("nan"),
    "x",
    "../../x",
    [],
    [7],
    {},
    {"a": 1},
]


class Run:
    """A pipeline with all that a checkpoint restores, some steps on."""

    def __init__(self, steps, seed=0):
        torch.manual_seed(seed)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        self.pipe = mpcomp.pipeline(
            mlp(), 2, split=MLP_SPLIT, loss_fn=F.cross_entropy, scaler=self.scaler,
            act_comp=["ef21+topk:0.3", ADAPTIVE], grad_comp=["aqsgd+quant:4", None],
        )  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.pipe.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4])
        for step in range(steps):
            x, y = rows(6, step)
            self.pipe.forward_backward(x, y, sample_ids=range(6))
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.scheduler.step()

    def save(self, folder):
        self.pipe.save(folder, optimizer=self.optimizer, scheduler=self.scheduler, extra={"a": 1})

    def load(self, folder):
        return self.pipe.load(folder, optimizer=self.optimizer, scheduler=self.scheduler)

    def state(self):
        """All of it, to be compared; nothing refers to the run."""
        pipe = self.pipe
        meters = [t.to_state() for link in pipe.links for t in link.meter.phases.values()]
        plain = [pipe.num_steps, pipe.wire_bytes, self.scheduler.state_dict(), meters]
        plain.append(self.scaler.state_dict())
        plain.append(self.optimizer.state_dict()["param_groups"])
        moments = {
            f"{i} {name}": value
            for i, entry in self.optimizer.state_dict()["state"].items()
            for name, value in entry.items()
        }
        tensors = {**pipe.state_dict(), **moments, "generator": torch.get_rng_state()}
        return copy.deepcopy((plain, tensors, links_state(pipe)))


def assert_same(state, expected):
    assert repr(state[0]) == repr(expected[0])
    assert state[1].keys() == expected[1].keys()
    assert all(same_bits(value, expected[1][name]) for name, value in state[1].items())
    assert_same_state(state[2], expected[2])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "a"
    run = Run(3)
    run.save(folder)
    return folder, run.state()


# -- the damage -----------------------------------------------------------------------------------


def places(value, path=()):
    """Paths of all values in JSON but the outermost."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(
        value, list) else ()  # fmt: skip
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def change_json(folder, draw):
    """One value becomes another, or goes; nothing says that it is not what was written."""
    meta = json.loads((folder / files.META).read_text())
    del meta["checksum"]
    # Every entry as often, whether it holds one number or hundreds.
    entry = draw.choice(sorted(meta))
    *way, last = draw.choice([place for place in places(meta) if place[0] == entry])
    inner = meta
    for key in way:
        inner = inner[key]
    if draw.random() < 0.2:
        del inner[last]
    else:
        inner[last] = draw.choice(VALUES)
    files.write_meta(folder, meta)  # with the checksum that it now has


def flip_bit(folder, draw, name=None, header=False):
    path = folder / (name or draw.choice([files.META, files.WEIGHTS, files.STATE]))
    content = bytearray(path.read_bytes())
    size = 8 + int.from_bytes(content[:8], "little") if header else len(content)
    content[draw.randrange(size)] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def flip_bit_of_header(folder, draw):
    """In what safetensors says of its tensors."""
    flip_bit(folder, draw, draw.choice([files.WEIGHTS, files.STATE]), header=True)


def cut_short(folder, draw):
    path = folder / draw.choice([files.META, files.WEIGHTS, files.STATE])
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def swap(folder, draw):
    one, other = folder / files.WEIGHTS, folder / files.STATE
    one.rename(folder / "x")
    other.rename(one)
    (folder / "x").rename(other)


DAMAGE = [change_json, flip_bit, flip_bit_of_header, cut_short, swap]
#: Found by its checksum, or of no effect on what is read.
FOUND = {flip_bit, flip_bit_of_header, cut_short, swap}


def assert_whole_or_refused(saved, tmp_path, seeds, kinds=DAMAGE):
    whole, expected = saved
    run = Run(1, seed=5)
    before = run.state()
    refused = 0
    for seed in seeds:
        draw = random.Random(seed)
        damage = kinds[seed % len(kinds)]
        folder = tmp_path / "damaged"
        shutil.copytree(whole, folder)
        damage(folder, draw)
        try:
            run.load(folder)
        except (ValueError, OSError) as error:
            refused += 1
            assert str(folder) in str(error), (seed, error)
            assert_same(run.state(), before)
        else:
            if damage in FOUND:
                assert_same(run.state(), expected)
            run = Run(1, seed=5)
            before = run.state()
        shutil.rmtree(folder)
    return refused


def test_damaged_checkpoints_load_whole_or_are_refused(saved, tmp_path):
    assert assert_whole_or_refused(saved, tmp_path, range(40)) > 20


@pytest.mark.slow
def test_more_damaged_checkpoints(saved, tmp_path):
    assert assert_whole_or_refused(saved, tmp_path, range(100, 500)) > 200
    assert assert_whole_or_refused(saved, tmp_path, range(400), [change_json]) > 100


def test_a_whole_one_loads(saved, tmp_path):
    """Also the milestones of a schedule, whose names are numbers, which JSON does not know."""
    whole, expected = saved
    run = Run(1, seed=5)
    assert run.load(whole) == {"a": 1}
    assert_same(run.state(), expected)
    other = Run(3)
    for each in (run, other):
        for _ in range(2):
            each.optimizer.step()
            each.scheduler.step()
    assert run.scheduler.get_last_lr() == other.scheduler.get_last_lr() == [pytest.approx(1e-4)]


@pytest.mark.parametrize(
    "path, value",
    [
        (("links", "link.0.act", "sample", "shape"), [1, 10**15]),
        (("links", "link.0.act", "sample", "shape"), [10**9] * 9),
        (("cut", "chunks"), 10**12),
        (("num_steps",), 2**70),
    ],
)
def test_sizes_are_those_of_the_files(saved, tmp_path, path, value):
    """Nothing is made as large as a number says before that is checked."""
    whole, _ = saved
    folder = tmp_path / "a"
    shutil.copytree(whole, folder)
    meta = json.loads((folder / files.META).read_text())
    inner = meta
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    del meta["checksum"]
    files.write_meta(folder, meta)
    run = Run(1, seed=5)
    before = run.state()
    with pytest.raises(ValueError, match=f"^{folder}.*(damaged|same split|stored rows are)"):
        run.load(folder)
    assert_same(run.state(), before)


def test_as_many_replicas_as_there_are_files(tmp_path):
    """A few bytes that speak of more parts than any disk holds."""
    cut = {"chunks": 2, "stages": [["a"], ["b"]]}
    meta = {"token": "x", "num_steps": 1, "cut": cut, "placement": [[0], [1]], "links": {}}
    meta |= {"num_replicas": 2**50, "replicas": None}
    (tmp_path / "a").mkdir()
    files.write_meta(tmp_path / "a", meta)
    run = Run(1)
    with pytest.raises(ValueError, match="a lacks rank-0000"):
        run.load(tmp_path / "a")
    meta["placement"] = [[0], [0, 1]]
    files.write_meta(tmp_path / "a", meta)
    with pytest.raises(ValueError, match="its placement is not that of its stages"):
        run.load(tmp_path / "a")


def test_what_fails_while_it_is_put_in_place_is_taken_back(saved, monkeypatch):
    """Of whatever kind: what others have been given by then has been remembered."""
    whole, _ = saved
    run = Run(1, seed=5)
    before = run.state()

    def fails(state):
        raise RuntimeError("only here")

    monkeypatch.setattr(run.pipe.links[-1].meter.eval, "load_state", fails)
    with pytest.raises(ValueError, match="only here"):
        run.load(whole)
    monkeypatch.undo()
    assert_same(run.state(), before)
