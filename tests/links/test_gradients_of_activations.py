"""A memory of activations that looks at the gradients which came back for them (along=)."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from models import MLP_SPLIT, mlp, rows

import mpcomp
from mpcomp.feedback.memory import Slots

ACT = "aqsgd:first=step/0.3:along=step/1+step:0.3:dead_zone=1"
GRAD = "aqsgd+step:0.1"
IDS = torch.arange(8)


def pipe_of(act=ACT, grad=GRAD, **kwargs):
    torch.manual_seed(0)
    return mpcomp.pipeline(
        mlp(), 2, split=MLP_SPLIT, act_comp=act, grad_comp=grad, loss_fn=F.cross_entropy, **kwargs
    )


def trained(pipe, steps, lr=0.05, *, ahead=False):
    """Losses of visits of the same samples, whose rows are asked for ahead or not."""
    optimizer = torch.optim.SGD(pipe.parameters(), lr)
    x, y = rows(8, 0)
    losses = []
    for _ in range(steps):
        if ahead:
            pipe.prefetch(IDS)
        optimizer.zero_grad()
        losses.append(float(pipe.forward_backward(x, y, sample_ids=IDS)))
        optimizer.step()
    return losses


def test_what_arrives_is_wrong_across_the_last_gradient_alone():
    pipe = pipe_of()
    sent, arrived, known = [], [], []
    boundary = pipe.boundaries[0]
    encode, decode = boundary.act.encode, boundary.act.decode

    def keeps_what_is_sent(x, *args):
        sent.append(x.detach().clone())
        return encode(x, *args)

    def keeps_what_arrives(message, meta, step, microbatch, *args):
        keys = [(int(i),) for i in IDS.chunk(2)[microbatch]]
        end = boundary.grad.endpoint.ends["sender"] if boundary.grad.endpoint.ends else None
        read = torch.zeros(meta.shape) if end is None else end.fields["own"].read(Slots(keys))
        known.append(read)
        x = decode(message, meta, step, microbatch, *args)
        arrived.append(x.detach().clone())
        return x

    boundary.act.encode, boundary.act.decode = keeps_what_is_sent, keeps_what_arrives
    trained(pipe, 4)
    assert len(sent) == len(arrived) == 8
    seen = 0.0
    for x, y, g in list(zip(sent, arrived, known, strict=True))[2:]:  # from the second visit on
        assert g.ne(0).any() and not torch.equal(x, y)
        e = x - y
        cosine = F.cosine_similarity(e, g, dim=-1).abs()
        # What the inner code leaves has a cosine of some tenths; 2^(1/8) - 1 of that remains.
        assert (cosine < 0.1).all(), cosine
        seen = max(seen, float(e.norm() / x.norm()))
    assert seen > 0.05  # a dead zone of a step leaves out much


def test_what_the_stages_before_have_learned_arrives():
    """With a dead zone of a step a memory stands still, and with it the first stage's part."""
    whole = trained(pipe_of(act="none", grad="none"), 60)
    along = trained(pipe_of(), 60)
    still = trained(pipe_of(act=ACT.replace(":along=step/1", "")), 60)
    assert whole[-1] < 0.7 * whole[0]
    gained = [losses[0] - losses[-1] for losses in (whole, along, still)]
    assert gained[1] > 0.9 * gained[0], gained
    assert gained[2] < 0.9 * gained[1], gained


def test_a_number_a_token_is_all_that_it_takes():
    plain, along = (pipe_of(act=act, grad=GRAD) for act in (ACT.replace(":along=step/1", ""), ACT))
    trained(plain, 3), trained(along, 3)
    sizes = [pipe.links[0].meter.train.wire_bytes for pipe in (plain, along)]
    tokens = len(IDS)
    assert 0 < sizes[1] - sizes[0] <= 3 * (tokens * 8 + 100)


@pytest.mark.parametrize(
    "act, grad, words",
    [
        (ACT, "quant:8", "along= needs the gradients of a sample's last visit"),
        (ACT, "none", "along= needs the gradients of a sample's last visit"),
        (ACT, "aqsgd:key=augmented+step:0.1", "must be an aqsgd with the same key="),
        ("none", ACT, "so it is for act_comp"),
    ],
)
def test_methods_that_do_not_go_together(act, grad, words):
    with pytest.raises(ValueError, match=words):
        pipe_of(act=act, grad=grad)


def test_along_must_be_a_compressor():
    with pytest.raises(TypeError, match="along='yes': expected a compressor, or None"):
        mpcomp.AQSGD(mpcomp.ECSQ(0.3), along="yes")


def test_a_stage_that_is_frozen_has_no_gradients():
    """Nothing comes back over the cut, so nothing is said along it, and training goes on."""
    pipe = pipe_of()
    for parameter in pipe.stages[0].parameters():
        parameter.requires_grad_(False)
    losses = trained(pipe, 10)
    assert losses[-1] < losses[0]
    assert pipe.links[1].meter.train.wire_bytes == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_what_lies_in_files_is_read_twice_in_a_step(ahead, tmp_path):
    """For the activation's message and for the gradient's, also if it was read ahead."""
    methods = [
        replace(mpcomp.parse(spec), location=str(tmp_path / way))
        for spec, way in ((ACT, "act"), (GRAD, "grad"))
    ]
    assert trained(pipe_of(*methods), 5, ahead=ahead) == trained(pipe_of(), 5)
