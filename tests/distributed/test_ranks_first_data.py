"""Data on the first rank alone: others hear of sizes, masks and ids, and the bits are the same."""

import inspect
import os
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import runs as told
import torch
import torch.distributed as dist
import torch.nn.functional as F
from everyday import slow, slow_after
from lm_runs import VOCABULARY, lm_run, make_lm, text
from lms import NanoGPT, language_model
from methods import same_bits
from models import rows
from ranks import preload
from runs import KINDS, Kind, Outcome, Run, assert_same, make, train
from torch import Tensor, nn

import mpcomp
from mpcomp import Adaptive, CausalLMLoss, TopK
from mpcomp.api.config import PipelineConfig
from mpcomp.api.launch import split_as_asked
from mpcomp.comm.all_gather import TAG
from mpcomp.comm.from_first import TAGS, FromFirst
from mpcomp.core.context import TensorMeta
from mpcomp.engines.outline import Outline

preload("lms", "test_ranks_first_data", "transformers.models.gemma2.modeling_gemma2")
pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")

CODED = {"act": "ef+topk:0.3", "grad": "ef21+topk:0.3"}


def chain() -> nn.Sequential:
    """Its last block has the weight of the first; of eight blocks, with dropout in the middle."""
    first, last = nn.Linear(13, 5), nn.Linear(13, 5)
    first.weight = last.weight
    inner = [nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Dropout(0.1)) for _ in range(5)]
    return nn.Sequential(first, *inner, nn.Linear(5, 13), last)


def nano() -> nn.Module:
    return NanoGPT()


def gemma() -> nn.Module:
    """A family with windows and norms of its own, whose weight is tied."""
    model: nn.Module = language_model("gemma2", vocab_size=VOCABULARY, tie_word_embeddings=True)
    return model


def plain_text(count: int, seed: int) -> tuple[Any, Tensor]:
    ids = torch.randint(VOCABULARY, (count, 9), generator=torch.Generator().manual_seed(seed))
    return ids, ids


told.KINDS.update(
    {
        "tied chain": Kind(chain, rows, split=("1", "2", "3")),
        "nanoGPT": Kind(nano, plain_text, split=("transformer.h.0", "transformer.h.2")),
        "gemma2": Kind(gemma, text, 4),
        "gemma2 left": Kind(gemma, lambda count, seed: text(count, seed, "left"), 4),
    }
)

FIRST = {"data": "first"}


def first_run(model: str = "gpt2", stages: int = 2, **rest: Any) -> Run:
    return lm_run(model, stages, **{**rest, "pipeline": {**FIRST, **rest.get("pipeline", {})}})


def chain_run(stages: int = 2, **rest: Any) -> Run:
    split = ["1", "3"][: stages - 1]
    pipeline = {**FIRST, "split": split, **rest.pop("pipeline", {})}
    return Run("tied chain", stages, pipeline=pipeline, **{"steps": 4, **rest})


BUDGET = Adaptive(TopK(0.1), cf=(2.0, 20.0), window=3, policy="geometric", budget=0.6)

RUNS = {
    2: [
        first_run(),
        first_run("gpt2 left", chunks=5, pipeline={"in_flight": 3, "recompute": True}, **CODED),
        first_run("gpt2 full", chunks=1),
        first_run("tied llama", act="aqsgd+quant:4", grad="ef+topk:0.3"),
        first_run("gemma2 left", act="auto", grad="auto"),
        first_run(scale=8.0, overflow=(1, 2), **CODED),
        first_run("lora", **CODED),
        first_run("nanoGPT", pipeline={"loss_fn": CausalLMLoss(), "split": ["transformer.h.1"]}),
        chain_run(evaluate=True, rows=(10, 7, 4), **CODED),
        chain_run(act=BUDGET, grad=BUDGET, rows=(12,)),
    ],
    3: [
        first_run("gemma2", 3, act="auto:memory", grad="auto:memory", chunks=5),
        first_run("gpt2", 3, accumulate=2, autocast=torch.bfloat16, pipeline={"in_flight": "auto"}),
        chain_run(3, evaluate=True, act="aqsgd+topk:0.3", grad="same", rows=(10, 9)),
    ],
}
#: Models whose ends share nothing: the head, or the last block, is put beside the first stage.
UNTIED = {
    2: [
        first_run("llama left", **CODED),
        Run("deep convnet", 2, pipeline=FIRST, evaluate=True, rows=(10, 7), steps=4, **CODED),
        Run("deep", 2, pipeline={**FIRST, "split": 2}, act="aqsgd+quant:4", grad="quant:4"),
        Run("masked", 2, pipeline={**FIRST, "split": ["one"], "recompute": True}, steps=3),
        Run("named", 2, pipeline={**FIRST, "split": ["one"]}, evaluate=True, steps=3, **CODED),
    ],
    3: [
        first_run("llama", 3, chunks=5, accumulate=2, act="auto", grad="auto"),
        Run("deep convnet", 3, pipeline={**FIRST, "in_flight": "auto"}, evaluate=True, steps=3),
    ],
}
#: The last stage is on the first rank with these as well.
V_RUNS = [
    Run("deep", 4, "ZBVZeroBubble", pipeline=FIRST, evaluate=True, **CODED),
    lm_run("gpt2", 4, "DualPipeV", pipeline=FIRST, **CODED),
]


def train_here(all_runs: list[Run]) -> list[Outcome]:
    """`runs.train_all`, by a name with which ranks find this module."""
    return told.train_all(all_runs)


@pytest.mark.parametrize(
    "num_ranks, runs", [(2, RUNS[2][::2]), slow(2, RUNS[2][1::2]), slow(3, RUNS[3])]
)
def test_ranks_give_the_bits_of_one_process(ranks, num_ranks, runs):
    """Masks, positions, ids and budgets too; losses and figures are known on every rank."""
    outcomes = ranks(train_here, num_ranks, runs)
    for run, ours in zip(runs, zip(*outcomes, strict=True), strict=True):
        assert_same(run, ours, train(run))


@pytest.mark.parametrize("num_ranks", [2, slow(3)])
def test_models_whose_ends_share_nothing_have_them_on_one_rank(ranks, num_ranks):
    """One stage more there; what is not compressed has the bits that it has without."""
    all_runs = UNTIED[num_ranks]
    outcomes = ranks(train_here, num_ranks, all_runs)
    for run, ours in zip(all_runs, zip(*outcomes, strict=True), strict=True):
        assert_same(run, ours, train(run))
        assert len(ours[0].sent) == 2 * num_ranks
        if run.act is None:
            usual = train(replace(run, pipeline={**run.pipeline, "data": "all"}))
            assert same_bits(torch.stack(usual.losses), torch.stack(ours[0].losses))
            assert len(usual.sent) == 2 * (num_ranks - 1)


@pytest.mark.slow
def test_schedules_that_end_where_they_begin(ranks):
    outcomes = ranks(train_here, 2, V_RUNS)
    for run, ours in zip(V_RUNS, zip(*outcomes, strict=True), strict=True):
        assert_same(run, ours, train(replace(run, pipeline={**run.pipeline, "data": "all"})))


# -- inference ------------------------------------------------------------------------------------


def right(output: Tensor, target: Tensor) -> dict[str, float]:
    return {"right": (output.argmax(-1) == target).float().mean().item()}


PROMPT = {k: v for k, v in text(3, 1, "left", 7)[0].items() if k != "position_ids"}
WAYS: list[dict[str, Any]] = [
    {},
    {"max_new_tokens": 1},
    {"do_sample": True, "seed": 3, "repetition_penalty": 1.5},
    {"eos_token_id": list(range(VOCABULARY)), "pad_token_id": 9},
]


def infer(run: Run, alone: bool) -> dict[str, Any]:
    """Results of each call, and then a step of training."""
    pipe = make_lm(run, alone=alone)
    here = pipe.has_data
    found: dict[str, Any] = {}
    loader = [text(count, count, "left") for count in (7, 3, 1)]
    found["loss"] = pipe.evaluate(loader) if here else pipe.evaluate()
    found["right"] = pipe.evaluate(loader, right) if here else pipe.evaluate()
    pipe.eval()
    with pipe.uncompressed():
        found["output"] = pipe(loader[0][0]) if here else pipe()
        found["both"] = pipe(*loader[1]) if here else pipe()
    pipe.train()
    for i, way in enumerate(WAYS):
        settings = {"max_new_tokens": 4, "eos_token_id": [], **way}
        found[f"tokens {i}"] = pipe.generate(**PROMPT, **settings) if here else pipe.generate()
    x, y = text(7, 3)
    found["trained"] = pipe.forward_backward(x, y) if here else pipe.forward_backward()
    found["with output"] = (
        pipe.forward_backward(x, y, with_output=True) if here else pipe.forward_backward()
    )
    found["sent"] = [(e.meter.eval.messages, e.meter.eval.wire_bytes) for e in pipe.links]
    return found


INFERRED = [
    first_run("gpt2", act="ef21+quant:4", grad="topk:0.3"),
    first_run("gemma2", 3, act="topk:0.3"),
]


def infer_all(all_runs: list[Run], alone: bool = False) -> list[dict[str, Any]]:
    return [infer(run, alone) for run in all_runs]


@pytest.mark.parametrize("run", slow_after(1, INFERRED), ids=str)
def test_inference_stays_on_the_first_rank(ranks, run):
    """Outputs and tokens are those of one process there; other ranks have the figures alone."""
    (expected,) = infer_all([run], True)
    by_rank = [found for (found,) in ranks(infer_all, run.stages, [run])]
    for rank, found in enumerate(by_rank):
        for name in ("loss", "right"):
            assert found[name] == expected[name], (rank, name)
        assert same_bits(found["trained"], expected["trained"])
        for name in ["output", *(f"tokens {i}" for i in range(len(WAYS)))]:
            if rank:
                assert found[name] is None
            else:
                assert same_bits(found[name], expected[name]), name
        if rank == 0:
            for name in ("both", "with output"):
                assert all(map(same_bits, found[name], expected[name])), name
    sums = [
        tuple(map(sum, zip(*of_link, strict=True)))
        for of_link in zip(*(found["sent"] for found in by_rank), strict=True)
    ]
    assert sums == expected["sent"]
    assert expected["tokens 3"].shape[1] == 7 + 1 and expected["loss"] > 0


# -- replicas, and going on -----------------------------------------------------------------------


def of_replicas(data: str) -> list[Any]:
    """Losses and weights of two pipelines, each with batches of its own."""
    found: list[Any] = []
    for method in (None, "ef+topk:0.2"):
        network = mpcomp.ReplicaNetwork(smallest=32) if method else None
        run = lm_run("gpt2", pipeline={"data": data}, **CODED)
        pipe = make_lm(run, replicas=2, dp_comp=method, network=network)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        for number in range(3):
            given = text(6 + pipe.replica, 2 * number + pipe.replica) if pipe.has_data else ()
            found.append(pipe.forward_backward(*given))
            optimizer.step()
            optimizer.zero_grad()
        loader = [text(4, 50 + pipe.replica), text(3, 60 + pipe.replica)]
        found.append(torch.tensor(pipe.evaluate(loader if pipe.has_data else None)))
        found.extend(pipe.merge().state_dict().values())
    prompt = text(2, pipe.replica, "")[0]["input_ids"] if pipe.has_data else None
    tokens = pipe.generate(prompt, max_new_tokens=3 + (data == "first") * pipe.replica)
    return [found, tokens if tokens is None else tokens[:, :12]]


@pytest.mark.slow
def test_the_first_rank_of_each_replica_has_its_data(ranks):
    everywhere = ranks(of_replicas, 4, "all")
    for rank, (found, tokens) in enumerate(ranks(of_replicas, 4, "first")):
        expected, ids = everywhere[rank]
        assert all(map(same_bits, found, expected)) and len(found) == len(expected)
        assert tokens is None if rank % 2 else same_bits(tokens, ids)


def stopped(folder: str, data: str) -> list[Any]:
    """Losses of five steps; with data on the first rank alone the last two after a checkpoint."""
    run = lm_run("gpt2", act="aqsgd+quant:4", grad="ef+topk:0.3", pipeline={"data": data})
    pipe = make_lm(run)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    losses = []
    for number in range(5):
        if data == "first" and number == 3:
            pipe.save(folder, optimizer=optimizer)
            pipe = make_lm(replace(run, seed=1))
            optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
            pipe.load(folder, optimizer=optimizer)
        batch, ids = (text(6, number), torch.arange(number, number + 6))
        if pipe.has_data:
            losses.append(pipe.forward_backward(*batch, sample_ids=ids))
        else:
            losses.append(pipe.forward_backward())
        optimizer.step()
        optimizer.zero_grad()
    return [losses, pipe.report(show=False)["step"]["parts"]["agreements"]["wire_bytes"]]


def test_a_run_goes_on_from_its_checkpoint(ranks, tmp_path):
    expected = ranks(stopped, 2, "", "all")
    for (losses, told_bytes), (others, bytes_of_all) in zip(
        ranks(stopped, 2, str(tmp_path), "first"), expected, strict=True
    ):
        assert all(map(same_bits, losses, others))
        assert bytes_of_all < told_bytes < bytes_of_all + 600


# -- what is on the wire --------------------------------------------------------------------------


@contextmanager
def listening() -> Any:
    """All that this rank tells others beside cuts, in order: (tag, bytes)."""
    said: list[tuple[int, bytes]] = []
    isend, broadcast = dist.isend, dist.broadcast

    def noted(tensor: Tensor, *args: Any, tag: int = 0, **kwargs: Any) -> Any:
        if tag in (TAG, *TAGS):
            said.append((tag, tensor.numpy().tobytes()))
        return isend(tensor, *args, tag=tag, **kwargs)

    def noted_broadcast(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        said.append((-1, tensor.contiguous().view(torch.uint8).numpy().tobytes()))
        return broadcast(tensor, *args, **kwargs)

    dist.isend, dist.broadcast = noted, noted_broadcast
    try:
        yield said
    finally:
        dist.isend, dist.broadcast = isend, broadcast


def said_of(seed: int, model: str, num_ranks: int) -> list[Any]:
    """Messages of each call: a step's beginning, an output, tokens; and outlines in words."""
    pipe = make_lm(first_run(model, num_ranks))
    x, _ = text(6, 0, "left")
    x["input_ids"] = torch.randint(
        VOCABULARY, (6, 9), generator=torch.Generator().manual_seed(seed)
    )
    y = x["input_ids"].masked_fill(x["attention_mask"] == 0, -100)
    here = pipe.has_data
    calls: list[Callable[[], Any]] = [
        lambda: pipe.forward_backward(*((x, y) if here else ())),
        lambda: pipe.eval()(*((x,) if here else ())),
        lambda: pipe.generate(
            x["input_ids"] if here else None,
            attention_mask=x["attention_mask"],
            max_new_tokens=3,
            eos_token_id=[],
        ),
    ]
    found = []
    for i, call in enumerate(calls):
        with listening() as said:
            call()
        # The record at the end of a step has the loss, which all are to know.
        of_call = said[: 2 * (num_ranks - 1)] if i == 0 else said
        found.append(of_call)
    outlines = [
        Outline.from_bytes(raw[8:]) for of_call in found for tag, raw in of_call
        if tag in TAGS and len(raw) > 8
    ]  # fmt: skip
    names = [sorted(outline.beside) for outline in outlines]
    return [found, names, [len(raw) for of_call in found for _, raw in of_call]]


@pytest.mark.parametrize("model, num_ranks", [("gpt2", 2), slow("gemma2", 3)])
def test_texts_stay_on_the_first_rank(ranks, model, num_ranks):
    """Of two texts with one mask it tells others the same, bit for bit: nothing of a token."""
    one, other = (ranks(said_of, num_ranks, seed, model, num_ranks) for seed in (1, 2))
    for rank, ((found, names, sizes), (others, *_)) in enumerate(zip(one, other, strict=True)):
        assert found == others, rank
        if rank:
            assert not names
            continue
        masks = ["attention_mask", "position_ids"]
        assert names == [masks] * 2 * (num_ranks - 1) + [
            [*masks[:1], "logits_to_keep", masks[1]]
        ] * (3 * (num_ranks - 1))
        assert max(sizes) < 300  # the record of a step's start has 72


def accounted() -> Any:
    """The report's agreements, and those handed to the transport, over three steps."""
    pipe = make_lm(first_run(pipeline={"checks": "none"}, **CODED))
    with listening() as said:
        for number in range(3):
            pipe.forward_backward(*(text(7, number) if pipe.has_data else ()))
    own = sum(len(raw) for tag, raw in said if tag in (TAG, *TAGS))
    return pipe.report(show=False)["step"]["parts"]["agreements"]["wire_bytes"], own


def test_what_is_told_is_in_the_account(ranks):
    found = ranks(accounted, 2)
    for of_step, _ in found:
        assert 3 * of_step == pytest.approx(sum(own for _, own in found))


def records_before_each_outline() -> list[int]:
    """Records that this rank had sent each time that it began to wait for an outline."""
    pipe = make_lm(first_run(pipeline={"checks": "none"}))
    found: list[int] = []
    with listening() as said, pytest.MonkeyPatch.context() as patch:
        hear = pipe.mesh.hear
        count = lambda: sum(tag == TAG for tag, _ in said)  # noqa: E731
        patch.setattr(pipe.mesh, "hear", lambda what: (found.append(count()), hear(what))[1])
        for number in range(3):
            pipe.forward_backward(*(text(7, number) if pipe.has_data else ()))
    return found


def test_a_step_waits_for_no_outline_before_its_agreement(ranks):
    """Each step has two records, and the first of them leaves before the batch is heard of."""
    assert ranks(records_before_each_outline, 2) == [[], [1, 3, 5]]


# -- errors ---------------------------------------------------------------------------------------


def error_of(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def broken_loader() -> Any:
    yield text(4, 0)
    raise OSError("the disk is gone")


#: What the first rank does, what the others do, and what each says; the pipeline goes on.
WRONG: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str, str]] = {
    "rows": (
        lambda pipe: pipe.forward_backward(*text(3, 0)),
        lambda pipe: pipe.forward_backward(),
        "chunks=4 is larger than the batch of 3 rows",
        "rank 0 has no batch for step 0 (training): its own error says why",
    ),
    "tokens": (
        lambda pipe: pipe.forward_backward(torch.full((7, 4), 99), torch.zeros(7, 4).long()),
        lambda pipe: pipe.forward_backward(),
        "input_ids holds 99, but the model's vocabulary",
        "rank 0 has no batch",
    ),
    "targets": (
        lambda pipe: pipe.forward_backward(text(7, 0)[0], text(6, 0)[1]),
        lambda pipe: pipe.forward_backward(),
        "target has 6 rows, the batch 7",
        "rank 0 has no batch",
    ),
    "none": (
        lambda pipe: pipe.forward_backward(),
        lambda pipe: pipe.forward_backward(),
        "forward_backward without a batch",
        "rank 0 has no batch",
    ),
    "loader": (
        lambda pipe: pipe.evaluate(broken_loader()),
        lambda pipe: pipe.evaluate(),
        "the disk is gone",
        "evaluate ended early on rank 0: its own error says why",
    ),
    "no loader": (
        lambda pipe: pipe.evaluate(),
        lambda pipe: pipe.evaluate(),
        "evaluate needs a loader",
        "evaluate ended early on rank 0",
    ),
    "prompt": (
        lambda pipe: pipe.generate(torch.zeros(1, 3).long(), max_new_tokens=99),
        lambda pipe: pipe.generate(),
        "need more than the model's 16 positions",
        "generate ended early on rank 0",
    ),
    "calls": (
        lambda pipe: pipe.evaluate([text(4, 0)]),
        lambda pipe: pipe.forward_backward(),
        "do not take the same step",
        "do not take the same step",
    ),
    "other calls": (
        lambda pipe: pipe.forward_backward(*text(7, 0)),
        lambda pipe: pipe.generate(),
        "do not take the same step",
        "do not take the same step",
    ),
    "inferences": (
        lambda pipe: pipe.generate(torch.zeros(1, 3).long()),
        lambda pipe: pipe.evaluate(),
        "do not take the same step",
        "do not take the same step",
    ),
}


def go_on(names: list[str]) -> Any:
    """Errors of each rank in each case, and the losses of good steps between them."""
    pipe = make_lm(first_run(**CODED))
    said = {}
    for name in names:
        of_first, of_others, *_ = WRONG[name]
        call = of_first if pipe.has_data else of_others
        said[name] = error_of(lambda: call(pipe))  # noqa: B023
    loss = pipe.forward_backward(*(text(7, 1) if pipe.has_data else ()))
    said["compare"] = error_of(lambda: pipe.compare(data=[text(7, 0)], batches=1))
    return said, loss


def test_the_pipeline_goes_on_after_what_was_wrong(ranks):
    expected = make_lm(first_run(**CODED), alone=True).forward_backward(*text(7, 1))
    for rank, (said, loss) in enumerate(ranks(go_on, 2, list(WRONG))):
        for name, (*_, of_first, of_others) in WRONG.items():
            assert (of_others if rank else of_first) in said[name][1], (name, said[name])
        assert "compare with data='first'" in said["compare"][1]
        assert same_bits(loss, expected)


def adapted(alone: bool = False) -> Any:
    """Words of a first step with too few rows, and the losses of the steps after it."""
    found: list[Any] = []
    pipe, _ = make(chain_run(act=BUDGET, grad=BUDGET), alone=alone)
    batches: list[Any] = [rows(3, 0), rows(12, 1), rows(2, 2), rows(9, 3)]
    for batch in batches:
        given = batch if pipe.has_data else ()
        losses: list[Tensor] = []
        said = error_of(lambda: losses.append(pipe.forward_backward(*given)))  # noqa: B023
        found.append((said[0], losses))
    return found


def test_what_links_do_before_a_step_waits_for_its_batch(ranks):
    """Budgets are agreed on before a step's own agreement, once the batch is known."""
    expected = adapted(alone=True)
    assert [kind for kind, _ in expected] == ["ValueError", ""] * 2
    for found in ranks(adapted, 2):
        for (kind, losses), (theirs, others) in zip(found, expected, strict=True):
            assert kind == theirs and len(losses) == len(others)
            assert all(map(same_bits, losses, others))


def stray(how: str) -> Any:
    pipe = make_lm(first_run())
    x, y = text(7, 0)
    if how == "batch":
        pipe.forward_backward(x, y)
    elif how == "loader":
        pipe.evaluate([(x, y)])
    elif how == "output":
        pipe.eval()(x)
    else:
        pipe.generate(x["input_ids"])


@pytest.mark.parametrize("how", ["batch", *slow_after(0, ["loader", "output", "prompt"])])
def test_a_batch_on_another_rank_is_named_on_all(ranks, how):
    """A script that gives every rank its data; there is no way to go on with it."""
    first, second = ranks(stray, 2, how, may_fail=True)
    assert first[0] == "PeerError" and second[0] == "ValueError"
    for _, message in (first, second):
        assert "rank 1 was given a batch in" in message
        assert "data='all'" in message


def untied(blocks: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(13, 13) for _ in range(blocks)))


def refused(model: nn.Module, **options: Any) -> str:
    """The words of the configuration, of which ranks ask the same."""
    parameters = inspect.signature(mpcomp.pipeline).parameters.values()
    given = {p.name: p.default for p in parameters if p.name not in ("model", "chunks")}
    with pytest.raises(ValueError, match="data=") as caught:
        config = PipelineConfig(**{**given, "chunks": 2, "data": "first", **options})
        config.check_data(split_as_asked(model, 2, config))
    return str(caught.value)


@pytest.mark.parametrize(
    "make_model, options, why",
    [
        (untied, {"ties": "apart"}, "with ties='apart' it is on the last rank"),
        (lambda: untied(2), {}, "no block is left between the last cut and what is to be beside"),
        (chain, {"ties": "apart"}, "with ties='apart' it is on the last rank; leave that out"),
        (chain, {"tie_comp": "quant:8"}, "with tie_comp='quant:8' it is on the last rank"),
        (chain, {"schedule": "GPipe"}, "schedule='GPipe' places it on the last rank"),
        (chain, {"schedule": "Interleaved1F1B", "ties": "apart"}, "'ZBVZeroBubble' or 'DualPipeV'"),
        (chain, {"data": "rank 0"}, "data='rank 0': expected one of all, first"),
    ],
)
def test_where_it_cannot_be_it_says_why(make_model, options, why):
    assert why in refused(make_model(), **options)


def test_one_process_says_so_too():
    with pytest.raises(ValueError, match="data='first', but the last stage"):
        mpcomp.pipeline(untied(2), 2, split=2, loss_fn=F.cross_entropy, data="first")


def test_in_one_process_nothing_changes():
    losses = []
    for data in ("all", "first"):
        pipe, _ = make(chain_run(pipeline={"data": data}), alone=True)
        assert pipe.has_data
        x, y = KINDS["tied chain"].batch(8, 0)
        losses.append(pipe.forward_backward(x, y))
        with pytest.raises(ValueError, match="forward_backward without a batch"):
            pipe.forward_backward()
    assert same_bits(*losses)


# -- the parts ------------------------------------------------------------------------------------


VALUES = [
    torch.tensor([[True, False, True], [False, False, True]]),
    torch.arange(24).reshape(2, 3, 4) - 7,
    torch.tensor([[-(2**63), 2**63 - 1], [0, -1]]),
    torch.randn(2, 5),
    torch.randn(2, 3, 1, dtype=torch.float64).half(),
    torch.randn(2, 4).bfloat16().t().contiguous().t(),
    torch.ones(2, 1, 9, 9).tril(),
    torch.randint(255, (2, 6), dtype=torch.uint8),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda x: f"{x.dtype} {list(x.shape)}")
def test_an_outline_comes_as_it_was(value):
    metas = [
        [TensorMeta((1, 3), torch.bfloat16), TensorMeta((1, 4, 2, 2), channels_last=True)],
        [TensorMeta((1, 3), torch.bfloat16), TensorMeta((1,), torch.float16)],
    ]
    outline = Outline([1, 1], metas, {"mask": value, "logits_to_keep": 1}, torch.tensor([4, 2]))
    again = Outline.from_bytes(outline.to_bytes())
    assert again.sizes == [1, 1] and again.metas == metas and again.beside["logits_to_keep"] == 1
    assert same_bits(again.beside["mask"], value.contiguous())
    assert again.sample_ids.tolist() == [4, 2]
    for i, part in enumerate(again.microbatches(cache=7)):
        assert part.metas == metas[i] and part["cache"] == 7
        assert same_bits(part["mask"], value[i : i + 1].contiguous())


@pytest.mark.parametrize("ids", [None, 7, [3, 1], [[3, 0], [1, 5]]])
def test_ids_of_any_form_are_told(ids):
    outline = Outline([1, 1], [[], []], {}, ids)
    found = Outline.from_bytes(outline.to_bytes()).sample_ids
    assert found is None if ids is None else found.tolist() == ids


def test_masks_and_positions_take_few_bytes():
    """Of 64 rows of 1,024 tokens, which end anywhere."""
    lengths = torch.randint(1, 1025, (64, 1))
    mask = (torch.arange(1024)[None] < lengths).long()
    beside = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    metas = [[TensorMeta((4, 1024, 768), torch.bfloat16)] * 4] * 16
    size = len(Outline([4] * 16, metas, beside).to_bytes())
    assert size < 64 * 64


def messages(lengths: list[int]) -> list[bytes]:
    ranks = [1, 0, 2]  # the one that sends is the first
    wire = FromFirst(dist.new_group(backend="gloo"), ranks, timeout_s=60.0)
    found = []
    for length in lengths:
        message = bytes(i % 251 for i in range(length))
        if dist.get_rank() == 1:
            assert wire.send(message) == 2 * (8 + length)
            found.append(message)
        else:
            found.append(wire.receive())
    dist.barrier()
    return found


def test_messages_of_any_length_come_in_order(ranks):
    lengths = [0, 5, 4088, 4089, 1, 100_000, 99_999, 100_001, 0]
    for found in ranks(messages, 3, lengths):
        assert [len(message) for message in found] == lengths
        assert all(message == bytes(i % 251 for i in range(len(message))) for message in found)


# -- a rank that goes -----------------------------------------------------------------------------


def left_alone(call: str) -> Any:
    """The error of a rank that waits to hear of a batch, where the first is killed meanwhile."""
    pipe = make_lm(first_run())
    pipe.forward_backward(*(text(7, 0) if pipe.has_data else ()))
    if pipe.has_data:
        os._exit(3)
    return error_of(getattr(pipe, call))


@pytest.mark.parametrize("call", ["forward_backward", *slow_after(0, ["evaluate", "generate"])])
def test_a_first_rank_that_dies_is_named(ranks, call):
    died, (kind, message) = ranks(left_alone, 2, call, may_fail=True)
    assert kind == "PeerError" and "rank 0 (stage 0 and 2)" in message, (died, message)


def ended_alone() -> Any:
    pipe = make_lm(first_run())
    for number in range(2 if pipe.has_data else 3):
        pipe.forward_backward(*(text(7, number) if pipe.has_data else ()))


def test_loops_of_other_lengths_are_named(ranks):
    first, (kind, message) = ranks(ended_alone, 2, may_fail=True)
    assert first is None and kind in ("DifferentCalls", "PeerError")
    assert "rank 0" in message and "outline of a batch" in message
