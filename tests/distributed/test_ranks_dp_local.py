"""Local SGD between pipelines: with cuts, loss scalers, clipping, and resumed.

What ranks find is checked in them where only they can; the first failed assert ends the test.
"""

import pytest
import torch
import torch.distributed as dist
from methods import same_bits
from ranks import preload
from test_ranks_dp import (
    assert_same_tensors,
    deep,
    memories_of,
    pipe_of,
    share_of,
    train,
)
from torch import nn

import mpcomp
from mpcomp.data_parallel.methods.local_sgd import correct

pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")

preload("test_ranks_dp")

PLAIN = "diloco:4"
SENT = "diloco:4+ef:decay=0.95+topk:0.2+quant:2"
PARTS = "diloco:4:parts=2+ef+topk:0.2+quant:4"
MEAN = "diloco:4:lr=1:momentum=0+ef+topk:0.2+sign"
CORRECTED = "diloco:4:lr=1:momentum=0:correction=0.5+ef+topk:0.2+sign"


def followed(dp, **kwargs):
    """A pipeline, and the optimizer that it follows; AdamW, as in the papers."""
    pipe = pipe_of(dp, **kwargs)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    pipe.follow(optimizer)
    return pipe, optimizer


def own_state(pipe):
    return {name: value.clone() for name, value in pipe.state_dict().items()}


# -- what is exchanged, and when ------------------------------------------------------------------


def outcomes(cases, steps):
    found = []
    for dp, options in cases:
        pipe, optimizer = followed(dp, **options)
        states, losses = [], []
        for step in range(steps):
            losses.append(train(pipe, 1, optimizer, first=step))
            states.append(own_state(pipe))
        report = pipe.report(show=False)["replicas"]
        sent = [entry["wire_bytes"] for entry in pipe.exchange.history]
        found.append((torch.cat(losses), states, report, sent, memories_of(pipe)))
    return found


CUTS = {"act_comp": "quant:8", "grad_comp": "ef+topk:0.3"}
CASES = [
    (PLAIN, {}),
    (SENT, CUTS),
    (PARTS, {**CUTS, "schedule": "ZBVZeroBubble"}),
    (CORRECTED, {}),
]


@pytest.fixture(scope="module")
def two_stages(ranks):
    return ranks(outcomes, 4, CASES, 12)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_pipelines_are_one_after_their_turn(two_stages, case):
    """Ranks at one place of their replicas; all ranks send in the same steps, and in no other."""
    schedule = mpcomp.parse(CASES[case][0]).sync_schedule
    shares = schedule.assign_parts({name: p.numel() for name, p in deep().named_parameters()})
    seen = [of_rank[case] for of_rank in two_stages]
    for rank, (losses, states, report, sent, _) in enumerate(seen):
        assert same_bits(losses, seen[0][0])  # of all replicas together
        for step, state in enumerate(states):
            due = schedule.part_due(step)
            other = seen[(rank + 2) % 4][1][step]
            for name, value in state.items():
                assert same_bits(value, other[name]) == (due == shares[name]), (step, name)
            assert (sent[step] > 0) == any(shares[name] == due for name in state)
        assert report["steps"] == 12 == len(sent)
        assert report["wire_bytes"] == sum(sum(one[3]) for one in seen)
        assert report["dense_bytes"] == 12 * 2 * 4 * sum(p.numel() for p in deep().parameters())
        assert 0 < report["ratio"] <= 1 / 4
    assert seen[0][0][-4:].mean() < seen[0][0][:4].mean()


def drifted(dp, steps):
    """The state of one period: weights, first moments, and how far each weight was moved."""
    pipe = pipe_of(dp)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    own = {}

    def note(*_):
        own.update({name: p.detach().clone() for name, p in pipe.named_parameters()})

    optimizer.register_step_post_hook(note)  # before what replicas do then
    pipe.follow(optimizer)
    train(pipe, steps, optimizer)
    moved = {p: p.detach() - own[name] for name, p in pipe.named_parameters()}
    before = {n: optimizer.state[p]["exp_avg"].clone() for n, p in pipe.named_parameters()}
    correct(optimizer, moved, 4, 0.5)
    after = {n: optimizer.state[p]["exp_avg"].clone() for n, p in pipe.named_parameters()}
    return own_state(pipe), before, after


@pytest.mark.slow
def test_first_moments_are_corrected_when_replicas_have_met(ranks):
    """By where each was moved to from where it was itself; weights and bytes are those without."""
    for steps in (3, 4):
        plain, corrected = (ranks(drifted, 2, dp, steps) for dp in (MEAN, CORRECTED))
        for (weights, before, after), (also, found, _) in zip(plain, corrected, strict=True):
            assert_same_tensors(also, weights)
            assert_same_tensors(found, after if steps == 4 else before)
            moved = any(not same_bits(before[name], after[name]) for name in before)
            assert moved == (steps == 4)


def test_two_stages_go_as_one_does(ranks, two_stages):
    """Bit for bit, where the cuts are not compressed."""
    whole = ranks(outcomes, 2, CASES[:1], 12)
    for rank, found in enumerate(two_stages):
        losses, states, _, _, _ = whole[rank // 2][0]
        assert same_bits(found[0][0], losses)
        for ours, theirs in zip(found[0][1], states, strict=True):
            for name, value in ours.items():
                assert same_bits(value, theirs[name]), name


def on_machines(dp, per_machine):
    pipe, optimizer = followed(dp, network=mpcomp.ReplicaNetwork(per_machine=per_machine))
    states, norms = [], []
    for step in range(6):
        pipe.forward_backward(*share_of(pipe, step))
        norms.append(float(mpcomp.clip_grad_norm_(pipe, 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        states.append(own_state(pipe))
    return states, norms


def test_replicas_of_one_machine_train_as_with_plain_means(ranks):
    """Two stages, clipped by the norm that all have in common; and with the same bits."""
    together = ranks(on_machines, 4, "diloco:2:lr=1:momentum=0", 2)
    plain = ranks(on_machines, 4, "none", 1)
    for rank, (states, norms) in enumerate(together):
        torch.testing.assert_close(norms, plain[rank][1], rtol=1e-4, atol=1e-6)
        for ours, mates, means in zip(
            states, together[(rank + 2) % 4][0], plain[rank][0], strict=True
        ):
            for name, value in ours.items():
                assert same_bits(value, mates[name]), name
                torch.testing.assert_close(value, means[name], rtol=1e-3, atol=1e-4)


def clipped():
    """Of a replica's own gradient, all stages of it together; and no other's."""
    pipe, _ = followed(PLAIN)
    pipe.forward_backward(*share_of(pipe, 0))
    norms = [torch.linalg.vector_norm(p.grad) for p in pipe.parameters()]
    mine = pipe.collect([float(torch.stack(norms).square().sum()), pipe.replica])
    norm = mpcomp.clip_grad_norm_(pipe, 1e9)
    squares = [square for square, replica in mine if replica == pipe.replica]
    assert len(squares) == 2
    torch.testing.assert_close(float(norm), sum(squares) ** 0.5, rtol=1e-6, atol=0)
    return float(norm)


def test_each_replica_is_clipped_by_its_own_norm(ranks):
    norms = ranks(clipped, 4)
    assert norms[0] == norms[1] != norms[2] == norms[3]


def frozen():
    """A stage with nothing to train has nothing to send, and keeps pace."""
    pipe, optimizer = followed(
        SENT,
        model=lambda: deep().requires_grad_(False).append(nn.Linear(5, 5)),
        split=["3"],
    )
    train(pipe, 8, optimizer)
    return pipe.exchange.report(), own_state(pipe)


def test_a_frozen_stage_keeps_pace(ranks):
    results = ranks(frozen, 4)
    assert [report["steps"] for report, _ in results] == [8] * 4
    assert [report["dense_bytes"] for report, _ in results] == [0, 8 * 4 * 30] * 2
    for rank in range(4):
        assert_same_tensors(results[rank][1], results[rank ^ 2][1])


# -- steps that do not count ----------------------------------------------------------------------


def overflowing():
    """A gradient of one stage of one replica is infinite in the third call."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    pipe, optimizer = followed(SENT, scaler=scaler)
    counts, states = [], []
    for step in range(9):
        hook = None
        if step == 2 and dist.get_rank() == 3:
            hook = next(iter(pipe.parameters())).register_hook(lambda g: g * torch.inf)
        pipe.forward_backward(*share_of(pipe, step % 4))
        if hook is not None:
            hook.remove()
        scaler.unscale_(optimizer)
        mpcomp.clip_grad_norm_(pipe, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        counts.append(pipe.exchange.step)
        states.append(own_state(pipe))
    return counts, states


def test_an_overflow_anywhere_is_no_step_of_any(ranks):
    results = ranks(overflowing, 4)
    for rank, (counts, states) in enumerate(results):
        assert counts == [1, 2, 2, 3, 4, 5, 6, 7, 8]
        alike = [
            all(same_bits(value, other[name]) for name, value in own.items())
            for own, other in zip(states, results[rank ^ 2][1], strict=True)
        ]
        assert alike == [step in (4, 8) for step in range(9)]


def accumulated():
    """Calls within `no_sync` are no steps, nor are those that no step of the optimizer follows."""
    pipe, optimizer = followed("diloco:2")
    with pipe.no_sync():
        pipe.forward_backward(*share_of(pipe, 0))
        optimizer.step()
        optimizer.zero_grad()
    assert pipe.exchange.step == 0 and not memories_of(pipe)
    with torch.no_grad():  # so that they have one anchor
        for parameter in pipe.parameters():
            dist.broadcast(parameter.detach(), 0)
    for step in range(4):
        with pipe.no_sync():
            pipe.forward_backward(*share_of(pipe, 2 * step))
        pipe.forward_backward(*share_of(pipe, 2 * step + 1))
        if step % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert pipe.exchange.step == 2
    return own_state(pipe)


def test_a_step_of_the_optimizer_is_a_step(ranks):
    first, second = ranks(accumulated, 2)
    assert_same_tensors(first, second)


def refused():
    said = []
    pipe = pipe_of(PLAIN)
    for _ in range(2):
        try:
            pipe.forward_backward(*share_of(pipe, 0))
        except ValueError as error:
            said.append(str(error))
    assert all(p.grad is None for p in pipe.parameters())
    try:
        pipe_of(PLAIN, shard=True)
    except ValueError as error:
        said.append(str(error))
    return said


def test_what_is_refused(ranks):
    for said in ranks(refused, 2):
        assert len(said) == 3
        assert all("none was named: call follow(optimizer)" in each for each in said[:2])
        assert "replicas that train alone need all of them each" in said[2]


# -- checkpoints ----------------------------------------------------------------------------------


def goes_on(dps, root):
    for number, dp in enumerate(dps):
        folder = f"{root}/{number}"
        straight, optimizer = followed(dp, **CUTS)
        train(straight, 6, optimizer)
        straight.save(folder, optimizer=optimizer)
        expected = train(straight, 5, optimizer, first=6)
        resumed, other = followed(dp, seed=1, **CUTS)
        train(resumed, 3, other)  # which must leave nothing
        resumed.load(folder, optimizer=other)
        resumed.zero_grad()
        assert same_bits(train(resumed, 5, other, first=6), expected), dp
        assert_same_tensors(resumed.state_dict(), straight.state_dict())
        assert_same_tensors(memories_of(resumed), memories_of(straight))
        sent, again = ([e["wire_bytes"] for e in p.exchange.history] for p in (straight, resumed))
        assert again[-5:] == sent[-5:] and resumed.exchange.step == 11
        ours, theirs = (p.report(show=False)["replicas"] for p in (straight, resumed))
        assert ours["ratio"] == theirs["ratio"]


@pytest.mark.slow
def test_going_on_in_the_middle_of_a_period_is_as_if_never_stopped(ranks, tmp_path):
    ranks(goes_on, 4, [SENT, PARTS, CORRECTED], str(tmp_path))


def moved(root):
    """Two replicas of two ranks go on as four of one, at the anchor that they had."""
    pipe, optimizer = followed(SENT, replicas=2)
    train(pipe, 6, optimizer)
    pipe.save(root, optimizer=optimizer)
    anchors = {k: v for k, v in memories_of(pipe).items() if k.endswith(("anchor", "velocity"))}
    other, optimizer = followed(SENT, replicas=4, seed=1)
    other.load(root, optimizer=optimizer)
    held = memories_of(other)
    assert anchors and other.exchange.step == 6
    for name, value in anchors.items():
        assert same_bits(held[name], value), name
    train(other, 2, optimizer, first=6)
    return own_state(other)


@pytest.mark.slow
def test_an_anchor_goes_with_other_replicas(ranks, tmp_path):
    results = ranks(moved, 4, str(tmp_path / "run"))
    for state in results[1:]:
        assert_same_tensors(state, results[0])
