"""Images large enough that their neighbours tell: the same in one process and on ranks."""

import pytest
import torch
import torch.nn.functional as F
from methods import same_bits
from models import assert_same_state, links_state, sgd
from torch import Tensor, nn

import mpcomp
from mpcomp.entropy import coding, neighbours

WAVE = torch.arange(32.0) / 5
#: Of activations and gradients: behind a ReLU, signed, in a memory, and in a learned basis.
METHODS = [
    ("auto:relu", "auto:relu"),
    ("step:0.3:centre=true", "step:1"),
    ("aqsgd:first=step/0.4+step:0.4", "step:0.5:scale=tensor"),
    ("klt+step:0.2", "step:1:scale=tensor:rounding=dither"),
]


def pipe_of(act: str, grad: str) -> mpcomp.Pipeline:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(3 if i == 0 else 12, 12, 3, padding=1), nn.ReLU()) for i in range(3)
    ]
    last = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(192, 4))
    return mpcomp.pipeline(
        nn.Sequential(*blocks, last),
        2,
        split=[4, 5],
        act_comp=act,
        grad_comp=grad,
        loss_fn=F.cross_entropy,
    )


def train(act: str, grad: str) -> tuple[Tensor, dict[str, dict[str, object]], int]:
    """Losses of three steps on smooth images, what links remember, and bytes."""
    pipe = pipe_of(act, grad)
    optimizer = sgd(pipe)
    losses = []
    for step in range(3):
        shifts = torch.arange(8.0 * 3).reshape(8, 3, 1, 1) + step % 2
        x = torch.sin(WAVE[:, None] + shifts) + torch.cos(WAVE * (1 + shifts / 9))
        losses.append(pipe.forward_backward(x, torch.arange(8) % 4, sample_ids=range(8)))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), links_state(pipe), pipe.wire_bytes


def train_all() -> list[tuple[Tensor, dict[str, dict[str, object]], int]]:
    return [train(*pair) for pair in METHODS]


def test_two_ranks_are_one(ranks):
    first, second = ranks(train_all, 2)
    for i, pair in enumerate(METHODS):
        losses, state, num_bytes = train(*pair)
        (ours, of_first, sent), (_, of_second, _) = first[i], second[i]
        assert same_bits(ours, losses) and sent == num_bytes, pair
        for name, link in state.items():
            assert_same_state({"": {**of_first[name], **of_second[name]}}, {"": link})


@pytest.mark.parametrize("pair", METHODS, ids=" / ".join)
def test_neighbours_save_bytes_and_change_nothing(pair, monkeypatch):
    kinds = []
    decode_to = coding.decode_to

    def noting(device, coded, *shape):
        kinds.append(int(coded[0]))
        return decode_to(device, coded, *shape)

    monkeypatch.setattr("mpcomp.entropy.decode_to", noting)
    losses, _, num_bytes = train(*pair)
    assert {6, 7} & set(kinds), "no message was coded by neighbours"
    monkeypatch.setattr(neighbours, "may_tell", lambda *_, **__: False)
    kinds.clear()
    same, _, without = train(*pair)
    assert not {6, 7} & set(kinds)
    assert same_bits(same, losses) and num_bytes < without
