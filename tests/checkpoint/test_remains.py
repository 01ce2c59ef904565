"""A checkpoint that is damaged, or has a user's files in it, is neither forgotten nor deleted."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from models import names_in, rows

import mpcomp
from mpcomp.checkpoint import files
from mpcomp.checkpoint.links import sum_of_links


def model_of():
    return torch.nn.Sequential(torch.nn.Linear(13, 7), torch.nn.Tanh(), torch.nn.Linear(7, 5))


def pipe_of(seed=0):
    torch.manual_seed(seed)
    return mpcomp.pipeline(model_of(), 2, split=2, loss_fn=F.cross_entropy)


def trained(steps, seed=0):
    pipe = pipe_of(seed)
    for step in range(steps):
        pipe.forward_backward(*rows(4, step))
    return pipe


def of_several(folder):
    """Makes a checkpoint of one process that of several ranks, which has one part."""
    part = folder / files.part_name(0, 1)
    part.mkdir()
    for name in (files.META, files.WEIGHTS, files.STATE):
        (folder / name).rename(part / name)
    meta = json.loads((part / files.META).read_text())
    common = {name: meta[name] for name in ("token", "num_steps", "cut")}
    whole = {"placement": [[0, 1]], "num_replicas": 1, "replicas": None}
    files.write_meta(folder, common | whole | {"links": sum_of_links([meta["links"]])})


@pytest.fixture(params=["one process", "several"])
def saved(request, tmp_path):
    trained(2).save(tmp_path / "a", extra={"step": 2})
    if request.param == "several":
        of_several(tmp_path / "a")
    return tmp_path / "a"


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def of_another_version(path):
    meta = json.loads(path.read_text())
    path.write_text(json.dumps({**meta, "version": 99}))


DAMAGES = {
    "zeros": lambda path: path.write_bytes(b"\0" * path.stat().st_size),
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "bit": flip,
    "version": of_another_version,
    "list": lambda path: path.write_text("[]"),
    "missing": lambda path: path.unlink(),
}


def test_an_undamaged_one_is_restored(saved):
    with mpcomp.Checkpoints(pipe_of(1), saved) as checkpoints:
        assert checkpoints.restore() == {"step": 2}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_head_is_refused_and_nothing_changes(saved, damage):
    DAMAGES[damage](saved / files.META)
    before = contents(saved)
    pipe = pipe_of(1)
    weights = {name: value.clone() for name, value in pipe.state_dict().items()}
    with (
        mpcomp.Checkpoints(pipe, saved) as checkpoints,
        pytest.raises(ValueError, match=r"checkpoint\.json|checkpoint version 99"),
    ):
        checkpoints.restore()
    assert contents(saved) == before
    assert all(torch.equal(value, weights[name]) for name, value in pipe.state_dict().items())


@pytest.mark.parametrize("damage", DAMAGES)
def test_whole_parts_below_a_damaged_head_are_not_replaced(damage, tmp_path):
    trained(2).save(tmp_path / "a")
    of_several(tmp_path / "a")
    DAMAGES[damage](tmp_path / "a" / files.META)
    before = contents(tmp_path / "a")
    with pytest.raises(ValueError, match="move .*a away, or choose another folder"):
        trained(1).save(tmp_path / "a")
    assert contents(tmp_path / "a") == before


@pytest.mark.parametrize("lost", [files.META, files.WEIGHTS, files.STATE])
def test_files_that_are_missing_are_named(lost, tmp_path):
    trained(2).save(tmp_path / "a")
    (tmp_path / "a" / lost).unlink()
    with (
        mpcomp.Checkpoints(pipe_of(1), tmp_path / "a") as checkpoints,
        pytest.raises(ValueError, match=f"a is no complete checkpoint: {lost} missing"),
    ):
        checkpoints.restore()


def test_weights_of_a_checkpoint_are_checked(saved):
    def read():
        with torch.device("meta"):
            model = model_of()
        return mpcomp.pipeline(model, 2, split=2, loss_fn=F.cross_entropy, weights=saved)

    expected = trained(2).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in read().state_dict().items())
    path = next(saved.rglob(files.WEIGHTS))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="weights.safetensors is damaged: .* is not what was wr"):
        read()


# -- a user's own files ---------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [None, 1, 3])
def test_a_users_files_stay_in_the_folder(saved, keep):
    (saved / "tokenizer.json").write_text("{}")
    (saved / "export").mkdir()
    (saved / "export" / "weights.safetensors").write_text("mine")
    (saved / "link").symlink_to("tokenizer.json")
    pipe = trained(3)
    for _ in range(3):
        pipe.save(saved, keep=keep)
        pipe.forward_backward(*rows(4))
        assert (saved / "tokenizer.json").read_text() == "{}"
        assert (saved / "export" / "weights.safetensors").read_text() == "mine"
        assert (saved / "link").is_symlink()
    assert pipe_of(1).load(saved) == {}
    left = ["a"] if keep != 3 else ["a", "a-step-00000003", "a-step-00000004"]
    assert [name for name in names_in(saved.parent) if name != "a-step-00000002"] == left


def test_files_in_a_former_checkpoint_outlive_it(tmp_path):
    pipe = pipe_of()
    for step in range(4):
        pipe.forward_backward(*rows(4, step))
        pipe.save(tmp_path / "a", keep=2)
        if step == 1:
            (tmp_path / "a-step-00000001" / "notes.txt").write_text("best")
    assert contents(tmp_path / "a-step-00000001") == {
        tmp_path / "a-step-00000001" / "notes.txt": b"best"
    }
    assert names_in(tmp_path) == ["a", "a-step-00000001", "a-step-00000003"]


def test_the_working_directory_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pipe = pipe_of()
    for folder in (".", tmp_path, "x/.."):
        (tmp_path / "x").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match="is the working directory: name a folder in it"):
            pipe.save(folder)
    pipe.save("a")
    monkeypatch.chdir(tmp_path / "a")
    pipe.save(tmp_path / "b")
    assert Path.cwd() == tmp_path / "a"


# -- weights that are not finite ------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_replace_nothing(value, tmp_path):
    pipe = trained(2)
    pipe.save(tmp_path / "a")
    before = contents(tmp_path / "a")
    weight = next(iter(pipe.parameters()))
    with torch.no_grad():
        weight.view(-1)[3] = value
    with pytest.raises(FloatingPointError, match="0.weight is not finite after step 2, so"):
        pipe.save(tmp_path / "a")
    assert contents(tmp_path / "a") == before and names_in(tmp_path) == ["a"]
    weight.requires_grad_(False)  # a mask, say
    pipe.save(tmp_path / "a")


def test_a_folder_of_another_pipeline_of_this_process_is_replaced(tmp_path):
    trained(1).save(tmp_path / "a")
    one, other = trained(1), trained(2)
    for pipe in (one, other, one):
        pipe.save(tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    one.save(tmp_path / "a")
    assert names_in(tmp_path) == ["a"]
