"""Replicas of a pipeline: one reduction a step, equal weights, the gradient of all their data."""

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from everyday import slow
from methods import same_bits
from models import images, rows, sgd
from runs import SCHEDULES, SINGLE, deep, deep_convnet, links_of
from test_ranks_faults import AT_ONCE_S, PATIENT_S, die, ends, on_microbatch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import mpcomp
from mpcomp import ReplicaSampler

pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")

#: Rows of the two replicas' shares of a batch.
SHARES = (10, 6)


def pipe_of(schedule=None, chunks=4, *, model=deep, alone=False, **kwargs):
    torch.manual_seed(0)
    stages = 2 if schedule in SINGLE else 4
    options = {
        "split": [str(8 * (i + 1) // stages - 1) for i in range(stages - 1)],
        "loss_fn": F.cross_entropy,
    }
    if alone:
        options["engine"] = "local"
    else:
        options.update(schedule=schedule, replicas=2, timeout=60.0)
    return mpcomp.pipeline(model(), chunks, **{**options, **kwargs})


def share_of(pipe, x, y):
    """This replica's rows, and their numbers in the whole batch."""
    a, b = ((0, SHARES[0]), (SHARES[0], sum(SHARES)))[pipe.replica]
    return x[a:b], y[a:b], torch.arange(a, b)


def train_replicas(schedules, kwargs, steps=5):
    """Some steps of each; with a communication hook that writes down each of its calls."""
    results = []
    for schedule in schedules:
        pipe = pipe_of(schedule, **kwargs)
        reducers = pipe.replica_sync.reducers
        calls = [[] for _ in reducers]

        for ddp, seen in zip(reducers, calls, strict=True):
            group = pipe.mesh.replica_group

            def own(seen, bucket, group=group):
                seen.append((bucket.index(), bucket.is_last()))
                return allreduce_hook(group, bucket)

            ddp.register_comm_hook(seen, own)
        optimizer = sgd(pipe)
        losses, per_step = [], []
        for step in range(steps):
            x, y, ids = share_of(pipe, *rows(sum(SHARES), step))
            before = [len(seen) for seen in calls]
            losses.append(pipe.forward_backward(x, y, sample_ids=ids))
            per_step.append([seen[n:] for seen, n in zip(calls, before, strict=True)])
            optimizer.step()
            optimizer.zero_grad()
        own = {k: v.clone() for k, v in pipe.state_dict().items()}
        results.append(
            (
                torch.stack(losses),
                own,
                pipe.merge().state_dict(),
                per_step,
                (pipe.wire_bytes, pipe.dense_bytes),
                links_of(pipe),
            )
        )
    return results


def close(a, b, tolerance=1e-6):
    bound = tolerance * float(b.abs().max())
    torch.testing.assert_close(a, b, rtol=0, atol=max(bound, 1e-12))


def train_alone(**kwargs):
    """One process, the whole batch, twice the microbatches."""
    pipe = pipe_of(chunks=8, alone=True, **kwargs)
    optimizer = sgd(pipe)
    losses = []
    for step in range(5):
        losses.append(pipe.forward_backward(*rows(sum(SHARES), step)))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), pipe.merge().state_dict()


def check_replicas(results, schedules):
    """Ranks 0 and 2, 1 and 3 hold the same stages: the same bits. Returns rank 0's results."""
    for i, schedule in enumerate(schedules):
        for rank in range(4):
            losses, own, whole, per_step, sent, _ = results[rank][i]
            assert same_bits(losses, results[0][i][0]), schedule
            assert sent == results[0][i][4]
            partner = results[rank ^ 2][i][1]
            assert own.keys() == partner.keys() and own, schedule
            for name, value in own.items():
                assert same_bits(value, partner[name]), (schedule, name)
                assert same_bits(value, whole[name]), (schedule, name)
            assert len(per_step) == len(losses)
            for step in per_step:
                assert len(step) == (1 if schedule in SINGLE else 2)  # stages of a rank
                for stage in step:
                    numbers = [index for index, _ in stage]
                    assert sorted(numbers) == list(range(len(numbers))), (schedule, step)
                    assert [last for _, last in stage].count(True) == 1
    return results[0]


@pytest.mark.parametrize("schedules", [slow(SCHEDULES[:4]), SCHEDULES[4:]], ids=str)
def test_replicas_train_as_one_process_on_all_their_data(ranks, schedules):
    """Of 10 and 6 rows; the mean is that of 16. Within 1e-6 of a tensor's largest weight."""
    results = ranks(train_replicas, 4, schedules, {})
    losses, whole = train_alone()
    for schedule, ours in zip(schedules, check_replicas(results, schedules), strict=True):
        torch.testing.assert_close(ours[0], losses, rtol=1e-6, atol=0)
        for name, value in whole.items():
            close(ours[2][name], value)
            assert not same_bits(value, deep_weights()[name]), schedule


def deep_weights():
    torch.manual_seed(0)
    return deep().state_dict()


@pytest.mark.parametrize(
    "act, grad", [slow("topk:0.3", "ef21+topk:0.3"), ("aqsgd+quant:4", "ef+randomk:0.3")]
)
def test_compressed_replicas_stay_equal_and_remember_their_own(ranks, act, grad):
    """Weights are equal, links are not: each replica has its own rows."""
    schedules = (None, "ZBVZeroBubble")
    kwargs = {"act_comp": act, "grad_comp": grad}
    results = ranks(train_replicas, 4, schedules, kwargs, 10)
    for i, ours in enumerate(check_replicas(results, schedules)):
        wire, dense = ours[4]
        assert 0 < wire < dense
        assert ours[0][-1] < ours[0][0]
        links = [results[rank][i][5] for rank in range(4)]
        for rank in (0, 1):
            for name, state in links[rank].items():
                for key in state:
                    if key.endswith("rows0"):
                        assert not same_bits(state[key], links[rank + 2][name][key])
                    if key.endswith("keys") and act.startswith("aqsgd") and name.endswith("act"):
                        assert sorted(state[key].flatten().tolist()) == list(range(10))
                        theirs = links[rank + 2][name][key]
                        assert sorted(theirs.flatten().tolist()) == list(range(10, 16))


def same_data():
    """Both replicas are given the same rows."""
    pipe = pipe_of("ZBVZeroBubble", act_comp="ef+randomk:0.3", grad_comp="ef+randomblock:0.3")
    pipe.forward_backward(*rows(8))
    return {name: state["sender.rows0"] for name, state in links_of(pipe).items() if state}


def test_replicas_draw_by_themselves(ranks):
    """What is left out differs from replica to replica, so that their mean has more of it."""
    results = ranks(same_data, 4)
    for rank in (0, 1):
        assert results[rank].keys() == results[rank + 2].keys() != set()
        for name, rows0 in results[rank].items():
            assert not torch.equal(rows0 == 0, results[rank + 2][name] == 0)


@pytest.mark.slow
def test_a_sum_is_summed_over_replicas(ranks):
    """reduction="sum": the gradient of all rows' sum."""
    kwargs = {"loss_fn": nn.CrossEntropyLoss(reduction="sum")}
    schedules = ("Interleaved1F1B", "InterleavedZeroBubble")
    results = ranks(train_replicas, 4, schedules, kwargs)
    losses, whole = train_alone(**kwargs)
    for ours in check_replicas(results, schedules):
        torch.testing.assert_close(ours[0][:3], losses[:3], rtol=1e-5, atol=0)
        for name, value in whole.items():
            close(ours[2][name], value, 1e-4)  # steps 16 times as long
    assert losses[0] > 10


# -- accumulation, clipping, scaling --------------------------------------------------------------


def accumulate(schedules, how):
    """Gradients of three calls, of which the last one is averaged; or each is."""
    found = []
    for schedule in schedules:
        pipe = pipe_of(schedule)
        for call in range(3):
            x, y, _ = share_of(pipe, *rows(sum(SHARES), call))
            quiet = how == "no_sync" and call < 2
            with pipe.no_sync() if quiet else contextlib.nullcontext():
                pipe.forward_backward(x, y)
            if quiet:
                own = next(iter(pipe.parameters())).grad.clone()
        norm = mpcomp.clip_grad_norm_(pipe, 0.1)
        grads = {name: p.grad.clone() for name, p in pipe.named_parameters()}
        found.append((grads, norm, own if how == "no_sync" else None))
    return found


@pytest.mark.parametrize("how", ["no_sync", slow("each")])
def test_accumulation_over_calls(ranks, how):
    schedules = (None, "ZBVZeroBubble")
    alone = pipe_of(chunks=8, alone=True)
    for call in range(3):
        alone.forward_backward(*rows(sum(SHARES), call))
    norm = mpcomp.clip_grad_norm_(alone, 0.1)
    expected = {name: p.grad for name, p in alone.named_parameters()}
    results = ranks(accumulate, 4, schedules, how)
    for i in range(len(schedules)):
        for rank in range(4):
            grads, own_norm, own = results[rank][i]
            assert same_bits(own_norm, results[0][i][1])
            torch.testing.assert_close(own_norm, norm, rtol=1e-6, atol=0)
            for name, grad in grads.items():
                close(grad, expected[name], 3e-6)
                assert same_bits(grad, results[rank ^ 2][i][0][name])
            if own is not None:  # until the last call each replica had its own
                assert not same_bits(own, results[rank ^ 2][i][2])


def overflowing():
    """A gradient is infinite in one stage of one replica: all skip."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    pipe = pipe_of(
        "ZBVZeroBubble", scaler=scaler, act_comp="ef21+topk:0.3", grad_comp="ef+topk:0.3"
    )
    optimizer = sgd(pipe)
    skipped, scales = [], []
    for step in range(4):
        x, y, _ = share_of(pipe, *rows(sum(SHARES), step))
        handles = []
        if step == 2 and dist.get_rank() == 3:
            parameter = next(iter(pipe.parameters()))
            handles = [parameter.register_hook(lambda g: g * torch.inf)]
        pipe.forward_backward(x, y)
        for handle in handles:
            handle.remove()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped.append(pipe.step_skipped)
        scales.append(scaler.get_scale())
    return skipped, scales, {k: v.clone() for k, v in pipe.merge().state_dict().items()}


def test_an_overflow_in_one_replica_is_skipped_by_all(ranks):
    results = ranks(overflowing, 4)
    for skipped, scales, state in results:
        assert skipped == [False, False, True, False] and scales == [64.0, 64.0, 32.0, 32.0]
        assert all(value.isfinite().all() for value in state.values())
        for name, value in results[0][2].items():
            assert same_bits(value, state[name])


def changed(what):
    """Parameters change after replicas were connected."""
    pipe = pipe_of()
    for parameter in list(pipe.parameters())[:1]:
        if what == "frozen":
            parameter.requires_grad_(False)
    if what == "bf16":
        pipe.to(torch.bfloat16)
    x, y, _ = share_of(pipe, *rows(sum(SHARES), 0))
    loss = pipe.forward_backward(x.bfloat16() if what == "bf16" else x, y)
    return loss, [p.grad.clone() for p in pipe.parameters()]


@pytest.mark.parametrize("what", ["frozen", "bf16"])
def test_changed_parameters_after_replicas_were_connected_are_an_error(ranks, what):
    """DDP's hooks would not see them: replicas would drift apart without a word."""
    for kind, said in ranks(changed, 4, what, may_fail=True):
        assert kind in ("ValueError", "PeerError")
        assert "unfrozen or given another dtype after the replicas were connected" in said


def half():
    pipe = pipe_of(model=lambda: deep_convnet().bfloat16(), act_comp="topk:0.3")
    x, y, _ = share_of(pipe, *images(sum(SHARES), 0))
    loss = pipe.forward_backward(x.bfloat16(), y)
    pipe.evaluate([(x.bfloat16(), y)])
    return loss, [p.grad.clone() for p in pipe.parameters()], list(pipe.buffers())


@pytest.mark.slow
def test_replicas_of_a_model_in_bf16(ranks):
    results = ranks(half, 4)
    for rank, (loss, grads, buffers) in enumerate(results):
        assert loss.dtype == torch.bfloat16 and same_bits(loss, results[0][0])
        for a, b in zip(grads + buffers, results[rank ^ 2][1] + results[rank ^ 2][2], strict=True):
            assert a.dtype in (torch.bfloat16, torch.int64) and same_bits(a, b)


# -- evaluation -----------------------------------------------------------------------------------


def evaluate():
    pipe = pipe_of("Interleaved1F1B", model=deep_convnet, act_comp="topk:0.3")
    optimizer = sgd(pipe)
    for step in range(2):
        x, y, _ = share_of(pipe, *images(sum(SHARES), step))
        pipe.forward_backward(x, y)
        optimizer.step()
        optimizer.zero_grad()
    counts = ((8, 5), (6, 2))[pipe.replica]
    own = [images(count, 10 * pipe.replica + count) for count in counts]
    values = [pipe.evaluate(own)]
    with pipe.uncompressed():
        values += [pipe.evaluate(own), pipe.evaluate(own, lambda o, t: {"n": float(len(t))})]
    with torch.no_grad():
        outputs = pipe.eval()(own[0][0])
    buffers = {name: b.clone() for name, b in pipe.named_buffers()}
    return values, outputs, buffers, {k: v.clone() for k, v in pipe.merge().state_dict().items()}


def test_evaluation_is_over_all_replicas(ranks):
    """Weighted by rows; BatchNorm's statistics are the first replica's, everywhere."""
    results = ranks(evaluate, 4)
    values, _, _, state = results[0]
    model = deep_convnet()
    model.load_state_dict(state)
    model.eval()
    batches = [images(8, 8), images(5, 5), images(6, 16), images(2, 12)]
    x, y = (torch.cat([batch[i] for batch in batches]) for i in range(2))
    with torch.no_grad():
        assert values[1] == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-5)
    assert values[0] != values[1]  # compressed, and not
    # The metric sees microbatches: of 2, 2, 2, 2 rows; 2, 1, 1, 1; 2, 2, 1, 1; and 1, 1.
    assert values[2] == {"n": pytest.approx((16 + 7 + 10 + 2) / 21)}
    for rank, (others, outputs, buffers, whole) in enumerate(results):
        assert others == values
        assert same_bits(outputs, results[rank // 2 * 2][1])
        for name, value in state.items():
            assert same_bits(value, whole[name])
        for name, buffer in buffers.items():
            assert same_bits(buffer, state[name])
    assert results[0][1].shape[0] == 8 and results[2][1].shape[0] == 6


# -- faults ---------------------------------------------------------------------------------------


def killed():
    pipe = pipe_of(timeout=PATIENT_S)
    if dist.get_rank() == 3:
        on_microbatch(pipe, 1, 5, "forward", die)
    return ends(pipe, [lambda i=i: step_of(pipe, i) for i in range(3)])


def step_of(pipe, number):
    x, y, _ = share_of(pipe, *rows(sum(SHARES), number))
    return pipe.forward_backward(x, y)


def test_a_killed_rank_is_named_with_its_replica(ranks):
    for end in ranks(killed, 4, may_fail=True)[:3]:
        assert end.error == "PeerError" and end.seconds < AT_ONCE_S, end
        assert end.message.startswith("rank 3 (stage 1 of replica 1) is gone"), end


def other_data():
    """Replicas may differ in their data, ranks of one replica may not."""
    pipe = pipe_of()
    x, y, _ = share_of(pipe, *rows(sum(SHARES), 0))
    try:
        pipe.forward_backward(x + (dist.get_rank() == 3), y)
    except ValueError as error:
        return str(error), float(pipe.forward_backward(x, y))


def test_other_data_within_a_replica_are_named(ranks):
    results = ranks(other_data, 4)
    for message, loss in results:
        assert message.startswith("rank 3 and rank 2 were given different data"), message
        assert loss == results[0][1]


@pytest.mark.parametrize(
    "num_ranks, replicas, message",
    [
        (2, 2, "2 stages on 1 ranks: in-flight 1F1B takes 1 stage on each rank; pass split=1"),
        (3, 2, "replicas=2 with 3 ranks: expected a divisor of 3"),
        (2, 0, "replicas=0 with 2 ranks: expected a divisor of 2"),
    ],
)
def test_numbers_of_replicas_that_cannot_be(ranks, num_ranks, replicas, message):
    for kind, said in ranks(made, num_ranks, replicas, may_fail=True):
        assert kind == "ValueError" and message in said


def made(replicas):
    pipe_of(replicas=replicas)


# -- the sampler ----------------------------------------------------------------------------------


class Mesh:
    """A pipeline's place, all that the sampler asks for."""

    def __init__(self, replica, num_replicas):
        self.replica, self.num_replicas = replica, num_replicas


@pytest.mark.parametrize("length", [2, 3, 10, 101])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_shares_are_equal_disjoint_and_kept_over_epochs(length, replicas):
    if length < replicas:
        with pytest.raises(ValueError, match=f"{length} samples for {replicas} replicas: each ne"):
            ReplicaSampler(range(length), (0, replicas))
        return
    samplers = [ReplicaSampler(range(length), Mesh(r, replicas)) for r in range(replicas)]
    shares = [set(sampler) for sampler in samplers]
    for sampler, share in zip(samplers, shares, strict=True):
        assert len(sampler) == len(share) == length // replicas
        orders = []
        for epoch in range(4):
            sampler.set_epoch(epoch)
            orders.append(list(sampler))
            assert set(orders[-1]) == share and list(sampler) == orders[-1]
        assert len(share) < 5 or len({tuple(order) for order in orders}) == 4
    assert all(not a & b for a, b in itertools.combinations(shares, 2))
    assert set().union(*shares) <= set(range(length))


def test_the_order_is_the_seeds():
    def order(**kwargs):
        return list(ReplicaSampler(range(50), (1, 2), **kwargs))

    assert order() == order(seed=0) != order(seed=1)
    assert order(shuffle=False) == sorted(order())
    assert set(order(seed=5)) != set(order()), "the share is the seed's as well"


def test_classes_that_come_by_turns_are_dealt_to_all_replicas():
    """By turns, replica 0 of 2 would see the even ones alone of ten classes in turn."""
    for replica in range(2):
        share = list(ReplicaSampler(range(400), (replica, 2), shuffle=False))
        assert {sample % 10 for sample in share} == set(range(10))


def test_one_replica_has_the_data_as_they_are():
    assert list(ReplicaSampler(range(7), (0, 1), shuffle=False, seed=3)) == list(range(7))


def test_it_feeds_a_loader():
    data = torch.utils.data.TensorDataset(torch.arange(11))
    loader = torch.utils.data.DataLoader(data, 2, sampler=ReplicaSampler(data, (1, 3)))
    share = sorted(torch.cat([x for (x,) in loader]).tolist())
    assert share == list(ReplicaSampler(data, (1, 3), shuffle=False)) and len(share) == 3


@pytest.mark.parametrize("place", [(2, 2), (-1, 2), (0, 0)])
def test_a_place_that_is_none(place):
    with pytest.raises(ValueError, match=f"replica {place[0]} of {place[1]}: expected"):
        ReplicaSampler(range(10), place)
