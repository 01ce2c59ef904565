"""Messages that are damaged on their way, and copies that come apart, over several processes."""

import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import mlp, rows

import mpcomp
from mpcomp import TensorMeta
from mpcomp.comm.transport import GroupChannel
from mpcomp.core.wire import COMPRESSED, Form, Header

#: Of what ends at once.
TIMEOUT_S = 60.0


def pipe_of(**kwargs):
    torch.manual_seed(0)
    options = {"act_comp": "ef21+topk:0.3", "grad_comp": "ef+topk:0.3", "timeout": TIMEOUT_S}
    return mpcomp.pipeline(mlp(), 2, loss_fn=F.cross_entropy, **{**options, **kwargs})


def step(pipe, number):
    x, y = rows(6, number)
    return pipe.forward_backward(x, y, sample_ids=range(6))


def flipped(message):
    message = message.clone()
    message[-3] ^= 16
    return message


def of_another_layout():
    form = Form((TensorMeta((30,)),), checked=True)
    return form.frame(Header(COMPRESSED, step=1), (torch.ones(30),))


def spoilt_state(pipe):
    """Turns a bit of what the receiver of the activations keeps."""
    end = pipe.links[0].endpoint.ends.get("receiver")
    if end is not None:
        store = end.fields[end.estimate].store
        row = store.read([(1, 0)])
        row.view(torch.int32)[0, 0] ^= 1
        store.write([(1, 0)], row)


def spoilt_weight(pipe):
    if dist.get_rank() == 0:
        with torch.no_grad():
            next(pipe.parameters()).view(torch.int32)[0, 1] ^= 1


DAMAGES = {
    "flipped": flipped,
    "shorter": lambda message: message[:-5].clone(),
    "longer": lambda message: of_another_layout(),
    "empty": lambda message: message[:0].clone(),
}


def errors(connections):
    """What each rank says of each damage, one pipeline after another; then a good one."""
    found, send = {}, GroupChannel.send
    for name, damage in DAMAGES.items():
        pipe = pipe_of(checks="message", connections=connections)
        step(pipe, 0)

        def damaged(channel, microbatch, message, damage=damage):
            if channel.name == "boundary 0 act" and microbatch == 1:
                message = damage(message)
            send(channel, microbatch, message)

        GroupChannel.send = damaged
        found[name] = error_of(lambda pipe=pipe: step(pipe, 1))
        GroupChannel.send = send
    pipe = pipe_of()
    step(pipe, 0)
    spoilt_state(pipe)
    found["state"] = error_of(lambda: step(pipe, 1))
    found["refused"] = error_of(lambda: pipe_of(checks="state" if dist.get_rank() else "message"))
    good = [pipe_of(checks=checks) for checks in ("none", "message")]
    return found, [[float(step(pipe, i)) for i in range(3)] for pipe in good]


def error_of(call):
    begin = time.monotonic()
    try:
        call()
    except Exception as error:
        assert time.monotonic() - begin < TIMEOUT_S, "it waited in vain"
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("connections", [1, 3])
def test_damage_is_an_error_that_names_it_on_every_rank(ranks, connections):
    """A message that is longer than it should be would end the process, on gloo."""
    (first, losses), (last, again) = ranks(errors, 2, connections)
    assert losses == again and losses[0] == losses[1]
    where = "boundary 0 act, step 1, microbatch 1, from stage 0: message"
    for name in DAMAGES:
        assert last[name][0] == "RuntimeError" and last[name][1].startswith(where), last[name]
        assert first[name][0] == "PeerError", first[name]
        assert first[name][1].startswith("rank 1 (stage 1) failed"), first[name]
        assert where in first[name][1]
    for found in (first, last):
        kind, words = found["state"]
        assert kind == "RuntimeError"
        assert "boundary 0 act, step 1: the two ends no longer" in words
        assert "slot (1, 0) (ef21+topk:0.3)" in words
        assert 'rank 1 has checks="state", rank 0 has "message"' in found["refused"][1]


def replicas():
    found = {}
    for checks in ("state", "none"):
        pipe = pipe_of(replicas=2, checks=checks, act_comp="topk:0.3", grad_comp=None)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for number in range(2):
            step(pipe, number)
            optimizer.step()
        spoilt_weight(pipe)
        pipe.num_steps = 100
        found[checks] = error_of(lambda pipe=pipe: step(pipe, 2))
    return found


@pytest.mark.slow
def test_replicas_that_have_come_apart_are_named_on_every_rank(ranks):
    for found in ranks(replicas, 4):
        kind, words = found["state"]
        assert kind == "RuntimeError" and found["none"] == ("", "")
        assert "replicas have come apart at step 100" in words
        assert "(rank 2 and rank 0) are not the same" in words
