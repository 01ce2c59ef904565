"""Memory that the links' state will need, said before the run: as much as the run then holds."""

import pytest
import torch
import torch.nn.functional as F
from models import CONV_SPLIT, MLP_SPLIT, convnet, images, mlp, rows, store_of
from torch import nn

import mpcomp
from mpcomp import AQSGD, EF21, EFMixed, ErrorFeedback, Quantize, TopK

WIDTHS = (19, 17)  # elements of a sample at the cuts of `mlp`


def pipe_of(model=mlp, split=MLP_SPLIT, chunks=3, **methods):
    return mpcomp.pipeline(model(), chunks, split=split, loss_fn=F.cross_entropy, **methods)


def held(pipe) -> dict[tuple[int, str, str], int]:
    """Bytes of rows that ends hold."""
    return {
        (link.boundary, link.direction, role): store_of(end).num_bytes
        for link in pipe.links
        for role, end in link.endpoint.ends.items()
        if store_of(end) is not None
    }


def said(report) -> dict[tuple[int, str, str], int]:
    return {(e["boundary"], e["direction"], e["role"]): e["bytes"] for e in report["per_link"]}


METHODS = [
    (None, ErrorFeedback(TopK(0.3))),
    ("topk:0.3", EFMixed(TopK(0.3), storage="fp16")),
    (EF21(TopK(0.3), storage=8), EF21(Quantize(4))),
    (EF21(TopK(0.3), cap_bytes=200), "same"),
    (AQSGD(Quantize(4)), "quant:8"),
    (AQSGD(Quantize(4), storage="fp16"), ErrorFeedback(TopK(0.3))),
    (AQSGD(Quantize(4), storage=4, cap_bytes=300), None),
    (AQSGD(Quantize(4), key="batch"), None),
    ([None, AQSGD(Quantize(4), storage="bf16")], ["ef+topk:0.3", None]),
]


@pytest.mark.parametrize("act, grad", METHODS, ids=str)
def test_what_is_said_is_what_is_held(act, grad):
    """After an epoch over 21 samples in batches of 7, at every end."""
    pipe = pipe_of(act_comp=act, grad_comp=grad)
    report = pipe.state_bytes(rows(7)[0], 21)
    assert held(pipe) == {} and pipe.num_steps == 0  # nothing has run
    by_batch = isinstance(act, AQSGD) and act.key == "batch"
    for start in (0, 7, 14):
        ids = start // 7 if by_batch else range(start, start + 7)
        pipe.forward_backward(*rows(7), sample_ids=ids)
    assert said(report) == held(pipe)
    assert report["total"] == sum(held(pipe).values()) > 0


def test_an_entry_says_everything(tmp_path):
    folder = tmp_path / "slots"
    method = AQSGD(Quantize(4), storage="fp16", location=str(folder), cap_bytes=1000)
    report = pipe_of(act_comp=[method, None]).state_bytes(rows(7)[0], 1000)
    expected = {"boundary": 0, "direction": "act", "method": str(method), "row_bytes": 38}
    expected |= {"rows": 26, "bytes": 988, "capped": True, "location": str(folder)}
    assert report["per_link"] == [
        {**expected, "role": "sender"},
        {**expected, "role": "receiver"},
    ]
    assert report["total"] == 2 * 988
    assert not folder.exists()  # asking leaves nothing behind


def test_error_feedback_is_kept_where_the_tensor_is_sent():
    report = pipe_of(act_comp="ef+topk:0.3", grad_comp="ef+topk:0.3").state_bytes(rows(8)[0])
    assert said(report) == {
        (boundary, direction, "sender"): 8 * 4 * width
        for boundary, width in enumerate(WIDTHS)
        for direction in ("act", "grad")
    }
    assert not any(entry["capped"] for entry in report["per_link"])


def test_methods_without_state_and_a_model_without_cuts():
    pipe = pipe_of(act_comp="topk:0.3", grad_comp="same")
    assert pipe.state_bytes(rows(7)[0]) == {"total": 0, "per_link": []}


def test_images_and_named_inputs():
    """Rows have as many elements as the cut's tensor; BatchNorm and dropout notice nothing."""
    pipe = pipe_of(convnet, CONV_SPLIT, act_comp="ef21+topk:0.3")
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    state = torch.get_rng_state()
    report = pipe.state_bytes(images(7)[0])
    widths = (6 * 8 * 8, 7 * 4 * 4)
    assert [entry["row_bytes"] for entry in report["per_link"]] == [
        4 * width for width in widths for _ in range(2)
    ]
    assert all(torch.equal(before[name], value) for name, value in pipe.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(13, 6)

        def forward(self, x, scale):
            return self.linear(x) * scale

    model = nn.Sequential(Named(), nn.Linear(6, 5))
    pipe = mpcomp.pipeline(model, 2, split=2, act_comp="ef21+topk:0.3", loss_fn=F.cross_entropy)
    batch = {"x": rows(4)[0], "scale": torch.ones(4, 1)}
    assert pipe.state_bytes(batch)["total"] == 2 * 4 * 4 * 6


def test_a_language_model_with_labels_and_a_tied_weight():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=32, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    ef = "ef+topk:0.3"
    act = "aqsgd+quant:4"
    pipe = mpcomp.pipeline(model, 2, split=2, act_comp=act, grad_comp=ef, tie_comp=ef)
    ids = torch.randint(50, (4, 8))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    report = pipe.state_bytes(batch, 8)
    for start in (0, 4):
        pipe.forward_backward(batch, sample_ids=range(start, start + 4))
    assert said(report) == held(pipe)
    assert report["total"] == (2 * 8 + 4) * 4 * 8 * 16 + 2 * 4 * 50 * 16


def test_what_cannot_be_said():
    pipe = pipe_of(act_comp="aqsgd+quant:4")
    with pytest.raises(ValueError, match=r"boundary 0 act: aqsgd\+quant:4 keeps a row.*num_sam"):
        pipe.state_bytes(rows(7)[0])
    with pytest.raises(ValueError, match="num_samples=0: expected the size"):
        pipe.state_bytes(rows(7)[0], 0)
    with pytest.raises(ValueError, match=r"a batch of 2 rows for chunks=3"):
        pipe.state_bytes(rows(2)[0], 5)
    small = pipe_of(act_comp=AQSGD(Quantize(4), cap_bytes=70))
    with pytest.raises(ValueError, match="cap_bytes=70: one sample's state takes 76 bytes"):
        small.state_bytes(rows(7)[0], 5)


def of_this_rank(folder):
    """What is said here, and held after an epoch with prefetch; and the losses."""
    torch.manual_seed(0)
    method = AQSGD(Quantize(4), location=folder)
    pipe = pipe_of(act_comp=method, grad_comp="ef+topk:0.3")
    report = pipe.state_bytes(rows(7)[0], 14)
    losses = []
    for epoch in range(3):
        for start in (0, 7):
            pipe.prefetch(range(7 - start, 14 - start))
            ids = range(start, start + 7)
            losses.append(pipe.forward_backward(*rows(7), sample_ids=ids).item())
        for parameter in pipe.parameters():
            parameter.data.mul_(0.9 + 0.05 * epoch)
    return said(report), held(pipe), losses


def test_ranks_say_and_hold_their_own_ends(ranks, tmp_path):
    expected, _, losses = of_this_rank(str(tmp_path))
    found = {}
    for own, kept, theirs in ranks(of_this_rank, 3, str(tmp_path)):
        assert own == kept and theirs == losses and not found.keys() & own.keys()
        found |= own
    assert found == expected
