"""Generation over several processes: every rank gets the tokens that one process gets."""

from typing import Any

import pytest
import torch
from everyday import slow_after
from lm_runs import gpt2, llama, text
from torch import Tensor

import mpcomp

pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")
pytest.importorskip("transformers")

MODELS = {"gpt2": gpt2, "llama": llama}
#: Tokens to append.
NEW = 4
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "one": {"max_new_tokens": 1},
    "sampled": {"do_sample": True, "seed": 3, "temperature": 1.5},
    "narrow": {"do_sample": True, "seed": 4, "top_k": 5, "repetition_penalty": 1.5},
}
METHODS = ("none", "topk:0.3", "ef21+quant:4")


def pipe_of(model: str = "llama", num_stages: int = 2, method: str = "none", **options: Any) -> Any:
    """The same weights everywhere, with text that does not repeat at once."""
    torch.manual_seed(0)
    made = MODELS[model](initializer_range=0.4)
    settings = {"split": num_stages, "act_comp": method, "grad_comp": method, "timeout": 60.0}
    return mpcomp.pipeline(made, 2, **{**settings, **options})


def prompt_of(rows: int = 3, seed: int = 1, length: int = 7) -> dict[str, Tensor]:
    """Padded on the left, with one row of a single token."""
    batch, _ = text(rows, seed, "left", length)
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def told_by(pipe: Any, prompt: dict[str, Tensor], **options: Any) -> Tensor:
    return pipe.generate(**prompt, **{"max_new_tokens": NEW, "eos_token_id": [], **options})


def all_ways(num_stages: int, **options: Any) -> dict[str, Any]:
    """Tokens and traffic by model, method and way; and of training and evaluation after them."""
    found: dict[str, Any] = {}
    for model, method in [("gpt2", "none"), *(("llama", method) for method in METHODS)]:
        pipe = pipe_of(model, num_stages, method, **options)
        for name, way in WAYS.items():
            found[f"{model} {method} {name}"] = told_by(pipe, prompt_of(), **way)
        ends = found[f"{model} {method} greedy"][:, 7:]
        few = {"eos_token_id": [int(ends[0, 1]), int(ends[1, 0]), int(ends[2, 2])]}
        found[f"{model} {method} ends"] = told_by(pipe, prompt_of(), pad_token_id=9, **few)
        with pipe.uncompressed():
            found[f"{model} {method} off"] = told_by(pipe, prompt_of())
        x, y = text(4, 3)
        found[f"{model} {method} trained"] = pipe.forward_backward(x, y)
        found[f"{model} {method} judged"] = torch.tensor(pipe.evaluate([text(3, 4)]))
        found[f"{model} {method} after"] = told_by(pipe, prompt_of(2, 5))
        messages = [(link.meter.eval.messages, link.meter.eval.wire_bytes) for link in pipe.links]
        found[f"{model} {method} sent"] = messages
    return found


@pytest.mark.parametrize("num_ranks", slow_after(1, [2, 3]))
def test_tokens_of_one_process_on_every_rank(ranks, num_ranks):
    alone = all_ways(num_ranks, engine="local")
    by_rank = ranks(all_ways, num_ranks, num_ranks)
    for name, expected in alone.items():
        if name.endswith("sent"):
            sums = [
                tuple(map(sum, zip(*of_link, strict=True)))
                for of_link in zip(*(found[name] for found in by_rank), strict=True)
            ]
            assert sums == expected, name
            continue
        for found in by_rank:
            assert torch.equal(found[name], expected), name
    assert not torch.equal(alone["llama topk:0.3 greedy"], alone["llama topk:0.3 off"])
    assert alone["llama none ends"].shape[1] < 7 + NEW


def folded() -> Any:
    """The first stage and the last on one rank."""
    pipe = pipe_of("llama", 4, "topk:0.3", schedule="ZBVZeroBubble")
    return told_by(pipe, prompt_of())


@pytest.mark.slow
def test_four_stages_on_two_ranks(ranks):
    alone = told_by(pipe_of("llama", 4, "topk:0.3", engine="local"), prompt_of())
    assert all(torch.equal(found, alone) for found in ranks(folded, 2))


#: Of two replicas: their prompts, and what follows them ends at once in one of them.
UNLIKE = {
    "same shape": ({"rows": 3, "seed": 1}, {"rows": 3, "seed": 2}),
    "other shapes": ({"rows": 3, "seed": 1}, {"rows": 2, "seed": 2, "length": 5}),
}


def of_replicas(ends: list[int]) -> Any:
    """Each replica its own prompt; then training, with both."""
    pipe = pipe_of("llama", 2, "none", replicas=2)
    found: dict[str, Any] = {}
    for name, prompts in UNLIKE.items():
        prompt = prompt_of(**prompts[pipe.replica])
        found[name] = told_by(pipe, prompt)
        found[f"{name}, one ends"] = told_by(pipe, prompt, eos_token_id=ends)
        found[f"{name}, drawn"] = told_by(pipe, prompt, do_sample=True)
    x, y = text(4, 3 + pipe.replica)
    found["loss"] = pipe.forward_backward(x, y)
    return found


@pytest.mark.slow
def test_replicas_continue_their_own_prompts(ranks):
    """Also if one of them has less to say: both end together."""
    pipe = pipe_of("llama", 2, engine="local")
    told = [told_by(pipe, prompt_of(**prompt)) for prompt in UNLIKE["same shape"]]
    ends = told[0][:, 7].tolist()
    by_rank = ranks(of_replicas, 4, ends)
    shorter = False
    for rank, found in enumerate(by_rank):
        for name, prompts in UNLIKE.items():
            prompt = prompt_of(**prompts[rank // 2])
            assert torch.equal(found[name], told_by(pipe, prompt))
            expected = told_by(pipe, prompt, eos_token_id=ends)
            assert torch.equal(found[f"{name}, one ends"], expected)
            assert torch.equal(found[f"{name}, drawn"], told_by(pipe, prompt, do_sample=True))
            if rank < 2:
                shorter = expected.shape[1] == 8
            else:
                assert expected.shape[1] > prompt["input_ids"].shape[1] + 1
    assert shorter
    assert len({float(found["loss"]) for found in by_rank}) == 1


def error_of(call: Any) -> tuple[str, str]:
    """Type and message of what a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def failing(tmp: str) -> Any:
    """What ranks raise, and that the pipeline goes on after each error."""
    pipe = pipe_of("llama", 2, "topk:0.3")
    rank, prompt = pipe.rank, prompt_of()
    expected = told_by(pipe, prompt)
    other = prompt_of(3, 1 + rank)
    shorter = prompt_of(3 + rank)
    found = {
        "tokens": error_of(lambda: told_by(pipe, other)),
        "shapes": error_of(lambda: told_by(pipe, shorter)),
        "count": error_of(lambda: told_by(pipe, prompt, max_new_tokens=2 + rank)),
        "ends": error_of(lambda: told_by(pipe, prompt, eos_token_id=[rank])),
        "seeds": error_of(lambda: told_by(pipe, prompt, do_sample=True, seed=rank)),
    }
    for stage in (0, 1):
        with torch.no_grad():
            own = [p for s in pipe.stages if s.index == stage for p in s.parameters()]
            kept = [p.clone() for p in own]
            for p in own:
                p.fill_(torch.nan)
            found[f"NaN {stage}"] = error_of(lambda: told_by(pipe, prompt))
            for p, before in zip(own, kept, strict=True):
                p.copy_(before)
        found[f"after NaN {stage}"] = told_by(pipe, prompt).equal(expected)
    found["training"] = pipe.training
    pipe.save_pretrained(tmp)
    again = type(pipe.cut_stages[0].original).from_pretrained(tmp)
    theirs = mpcomp.pipeline(
        again, 2, split=2, act_comp="topk:0.3", grad_comp="topk:0.3", engine="local"
    )
    found["saved"] = told_by(theirs, prompt).equal(expected)
    found["loss"] = bool(pipe.forward_backward(*text(4, 3)).isfinite())

    def broken(ids: Tensor, scores: Tensor) -> Tensor:
        raise KeyError("mine")

    found["processor"] = error_of(lambda: told_by(pipe, prompt, logits_processor=[broken]))
    return found


def test_errors_are_on_every_rank(ranks, tmp_path):
    for rank, found in enumerate(ranks(failing, 2, str(tmp_path / "model"))):
        for name in ("tokens", "shapes"):
            assert found[name][0] == "ValueError"
            assert "were given different data" in found[name][1]
        for name in ("count", "ends", "seeds"):
            assert found[name][0] == "ValueError"
            assert "arguments of generate" in found[name][1]
        assert found["NaN 0"][0] == found["NaN 1"][0] == "FloatingPointError"
        assert "boundary 0 act" in found["NaN 0"][1]
        assert "logits" in found["NaN 1"][1]
        for name in ("after NaN 0", "after NaN 1", "training", "saved", "loss"):
            assert found[name], (rank, name)
        # Only the last stage calls it; the others must not wait for it.
        assert found["processor"][0] == ("KeyError" if rank == 1 else "PeerError")
        assert "mine" in found["processor"][1]
