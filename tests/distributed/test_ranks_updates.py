"""Updates within a step, in many processes: the numbers of one, and a pipeline that goes on."""

import time

import pytest
import torch
import torch.nn.functional as F
from methods import same_bits
from models import CONV_SPLIT, MLP_SPLIT, convnet, images, mlp, rows
from runs import deep

import mpcomp

UPDATES = 6


def train(model_of, split, batch_of, of_each, options, alone=False, num_steps=2):
    """Losses, weights and bytes."""
    torch.manual_seed(0)
    chunks = UPDATES * of_each
    if not alone:
        options = {"timeout": 60.0, **options}
    options = {"engine": "local" if alone else None, "seed": 5, **options}
    pipe = mpcomp.pipeline(model_of(), chunks, split=split, loss_fn=F.cross_entropy, **options)
    optimizer = torch.optim.NAdam(pipe.parameters(), lr=1e-2, betas=(0.99, 0.999))

    def update():
        for stage in pipe.stages:
            torch.nn.utils.clip_grad_norm_(stage.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    losses = [
        pipe.forward_backward(*batch_of(2 * chunks, step), update=update, updates=UPDATES)
        for step in range(num_steps)
    ]
    # The next steps, without updates in between, are as ever.
    losses.append(pipe.forward_backward(*batch_of(2 * chunks, num_steps)))
    return torch.stack(losses), dict(pipe.merge().state_dict()), pipe.wire_bytes


EXACT = {"act_comp": "none", "grad_comp": "none"}
CODED = {"act_comp": "auto:scratch", "grad_comp": "auto:scratch"}
STATE = {"act_comp": "ef21+topk:0.3", "grad_comp": "ef+topk:0.3"}
CASES = [
    (mlp, MLP_SPLIT, rows, 1, EXACT),
    (mlp, MLP_SPLIT, rows, 2, STATE),
    (deep, 3, rows, 3, CODED),
    (convnet, CONV_SPLIT, images, 2, {**STATE, "recompute": True}),
    (convnet, CONV_SPLIT, images, 1, {"act_comp": "topk:0.3", "grad_comp": "same"}),
]


def train_all(cases):
    return [train(*case) for case in cases]


def test_many_processes_give_the_numbers_of_one(ranks):
    """However deep the schedule is told to go, as the lag says how old weights are."""
    depths = [{"in_flight": depth} for depth in (1, "auto")]
    cases = [(*CASES[1][:-1], {**CASES[1][-1], **depth}) for depth in depths]
    by_rank = ranks(train_all, 3, [*CASES, *cases])
    for i, case in enumerate([*CASES, CASES[1], CASES[1]]):
        losses, weights, sent = train(*case, alone=True)
        for results in by_rank:
            found, state, found_sent = results[i]
            assert same_bits(found, losses)
            assert found_sent == sent
            assert all(same_bits(state[name], value) for name, value in weights.items())


def refuse_all(cases):
    for options, message in cases:
        chosen = {"loss_fn": F.cross_entropy, "timeout": 60.0, **options}
        pipe = mpcomp.pipeline(deep(), 4, **chosen)
        with pytest.raises(ValueError, match=message):
            pipe.forward_backward(*rows(8), update=lambda: None, updates=2)
        pipe.forward_backward(*rows(8))  # nothing has been sent, and all goes on


def test_what_updates_cannot_go_with(ranks):
    cases = [
        ({"schedule": "1F1B"}, "a schedule of torch's"),
        ({"in_flight_bytes": 10**6}, "in_flight_bytes"),
        ({"split": 2, "replicas": 2}, "replicas"),
    ]
    ranks(refuse_all, 4, cases)


def other_numbers():
    pipe = mpcomp.pipeline(deep(), 4, loss_fn=F.cross_entropy, timeout=60.0)
    with pytest.raises(ValueError, match="given different data"):
        pipe.forward_backward(*rows(8), update=lambda: None, updates=2 + 2 * pipe.rank)


def test_ranks_that_mean_to_make_other_updates_do_not_begin(ranks):
    ranks(other_numbers, 2)


def order_of_updates():
    """Whether this rank had made updates before the last rank had begun its last one."""
    pipe = mpcomp.pipeline(deep(), 16, loss_fn=F.cross_entropy, timeout=60.0)
    moments = []

    def update():
        if pipe.rank == pipe.num_ranks - 1:
            time.sleep(0.05)
        moments.append(time.monotonic())
        pipe.zero_grad()

    pipe.forward_backward(*rows(32), update=update, updates=16)
    return moments


def test_no_rank_waits_for_the_end_of_all_others(ranks):
    first, last = ranks(order_of_updates, 2)
    assert len(first) == len(last) == 16
    assert first[0] < last[-1]  # of one machine, which has one clock
