"""Updates within a step, in many processes: the numbers of one, and a pipeline that goes on."""

import time
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from everyday import slow
from lm_runs import gpt2, text
from methods import same_bits
from models import CONV_SPLIT, MLP_SPLIT, convnet, images, mlp, rows
from runs import deep
from torch import nn

import mpcomp

UPDATES = 6


def train(model_of, split, batch_of, of_each, options, alone=False, num_steps=2):
    """Losses, weights and bytes; ``every`` so many updates the optimizer steps."""
    torch.manual_seed(0)
    chunks = UPDATES * of_each
    if not alone:
        options = {"timeout": 60.0, **options}
    options = {"engine": "local" if alone else None, "seed": 5, **options}
    every = options.pop("every", 1)
    loss_fn = options.pop("loss_fn", F.cross_entropy)
    if isinstance(loss_fn, type):
        loss_fn = loss_fn()
    pipe = mpcomp.pipeline(model_of(), chunks, split=split, loss_fn=loss_fn, **options)
    own = [*loss_fn.parameters()] if isinstance(loss_fn, nn.Module) else []
    optimizer = torch.optim.NAdam([*pipe.parameters(), *own], lr=1e-2, betas=(0.99, 0.999))
    number = 0

    def update():
        nonlocal number
        number += 1
        if number % every:
            return
        for stage in pipe.stages:
            torch.nn.utils.clip_grad_norm_(stage.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=every == 1)

    def batch(step):
        return batch_of(2 * chunks, step) if pipe.has_data else ()

    losses = [
        pipe.forward_backward(*batch(step), update=update, updates=UPDATES)
        for step in range(num_steps)
    ]
    # The next steps, without updates in between, are as ever.
    losses.append(pipe.forward_backward(*batch(num_steps)))
    state = dict(pipe.merge().state_dict())
    state |= {f"loss {i}": p.detach() for i, p in enumerate(own) if not p.is_meta}
    return torch.stack(losses), state, pipe.wire_bytes


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


def tied():
    """Both ends share a weight, and the head's bias is the last stage's own."""
    model = nn.Sequential(
        nn.Embedding(11, 8),
        *(nn.Sequential(nn.Linear(8, 13), nn.Tanh(), nn.Linear(13, 8)) for _ in range(4)),
        nn.Linear(8, 11),
    )
    model[-1].weight = model[0].weight
    return model


def tied_and_frozen():
    model = tied()
    model[0].requires_grad_(False)
    return model


def tied_alone():
    """The last stage has no weight but the first one's."""
    model = tied()
    model[-1].bias = None
    return model


def tokens(count, seed):
    ids = torch.randint(11, (count, 6), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def token_loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


class Temperature(nn.Module):
    """A loss with a parameter, which is where the last stage is."""

    def __init__(self):
        super().__init__()
        self.t = nn.Parameter(torch.tensor(0.5))

    def forward(self, output, target):
        return token_loss(output * self.t.exp(), target)


OWN = {"loss_fn": token_loss}
FIRST = {"data": "first"}
TIED = {
    2: [
        (tied, 2, tokens, 1, OWN),
        (tied, 2, tokens, 2, {**OWN, **STATE}),
        (tied, 2, tokens, 3, {**OWN, **CODED, "every": 2}),
        (tied, 2, tokens, 2, {"loss_fn": Temperature, "recompute": True}),
        (tied_and_frozen, 2, tokens, 2, {**OWN, **STATE}),
        (tied_alone, 2, tokens, 1, OWN),
        (gpt2, 2, text, 2, {"loss_fn": None, **STATE}),  # with dropout and padding
        (gpt2, 2, text, 2, {"loss_fn": None, **STATE, **FIRST}),
        (deep, 2, rows, 2, {**STATE, **FIRST}),  # whose ends share nothing
    ],
    3: [
        (tied, 3, tokens, 1, {**OWN, **STATE}),
        (tied, 3, tokens, 2, {**OWN, "recompute": True}),
        (gpt2, 3, text, 1, {"loss_fn": None, **CODED}),
    ],
}


@pytest.mark.parametrize("num_ranks", [2, slow(3)])
def test_a_weight_of_both_ends_moves_as_in_one_process(ranks, num_ranks):
    """Losses, weights and bytes; by which weights is asked in `api/test_updates_of_ties`."""
    cases = TIED[num_ranks]
    by_rank = ranks(train_all, num_ranks, cases)
    for i, case in enumerate(cases):
        losses, weights, sent = train(*case, alone=True)
        for results in by_rank:
            found, state, found_sent = results[i]
            assert same_bits(found, losses), i
            assert found_sent == sent
            assert all(same_bits(weights[name], value) for name, value in state.items()), i
        assert any(results[i][1].keys() == weights.keys() for results in by_rank)


def resumed(folder):
    """Losses after a checkpoint between two calls, without one and with it."""

    def made():
        pipe = mpcomp.pipeline(
            tied(), 2 * UPDATES, split=2, loss_fn=token_loss, timeout=60.0, seed=5, **STATE
        )
        return pipe, torch.optim.NAdam(pipe.parameters(), lr=1e-2, betas=(0.99, 0.999))

    def call(pipe, optimizer, seed):
        def update():
            optimizer.step()
            optimizer.zero_grad()

        x, y = tokens(4 * UPDATES, seed)
        return float(pipe.forward_backward(x, y, update=update, updates=UPDATES))

    pipe, optimizer = made()
    call(pipe, optimizer, 0)
    pipe.save(folder, optimizer=optimizer)
    losses = [call(pipe, optimizer, seed) for seed in (1, 2)]
    again, other = made()
    again.load(folder, optimizer=other)
    return losses, [call(again, other, seed) for seed in (1, 2)]


def test_a_checkpoint_between_calls_goes_on_with_the_same_losses(ranks, tmp_path):
    for losses, found in ranks(resumed, 2, str(tmp_path)):
        assert losses == found


def under_way():
    """On the first rank: microbatches that each stage has in its forwards, at most."""
    pipe = mpcomp.pipeline(tied(), 16, split=3, loss_fn=token_loss, timeout=60.0)
    stages, most, now = pipe.engine._stages, Counter(), Counter()

    def counted(stage, name, by):
        run = getattr(stage, name)

        def method(*args, **kwargs):
            now[stage.stage_index] += by
            most[stage.stage_index] = max(most[stage.stage_index], now[stage.stage_index])
            return run(*args, **kwargs)

        setattr(stage, name, method)

    for stage in stages:
        counted(stage, "forward_one_chunk", 1)
        counted(stage, "backward_one_chunk", -1)
    pipe.forward_backward(*tokens(32, 0), update=pipe.zero_grad, updates=8)
    return dict(most), max(len(stage.stashed._apart) if stage.stashed else 0 for stage in stages)


@pytest.mark.slow
def test_as_many_are_under_way_as_lags_allow(ranks):
    """Of three ranks, two microbatches an update: the last stage has one at a time."""
    first, second, third = ranks(under_way, 3)
    assert first == ({0: 7, 3: 1}, 0)
    assert second == ({1: 5}, 0) and third == ({2: 3}, 0)


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
