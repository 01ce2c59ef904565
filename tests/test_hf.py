"""`PipelineTrainer` trains, evaluates and resumes as transformers' own `Trainer` does."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from ranks import preload
from torch import nn
from transformers import Trainer, TrainingArguments

import mpcomp
from mpcomp.hf import PipelineAccelerator, PipelineTrainer
from mpcomp.hf.trainer import _CURES, _refuse

preload(
    "transformers.models.gpt2.modeling_gpt2", "transformers.trainer", "mpcomp.hf.trainer", "test_hf"
)

VOCABULARY, LENGTH = 37, 12


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=16,
        n_layer=4,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    return transformers.GPT2LMHeadModel(config)


def data(rows: int = 20) -> list[dict[str, torch.Tensor]]:
    """Rows with other numbers of labels, so that a wrong weight of a batch shows."""
    ids = torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    places = torch.arange(LENGTH)
    return [
        {
            "input_ids": row,
            "attention_mask": torch.ones_like(row),
            "labels": torch.where(places < i % 5, -100, row),
        }
        for i, row in enumerate(ids)
    ]


def arguments(folder: Path, **given) -> TrainingArguments:
    """Two epochs of three steps: of two batches twice, and of the one that is left."""
    settings = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "epoch",
        "eval_strategy": "epoch",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(str(folder), **{**settings, **given})


def accuracy(prediction) -> dict[str, float]:
    hits = prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]
    return {"accuracy": float(hits.mean())}


class Counts(transformers.TrainerCallback):
    """How often a step ended, and how often something was saved."""

    def __init__(self) -> None:
        self.steps = self.saves = 0

    def on_step_end(self, *args, **kwargs) -> None:
        self.steps += 1

    def on_save(self, *args, **kwargs) -> None:
        self.saves += 1


def trainer(folder: Path, **given) -> PipelineTrainer:
    methods = {name: given.pop(name) for name in ("act_comp", "grad_comp") if name in given}
    args = arguments(folder, **given)
    pipe = mpcomp.pipeline(gpt2(), chunks=2, split=2, **methods)
    return PipelineTrainer(
        pipe,
        args,
        train_dataset=data(),
        eval_dataset=data(5),
        compute_metrics=accuracy,
        callbacks=[Counts()],
    )


def logged(history: list[dict]) -> list[dict]:
    """The numbers that do not say how long it took."""
    names = ("loss", "grad_norm", "learning_rate", "epoch", "step", "eval_loss", "eval_accuracy")
    return [{k: float(entry[k]) for k in names if k in entry} for entry in history]


def trained(folder: Path) -> tuple:
    """History, weights, prediction and counts of a training, on this rank."""
    ours = trainer(folder)
    ours.train()
    ours.save_model(str(folder / "final"))
    counts = next(c for c in ours.callback_handler.callbacks if isinstance(c, Counts))
    return (
        ours.state.log_history,
        ours.pipe.merge().state_dict(),
        ours.predict(data(5)).predictions,
        (counts.steps, counts.saves),
    )


def resumed(folder: Path) -> dict:
    """Weights after the second epoch of a training that begins where the first one ended."""
    ours = trainer(folder)
    ours.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    assert ours.state.global_step == 6
    return ours.pipe.merge().state_dict()


def on_a_rank(work, folder: Path):
    """``work(folder)`` as torchrun would start it."""
    rank = os.environ["TEST_RANK"]
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # the group is there already
    return work(folder)


def assert_same_history(ours, theirs) -> None:
    ours, theirs = logged(ours), logged(theirs)
    assert len(ours) == len(theirs) == 9  # six steps, two evaluations, the end
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        assert one == pytest.approx(other, rel=2e-5)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    theirs = Trainer(
        gpt2(),
        arguments(folder),
        train_dataset=data(),
        eval_dataset=data(5),
        compute_metrics=accuracy,
    )
    theirs.train()
    return theirs.state.log_history, theirs.model.state_dict(), theirs.predict(data(5)).predictions


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory):
    """In one thread, as tests are, which come later than what a whole module shares."""
    folder = tmp_path_factory.mktemp("pipeline")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield folder, trained(folder)
    torch.set_num_threads(threads)


def assert_as_plain(ours, plain, folder: Path) -> None:
    history, weights, predicted, counts = ours
    assert_same_history(history, plain[0])
    assert counts == (6, 2)
    assert np.allclose(predicted, plain[2], atol=1e-4)
    stored = transformers.GPT2LMHeadModel.from_pretrained(folder / "final").state_dict()
    for name, value in plain[1].items():
        assert torch.allclose(weights[name], value, atol=1e-4), name
        assert torch.equal(stored[name], weights[name]), name


def test_it_trains_as_the_trainer_does(in_one_process, plain):
    folder, ours = in_one_process
    assert_as_plain(ours, plain, folder)


def test_it_goes_on_bit_for_bit(in_one_process):
    folder, (_, weights, *_) = in_one_process
    again = resumed(folder)
    assert all(torch.equal(again[name], value) for name, value in weights.items())


def test_two_ranks_train_as_the_trainer_does_and_go_on(ranks, plain, tmp_path):
    results = ranks(on_a_rank, 2, trained, tmp_path)
    for ours in results:
        assert_as_plain(ours, plain, tmp_path)
    for again in ranks(on_a_rank, 2, resumed, tmp_path):
        assert all(torch.equal(again[name], value) for name, value in results[0][1].items())


def test_the_best_model_comes_back(tmp_path):
    ours = trainer(
        tmp_path, load_best_model_at_end=True, metric_for_best_model="loss", learning_rate=0.5
    )
    ours.train()
    best = min(entry["eval_loss"] for entry in ours.state.log_history if "eval_loss" in entry)
    assert ours.evaluate()["eval_loss"] == pytest.approx(best, rel=1e-6)


def test_compression_is_on(tmp_path):
    """With it the losses are others, and fewer bytes are sent."""
    given = {"act_comp": "topk:0.1", "grad_comp": "topk:0.1", "save_strategy": "no"}
    ours = trainer(tmp_path, num_train_epochs=1, **given)
    ours.train()
    assert ours.pipe.num_steps == 5  # batches, two of which are accumulated
    links = [link for boundary in ours.pipe.boundaries for link in boundary.links]
    assert all(0 < link.meter.train.ratio < 0.5 for link in links)


def test_the_loss_alone_is_evaluated_without_logits(tmp_path):
    ours = trainer(tmp_path, save_strategy="no")
    whole = ours.evaluate()["eval_loss"]
    ours.compute_metrics = None
    assert ours.evaluate()["eval_loss"] == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"torch_compile": True}, "torch_compile"),
        ({"gradient_checkpointing": True}, "recompute=True"),
        ({"label_smoothing_factor": 0.1}, "loss_fn"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"label_names": ["starts", "ends"]}, "one target"),
    ],
)
def test_what_cannot_work_is_refused_by_name(given, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        trainer(tmp_path, **given)


@pytest.mark.parametrize("name", _CURES)
def test_a_refusal_names_the_setting_and_the_cure(name, tmp_path):
    """Some need a machine or package that is not here to be set at all: what is read is checked."""
    pipe, args = mpcomp.pipeline(gpt2(), 2, split=2), arguments(tmp_path)
    setattr(args, name, "this")
    with pytest.raises(ValueError, match=f"PipelineTrainer with {name}='this': ") as caught:
        PipelineTrainer(pipe, args)
    assert _CURES[name] in str(caught.value)


def test_a_pipeline_with_data_on_one_rank_is_refused():
    pipe = SimpleNamespace(num_replicas=1, first_data=object())
    with pytest.raises(ValueError, match="PipelineTrainer with data='first'"):
        _refuse(pipe, SimpleNamespace(), {})


def test_a_plain_model_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"mpcomp\.pipeline\(model"):
        PipelineTrainer(gpt2(), arguments(tmp_path))
    pipe = mpcomp.pipeline(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 1, split=2)
    with pytest.raises(ValueError, match="loss_fn"):
        PipelineTrainer(pipe, arguments(tmp_path))
    with pytest.raises(ValueError, match="compute_loss_func"):
        PipelineTrainer(
            mpcomp.pipeline(gpt2(), 2, split=2), arguments(tmp_path), compute_loss_func=print
        )


def looped(folder: Path | None) -> list[float]:
    """Losses and rates of a loop as `run_clm_no_trainer.py` has it; without a folder its own."""
    accelerator = (Accelerator if folder is None else PipelineAccelerator)(
        cpu=True, gradient_accumulation_steps=2
    )
    model = gpt2() if folder is None else mpcomp.pipeline(gpt2(), chunks=2, split=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = transformers.get_scheduler("linear", optimizer, 0, 5)
    torch.manual_seed(0)
    loaders = [torch.utils.data.DataLoader(data(n), 4, shuffle=n > 10) for n in (20, 7)]
    model, optimizer, train, test, scheduler = accelerator.prepare(
        model, optimizer, *loaders, scheduler
    )
    numbers = []
    for batch in train:
        with accelerator.accumulate(model):
            if folder is None:
                loss = model(**batch).loss
                accelerator.backward(loss)
            else:
                loss = model.forward_backward(batch, weight=1 / 2)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        numbers += [loss.item(), scheduler.get_last_lr()[0]]
    model.eval()
    for batch in test:
        with torch.no_grad():
            loss = model(**batch).loss if folder is None else model(batch, batch["labels"])[1]
        losses = accelerator.gather_for_metrics(loss.repeat(len(batch["labels"])))
        numbers += losses.tolist()
    if folder is not None:
        kept = {"is_main_process": accelerator.is_main_process, "save_function": accelerator.save}
        accelerator.unwrap_model(model).save_pretrained(folder, **kept)
    return numbers


def test_a_loop_with_an_accelerator(ranks, tmp_path):
    """The rate goes down as fast on two ranks as on one."""
    theirs = pytest.approx(looped(None), rel=2e-5)
    assert looped(tmp_path / "one") == theirs
    assert all(ours == theirs for ours in ranks(on_a_rank, 2, looped, tmp_path / "two"))
    one, two = (
        transformers.GPT2LMHeadModel.from_pretrained(tmp_path / name).state_dict()
        for name in ("one", "two")
    )
    assert all(torch.allclose(two[name], value, atol=1e-5) for name, value in one.items())


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda a: a.backward(torch.zeros(())), "forward_backward"),
        (lambda a: a.clip_grad_norm_([], 1.0), r"mpcomp\.clip_grad_norm_"),
        (lambda a: a.save_state("state"), r"pipe\.save"),
        (lambda a: a.load_state("state"), r"pipe\.load"),
    ],
)
def test_what_an_accelerator_of_a_pipeline_leaves_to_it(call, says):
    with pytest.raises(TypeError, match=says):
        call(PipelineAccelerator(cpu=True))
