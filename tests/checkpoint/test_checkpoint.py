"""Law 7: save, load, go on = never stopped, bit for bit; and a load that fails changes nothing."""

import json
import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from everyday import slow
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
    num_stored_rows,
    rows,
    sgd,
)
from safetensors.torch import load_file

import mpcomp
from mpcomp.checkpoint.files import write_meta

pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")
FILES = ["weights.safetensors", "state.safetensors", "checkpoint.json"]


def pipe_of(model=None, seed=0, chunks=2, **kwargs):
    torch.manual_seed(seed)
    kwargs.setdefault("loss_fn", F.cross_entropy)
    kwargs.setdefault("split", MLP_SPLIT)
    return mpcomp.pipeline(mlp() if model is None else model, chunks, **kwargs)


def conv_of(seed=0, **kwargs):
    torch.manual_seed(seed)
    return pipe_of(convnet(), seed, split=CONV_SPLIT, **kwargs)


def run(pipe, optimizer, first, last, batch=rows, scheduler=None, scaler=None):
    """Steps of an ordinary loop; a random number of torch's stands for augmentation."""
    losses = []
    for step in range(first, last):
        x, y = batch(6, step)
        x = x + 0.01 * torch.randn_like(x)
        losses.append(pipe.forward_backward(x, y, sample_ids=[(step + i) % 9 for i in range(6)]))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    return torch.stack(losses)


def assert_same_optimizers(a, b):
    one, two = a.state_dict(), b.state_dict()
    assert one["state"].keys() == two["state"].keys()
    for key, entry in one["state"].items():
        assert entry.keys() == two["state"][key].keys()
        for name, value in entry.items():
            other = two["state"][key][name]
            same = same_bits(value, other) if isinstance(value, torch.Tensor) else value == other
            assert same, (key, name)
    for group, other in zip(one["param_groups"], two["param_groups"], strict=True):
        assert {k: _plain(v) for k, v in group.items()} == {k: _plain(v) for k, v in other.items()}


def _plain(value):
    return list(value) if isinstance(value, tuple) else value


METHODS = [
    *(
        (method, beside(method, None if isinstance(method, mpcomp.AQSGD) else method))
        for method in FEEDBACK
    ),
    ("randomk:0.3", "quant:4:rounding=stochastic"),
    ("ef21+topk:0.3", "same"),
    (["aqsgd+quant:4", None], ["ef+topk:0.2", "ef21+topk:0.2"]),
]
#: With the optimizers in turn, which have no part in what links remember.
CASES = [(*methods, (sgd, adamw)[i % 2]) for i, methods in enumerate(METHODS)]
#: Of each class the first.
FIRST = {type(act): act for act in reversed(FEEDBACK)}.values()


@pytest.mark.parametrize(
    "act, grad, optim",
    [slow(*case) if case[0] in FEEDBACK and case[0] not in FIRST else case for case in CASES],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_going_on_is_as_if_never_stopped(act, grad, optim, tmp_path):
    """Losses, weights, buffers, optimizer, links' states, bytes, with dropout and BatchNorm."""
    straight = conv_of(act_comp=act, grad_comp=grad)
    optimizer = optim(straight)
    torch.manual_seed(5)
    run(straight, optimizer, 0, 3, images)
    straight.evaluate([images(4)])
    straight.save(tmp_path / "run" / "last", optimizer=optimizer, extra={"epoch": 1})
    expected = run(straight, optimizer, 3, 6, images)

    resumed = conv_of(seed=99, act_comp=act, grad_comp=grad)  # other weights, other generator
    other = optim(resumed)
    run(resumed, other, 0, 1, images)
    extra = resumed.load(tmp_path / "run" / "last", optimizer=other)
    assert extra == {"epoch": 1} and resumed.num_steps == 3
    resumed.zero_grad()
    assert torch.equal(run(resumed, other, 3, 6, images), expected)
    assert_same_training(resumed, straight)
    assert_same_state(links_state(resumed), links_state(straight))
    assert_same_optimizers(other, optimizer)
    for link, twin in zip(resumed.links, straight.links, strict=True):
        for phase in (True, False):
            mine, theirs = link.meter.of(phase).to_dict(), twin.meter.of(phase).to_dict()
            for name in mine.keys() - {"seconds"}:
                same = mine[name] == theirs[name]
                assert same or (math.isnan(mine[name]) and math.isnan(theirs[name])), name
    assert names_in(tmp_path / "run") == ["last"]
    assert straight.wire_bytes < 1.1 * straight.dense_bytes


def test_scheduler_scaler_and_global_generator_go_on_too(tmp_path):
    def parts(seed):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
        pipe = pipe_of(seed=seed, act_comp="ef21+topk:0.3", grad_comp="ef+topk:0.3", scaler=scaler)
        optimizer = sgd(pipe)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)
        return pipe, optimizer, scheduler, scaler

    def train(parts, first, last):
        pipe, optimizer, scheduler, scaler = parts
        return run(pipe, optimizer, first, last, scheduler=scheduler, scaler=scaler)

    one = parts(0)
    train(one, 0, 3)
    one[0].save(tmp_path / "a", optimizer=one[1], scheduler=one[2])
    expected = train(one, 3, 6)
    drawn = torch.rand(3)
    two = parts(1)
    train(two, 0, 1)
    two[0].load(tmp_path / "a", optimizer=two[1], scheduler=two[2])
    assert torch.equal(train(two, 3, 6), expected)
    assert torch.equal(torch.rand(3), drawn)
    assert one[3].state_dict() == two[3].state_dict() and one[3].get_scale() != 2.0**16
    assert one[2].get_last_lr() == two[2].get_last_lr()
    assert_same_training(two[0], one[0])
    assert_same_optimizers(two[1], one[1])


def test_lr_scaled_residuals_go_on(tmp_path):
    """They are kept in units of η g, with the rate that the optimizer has when going on."""

    def parts():
        pipe = pipe_of(grad_comp="ef:lr_scaled=true+topk:0.3")
        optimizer = sgd(pipe)
        pipe.follow(optimizer)
        return pipe, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.3)

    one = parts()
    run(one[0], one[1], 0, 3, scheduler=one[2])
    one[0].save(tmp_path / "a", optimizer=one[1], scheduler=one[2])
    expected = run(one[0], one[1], 3, 6, scheduler=one[2])
    two = parts()
    two[0].load(tmp_path / "a", optimizer=two[1], scheduler=two[2])
    assert torch.equal(run(two[0], two[1], 3, 6, scheduler=two[2]), expected)


def test_mapped_states_go_into_memory_and_back(tmp_path):
    """Where state is kept is no part of what it is; but methods must be equal to be loaded."""
    spec = f"aqsgd:location={tmp_path / 'slots'}+quant:4"
    pipe = pipe_of(act_comp=spec)
    run(pipe, sgd(pipe), 0, 2)
    pipe.save(tmp_path / "a")
    again = pipe_of(seed=1, act_comp=spec)
    again.load(tmp_path / "a")
    assert_same_state(links_state(again), links_state(pipe))
    assert num_stored_rows(again) == 2 * 2 * 7


def test_weights_load_in_the_plain_model(tmp_path):
    pipe = conv_of(act_comp="topk:0.3")
    run(pipe, sgd(pipe), 0, 2, images)
    pipe.save(tmp_path / "a")
    plain = convnet()
    plain.load_state_dict(load_file(tmp_path / "a" / "weights.safetensors"))
    for name, value in pipe.merge().state_dict().items():
        assert same_bits(plain.state_dict()[name], value)


def test_a_checkpoint_needs_no_unpickling(tmp_path):
    """Three files: two of safetensors, one of JSON."""
    pipe = pipe_of(act_comp="ef21+topk:0.3")
    optimizer = adamw(pipe)
    run(pipe, optimizer, 0, 1)
    pipe.save(tmp_path / "a", optimizer=optimizer, extra={"note": "x", "accuracy": [0.5, None]})
    assert names_in(tmp_path / "a") == sorted(FILES)
    meta = json.loads((tmp_path / "a" / "checkpoint.json").read_text())
    assert meta["num_steps"] == 1 and meta["optimizer"]["class"] == "AdamW"
    tensors = load_file(tmp_path / "a" / "state.safetensors")
    assert "link.0.act.sender.rows0" in tensors
    assert "optimizer.exp_avg.one.weight" in tensors


def test_module_style_is_settled_before_saving(tmp_path):
    """What an open step has learnt is stored, not lost."""
    one, two = (pipe_of(chunks=1, act_comp="ef21+topk:0.3") for _ in range(2))
    x, y = rows(6)
    F.cross_entropy(one(x), y).backward()
    two.forward_backward(x, y)
    one.save(tmp_path / "a")
    assert one.num_steps == 1
    assert_same_state(links_state(one), links_state(two))
    three = pipe_of(chunks=1, act_comp="ef21+topk:0.3")
    three.load(tmp_path / "a")
    assert_same_state(links_state(three), links_state(one))


def test_saving_again_replaces_the_checkpoint(tmp_path):
    pipe = pipe_of(act_comp="ef21+topk:0.3")
    for epoch in range(3):
        pipe.forward_backward(*rows(6, epoch))
        pipe.save(tmp_path / "a", extra={"epoch": epoch})
    assert names_in(tmp_path) == ["a"]
    assert pipe_of(act_comp="ef21+topk:0.3").load(tmp_path / "a") == {"epoch": 2}


def test_a_folder_behind_a_link_is_replaced_where_it_is(tmp_path):
    pipe = pipe_of()
    pipe.save(tmp_path / "disk" / "a")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "a")
    pipe.save(tmp_path / "link", extra={"epoch": 1})
    assert (tmp_path / "link").is_symlink() and pipe.load(tmp_path / "disk" / "a") == {"epoch": 1}
    assert names_in(tmp_path / "disk") == ["a"]


def test_nothing_of_a_loaded_checkpoint_stays_in_its_files(tmp_path):
    """safetensors maps files into memory: what happens to a file would happen to the tensors."""
    pipe = pipe_of(act_comp="ef21+topk:0.3")
    optimizer = adamw(pipe)
    run(pipe, optimizer, 0, 2)
    pipe.save(tmp_path / "a", optimizer=optimizer)
    with torch.device("meta"):
        model = mlp()
    again = pipe_of(model, act_comp="ef21+topk:0.3", weights=tmp_path / "a")
    other = adamw(again)
    again.load(tmp_path / "a", optimizer=other)
    for name in FILES[:2]:
        (tmp_path / "a" / name).write_bytes(b"\xff" * (tmp_path / "a" / name).stat().st_size)
    again.zero_grad()
    generator = torch.get_rng_state()
    expected = run(pipe, optimizer, 2, 4)
    torch.set_rng_state(generator)
    assert torch.equal(run(again, other, 2, 4), expected)
    assert_same_optimizers(other, optimizer)
    assert_same_state(links_state(again), links_state(pipe))


def test_weights_and_optimizer_go_to_another_cut_where_links_remember_nothing(tmp_path):
    pipe = pipe_of(act_comp="topk:0.3")
    optimizer = adamw(pipe)
    run(pipe, optimizer, 0, 2)
    pipe.save(tmp_path / "a", optimizer=optimizer)
    other = pipe_of(seed=1, split=["one"], chunks=3, act_comp="quant:4")
    theirs = adamw(other)
    other.load(tmp_path / "a", optimizer=theirs)
    assert_same_optimizers(theirs, optimizer)
    for (name, p), (_, q) in zip(other.named_parameters(), pipe.named_parameters(), strict=True):
        assert same_bits(p, q), name
    assert other.num_steps == 2


# -- what cannot be saved or loaded ---------------------------------------------------------------


@pytest.mark.parametrize("foreign", ["notes.txt", "checkpoint.json"])
def test_saving_refuses_a_foreign_folder(foreign, tmp_path):
    """Somebody's files are not deleted, even if one has our name."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / foreign).write_text("precious")
    with pytest.raises(ValueError, match=r"mine(/checkpoint.json)? .* choose another folder"):
        pipe_of().save(folder)
    assert (folder / foreign).read_text() == "precious"
    assert names_in(tmp_path) == ["mine"]


def test_an_empty_folder_is_taken(tmp_path):
    pipe_of().save(tmp_path / "new" / "er")
    (tmp_path / "empty").mkdir()
    pipe_of().save(tmp_path / "empty")
    assert len(list((tmp_path / "empty").iterdir())) == 3


def test_what_json_cannot_hold_is_refused_and_nothing_is_left(tmp_path):
    pipe = pipe_of()
    pipe.save(tmp_path / "a", extra={"epoch": 1})
    with pytest.raises(TypeError, match="JSON"):
        pipe.save(tmp_path / "a", extra={"epoch": object()})
    assert names_in(tmp_path) == ["a"]
    assert pipe.load(tmp_path / "a") == {"epoch": 1}


@pytest.fixture
def saved(tmp_path):
    """A checkpoint with everything in it."""
    pipe = pipe_of(act_comp="ef21+topk:0.3", grad_comp="ef+topk:0.3")
    optimizer = sgd(pipe)
    run(pipe, optimizer, 0, 2)
    pipe.save(tmp_path / "a", optimizer=optimizer)
    return tmp_path / "a"


def without(saved, *names):
    """Takes entries out of ``checkpoint.json``."""
    meta = json.loads((saved / "checkpoint.json").read_text())
    for name in names:
        del meta[name]
    (saved / "checkpoint.json").write_text(json.dumps(meta))


def assert_load_fails_and_changes_nothing(pipe, folder, message, optimizer=None, scheduler=None):
    pipe.forward_backward(*rows(6), sample_ids=range(6))
    if optimizer is not None:
        optimizer.step()
    weights = [p.detach().clone() for p in pipe.parameters()]
    state, steps, generator = links_state(pipe), pipe.num_steps, torch.get_rng_state()
    moments = {} if optimizer is None else {
        (i, key): value.clone()
        for i, entry in optimizer.state_dict()["state"].items()
        for key, value in entry.items()
        if isinstance(value, torch.Tensor)
    }  # fmt: skip
    bytes_before = pipe.wire_bytes
    with pytest.raises(ValueError, match=message) as caught:
        pipe.load(folder, optimizer=optimizer, scheduler=scheduler)
    assert str(folder) in str(caught.value)
    assert all(same_bits(p, w) for p, w in zip(pipe.parameters(), weights, strict=True))
    assert_same_state(links_state(pipe), state)
    assert pipe.num_steps == steps and torch.equal(torch.get_rng_state(), generator)
    assert pipe.wire_bytes == bytes_before
    for (i, key), value in moments.items():
        assert torch.equal(optimizer.state_dict()["state"][i][key], value)


def same_pipe():
    return pipe_of(seed=3, act_comp="ef21+topk:0.3", grad_comp="ef+topk:0.3")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(saved, name):
    (saved / name).unlink()
    message = f"no complete checkpoint: {name} missing; expected a folder that Pipeline.save"
    assert_load_fails_and_changes_nothing(same_pipe(), saved, message)


@pytest.mark.parametrize("keep", [0, 0.5, 0.99])
@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file(saved, name, keep):
    content = (saved / name).read_bytes()
    (saved / name).write_bytes(content[: int(len(content) * keep)])
    message = f"{name} is (truncated|damaged) or foreign"
    assert_load_fails_and_changes_nothing(same_pipe(), saved, message)


@pytest.mark.parametrize("name", FILES)
def test_a_foreign_file(saved, name):
    (saved / name).write_bytes(b"\x80\x04\x95 pickle or whatever else \xff")
    assert_load_fails_and_changes_nothing(same_pipe(), saved, f"{name} is .*foreign")


def test_a_folder_that_is_not_there_or_another_programs(tmp_path, saved):
    assert_load_fails_and_changes_nothing(same_pipe(), tmp_path / "no", "no complete checkpoint")
    (saved / "checkpoint.json").write_text('{"epoch": 3}')
    assert_load_fails_and_changes_nothing(same_pipe(), saved, "not written by Pipeline.save")
    (saved / "checkpoint.json").write_text("[1, 2]")
    assert_load_fails_and_changes_nothing(same_pipe(), saved, "not written by Pipeline.save")


def test_a_lost_entry(saved):
    without(saved, "links")
    message = r"is damaged: it is not what was written \(its checksum differs\)"
    assert_load_fails_and_changes_nothing(same_pipe(), saved, message)
    without(saved, "checksum")
    assert_load_fails_and_changes_nothing(same_pipe(), saved, message)
    write_meta(saved, json.loads((saved / "checkpoint.json").read_text()))  # as if it was meant
    assert_load_fails_and_changes_nothing(same_pipe(), saved, "is damaged: it lacks links")


def test_another_version(saved):
    meta = json.loads((saved / "checkpoint.json").read_text())
    meta["version"] = 99
    (saved / "checkpoint.json").write_text(json.dumps(meta))
    assert_load_fails_and_changes_nothing(same_pipe(), saved, "checkpoint version 99; this mpcomp")


def test_another_model(saved):
    other = torch.nn.Sequential(*list(mlp())[:4], torch.nn.Linear(17, 5))
    pipe = pipe_of(other, split=[2, 2, 1])
    assert_load_fails_and_changes_nothing(pipe, saved, "of another model: it lacks 0.bias")
    wider = mlp()
    wider.three = torch.nn.Linear(17, 6)
    assert_load_fails_and_changes_nothing(
        pipe_of(wider), saved, "another model: it differs in shape in three.bias, three.weight"
    )


def test_other_methods(saved):
    pipe = pipe_of(act_comp="ef21+topk:0.5", grad_comp="ef+topk:0.3")
    message = r"state of ef21\+topk:0.3 for link.0.act.*has ef21\+topk:0.5.*same compressors"
    assert_load_fails_and_changes_nothing(pipe, saved, message)


@pytest.mark.parametrize("change", [{"split": ["two"]}, {"chunks": 3}])
def test_another_cut(saved, change):
    pipe = pipe_of(act_comp="ef21+topk:0.3", grad_comp="ef+topk:0.3", **change)
    assert_load_fails_and_changes_nothing(
        pipe, saved, "holds state of links for the cut .*same split"
    )


def test_another_optimizer(saved):
    pipe = same_pipe()
    message = "holds the state of SGD, not of AdamW"
    assert_load_fails_and_changes_nothing(pipe, saved, message, adamw(pipe))
    pipe = same_pipe()
    groups = [{"params": [p]} for p in pipe.parameters()]
    message = "parameter groups are not those it was saved with"
    optimizer = torch.optim.SGD(groups, lr=0.1)
    assert_load_fails_and_changes_nothing(pipe, saved, message, optimizer)


def test_what_was_not_saved_cannot_be_loaded(tmp_path):
    pipe = pipe_of()
    pipe.save(tmp_path / "a")
    optimizer = sgd(pipe)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    message = "holds no optimizer: it was saved without one"
    assert_load_fails_and_changes_nothing(pipe, tmp_path / "a", message, optimizer)
    pipe.save(tmp_path / "b", optimizer=optimizer)
    assert_load_fails_and_changes_nothing(
        pipe, tmp_path / "b", "holds no scheduler", optimizer, scheduler
    )


def test_a_failed_load_leaves_an_open_step_open(saved):
    """Module style: what the step has noted is still stored at the next training call."""
    one, two = same_pipe(), same_pipe()
    x, y = rows(6)
    for pipe in (one, two):
        F.cross_entropy(pipe(x), y).backward()
    with pytest.raises(ValueError, match="no complete checkpoint"):
        one.load(saved / "nothing here")
    for pipe in (one, two):
        pipe.forward_backward(*rows(6, 1))
    assert one.num_steps == two.num_steps == 2
    assert_same_state(links_state(one), links_state(two))


def test_a_load_ends_an_open_step(saved):
    """What was noted before the load belongs to weights that are gone."""
    one, two = same_pipe(), same_pipe()
    F.cross_entropy(one(rows(6)[0]), rows(6)[1]).backward()
    for pipe in (one, two):
        pipe.load(saved)
        pipe.zero_grad()
        pipe.forward_backward(*rows(6, 1))
    assert one.num_steps == two.num_steps == 3
    assert_same_state(links_state(one), links_state(two))
    assert_same_training(one, two)


def test_a_copied_checkpoint_is_a_checkpoint(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    pipe = same_pipe()
    pipe.load(tmp_path / "copy")
    assert pipe.num_steps == 2
