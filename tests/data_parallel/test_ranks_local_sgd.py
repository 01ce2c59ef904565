"""Local SGD with DDP: replicas train alone, meet when it is their turn, and are one again."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from everyday import slow
from methods import same_bits
from ranks import preload
from replica_methods import APART
from replica_runs import SMALLEST, Branching, Run, Training, digest
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mpcomp
from mpcomp import LocalSGD, ReplicaNetwork, parse

preload("replica_methods", "replica_runs", "torch.distributed.fsdp")


def weights_of(training: Training) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in training.model.state_dict().items()}


# -- the laws -------------------------------------------------------------------------------------


def averaged(spec: str | None) -> dict[str, torch.Tensor]:
    training = Training(Run(spec))
    training.go(0, 6)
    return weights_of(training)


@pytest.mark.parametrize("num_ranks", [2, slow(4)])
def test_with_a_period_of_one_it_is_ddp(ranks, num_ranks):
    """SGD inside and nothing but the mean outside: parameters are averaged, not gradients."""
    plain = ranks(averaged, num_ranks, None)
    for ours in ranks(averaged, num_ranks, "diloco:1:lr=1:momentum=0"):
        for name, value in plain[0].items():
            torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)


def trained(specs: list[str], steps: int, path: str = "auto", **options: Any) -> list[Any]:
    """Digests of each parameter after each step, losses, and what was told."""
    found = []
    for spec in specs:
        training = Training(Run(spec, ReplicaNetwork(path, smallest=SMALLEST), **options))
        digests, losses = [], []
        for step in range(steps):
            losses.append(training.step(step))
            digests.append({n: digest({n: p}) for n, p in training.model.named_parameters()})
        assert training.handle is not None
        found.append((digests, losses, training.handle.report(), training.handle.history))
    return found


def check(spec: str, of_ranks: list[Any]) -> None:
    """Parts are alike after their turn and at no other time; bytes go then alone; losses fall."""
    method = parse(spec)
    assert isinstance(method, LocalSGD)
    sizes = {name: p.numel() for name, p in Branching().named_parameters()}
    shares = method.sync_schedule.assign_parts(sizes)
    digests, _, report, history = of_ranks[0]
    for step, first in enumerate(digests):
        due = method.sync_schedule.part_due(step)
        assert {report["steps"] for _, _, report, _ in of_ranks} == {len(digests)}
        for name, value in first.items():
            alike = {one[0][step][name] for one in of_ranks} == {value}
            assert alike == (due == shares[name]), (spec, step, name)
        for one in of_ranks:
            entry = one[3][step]
            assert entry["step"] == step and not entry["skipped"]
            assert (entry["wire_bytes"] > 0) == (due is not None) == (entry["traffic_bytes"] > 0)
    dense = 4 * sum(sizes.values())
    assert [entry["dense_bytes"] for entry in history] == [dense] * len(history)
    assert report["dense_bytes"] == dense * len(history)
    assert report["wire_bytes"] == sum(entry["wire_bytes"] for entry in history)
    assert report["ratio"] <= 1 / method.period and math.isnan(report["density"])
    copies = 2 if method.momentum else 1
    assert report["memory_bytes"] >= copies * dense
    losses = torch.tensor([one[1] for one in of_ranks]).mean(0)
    assert losses[-5:].mean() < losses[:5].mean() - 0.005, (spec, losses)


@pytest.mark.parametrize("num_ranks", [2, slow(4)])
def test_replicas_are_one_after_their_turn_and_differ_between(ranks, num_ranks):
    results = ranks(trained, num_ranks, APART, 20)
    for i, spec in enumerate(APART):
        check(spec, [of_rank[i] for of_rank in results])
    plain, sent = (results[0][APART.index(s)][2] for s in ("diloco:5", APART[1]))
    assert plain["wire_bytes"] == plain["dense_bytes"] / 5
    assert sent["wire_bytes"] < plain["wire_bytes"] / 3  # few parameters of this model are matrices


@pytest.mark.slow
def test_replicas_are_one_where_each_forms_the_mean_of_a_piece(ranks):
    specs = [APART[1], APART[2]]
    results = ranks(trained, 3, specs, 15, "two-phase")
    for i, spec in enumerate(specs):
        check(spec, [of_rank[i] for of_rank in results])


def odd(spec: str) -> Any:
    """Some parameters are not used, by some replicas or by all; kernels are channels-last."""
    ddp = (("find_unused_parameters", True),)
    run = Run(spec, ddp=ddp, extra="changing", channels_last=True, accumulate=2)
    training = Training(run)
    training.go(0, 10)
    return training.digest(), training.handle.report()["steps"]


def test_unused_parameters_and_several_backwards_to_a_step(ranks):
    results = ranks(odd, 2, APART[1])
    assert results[0] == results[1] and results[0][1] == 10


def halved() -> Any:
    """In bf16 the parameters are those of an anchor in fp32."""
    training = Training(Run("diloco:5+ef+topk:0.2", dtype=torch.bfloat16))
    training.go(0, 10)
    assert training.handle is not None
    held = training.handle.state_dict()["tensors"]
    for name, parameter in training.model.named_parameters():
        anchor = held[f"own/{name}/anchor"]
        assert anchor.dtype == torch.float32
        assert same_bits(anchor.bfloat16(), parameter.detach().reshape(-1)), name
    return training.digest()


def test_an_anchor_keeps_what_bf16_would_lose(ranks):
    first, second = ranks(halved, 2)
    assert first == second


# -- several replicas on a machine ----------------------------------------------------------------

CORRECTED = "diloco:3:lr=1:momentum=0:correction=0.5"
TOGETHER = ["diloco:3", "diloco:4:parts=2:momentum=0+ef+topk:0.2", CORRECTED]


def shared(specs: list[str], per_machine: int, steps: int, inside: str | None = None) -> list[Any]:
    """Weights after each step, which share of a batch by a batch makes, and the log."""
    found = []
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for spec in specs:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 4))
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
        codec = None if inside is None else parse(inside)
        network = ReplicaNetwork(smallest=SMALLEST, per_machine=per_machine, inside=codec)
        handle = mpcomp.compress_gradients(ddp, spec, network=network)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        if spec == CORRECTED:
            optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        handle.follow(optimizer)
        weights = []
        for step in range(steps):
            draw = torch.Generator().manual_seed(step)
            x, y = torch.randn(24, 12, generator=draw), torch.randint(4, (24,), generator=draw)
            own = slice(rank * 24 // num_ranks, (rank + 1) * 24 // num_ranks)
            nn.functional.cross_entropy(ddp(x[own]), y[own]).backward()
            optimizer.step()
            optimizer.zero_grad()
            weights.append({n: p.detach().clone() for n, p in model.named_parameters()})
        found.append((weights, handle.history, handle.report()))
    return found


def test_a_machine_of_two_replicas_is_one_replica_with_the_rows_of_both(ranks):
    """To the others; its second one has the first one's bits after each step, and sends nothing."""
    alone = ranks(shared, 2, TOGETHER, 1, 9)
    four = ranks(shared, 4, TOGETHER, 2, 9)
    for i, spec in enumerate(TOGETHER):
        method = parse(spec)
        sizes = {name: value.numel() for name, value in alone[0][i][0][0].items()}
        shares = method.sync_schedule.assign_parts(sizes)
        for step in range(9):
            due = method.sync_schedule.part_due(step)
            of_rank = [one[i][0][step] for one in four]
            for name, share in shares.items():
                for machine in range(2):
                    first, second = (of_rank[2 * machine + place][name] for place in range(2))
                    assert same_bits(first, second), (spec, step, name)
                    torch.testing.assert_close(
                        first, alone[machine][i][0][step][name], rtol=1e-4, atol=1e-5
                    )
                alike = same_bits(of_rank[0][name], of_rank[2][name])
                assert alike == (due == share), (spec, step, name)
            sent = [one[i][1][step]["wire_bytes"] for one in four]
            assert sent == [alone[0][i][1][step]["wire_bytes"], 0] * 2
        memory = [one[i][2]["memory_bytes"] for one in four]
        assert memory[0] == memory[2] > memory[1] == memory[3] == 0


@pytest.mark.slow
def test_gradients_inside_a_machine_go_rounded_where_that_is_wanted(ranks):
    """Weights that meet do not."""
    exact, rounded = (ranks(shared, 2, TOGETHER[:1], 2, 3, codec) for codec in (None, "bf16"))
    for ours, plain in zip(rounded, exact, strict=True):
        for name, value in plain[0][0][-1].items():
            torch.testing.assert_close(ours[0][0][-1][name], value, rtol=0.01, atol=0.01)
            if value.dim() > 1:
                assert not same_bits(ours[0][0][-1][name], value)
                assert not same_bits(ours[0][0][-1][name], value.bfloat16().float())


# -- checkpoints ----------------------------------------------------------------------------------


def resumed(specs: list[str], per_machine: int = 1) -> list[Any]:
    """Eleven steps: at once; and seven, then four of a new model."""
    found = []
    network = ReplicaNetwork(smallest=SMALLEST, per_machine=per_machine)
    for spec in specs:
        whole = Training(Run(spec, network))
        assert not whole.state()["replica"]["tensors"]
        whole.go(0, 7)
        half = whole.state()
        whole.go(7, 11)
        later = Training(Run(spec, network))
        later.go(0, 3)  # which must leave nothing
        later.load(half)
        later.go(7, 11)
        ends = []
        for training in (whole, later):
            assert training.handle is not None
            tensors = training.handle.state_dict()["tensors"]
            steps, wire_bytes = (training.handle.report()[k] for k in ("steps", "wire_bytes"))
            ends.append((training.digest(), digest(tensors), sorted(tensors), steps, wire_bytes))
        found.append(ends)
    return found


def test_going_on_in_the_middle_of_a_period_is_as_if_never_stopped(ranks):
    results = ranks(resumed, 2, APART)
    for i, spec in enumerate(APART):
        for of_rank in results:
            whole, later = of_rank[i]
            assert whole == later, spec
            assert whole[3] == 11 and any(key.endswith("/anchor") for key in whole[2])
        assert results[0][i][0][0] != results[1][i][0][0]  # replicas differ where they ended


@pytest.mark.slow
def test_going_on_with_several_replicas_on_a_machine(ranks):
    """Of which the first ones alone have anything to remember."""
    specs = TOGETHER[:2]  # with SGD
    results = ranks(resumed, 4, specs, 2)
    for i, spec in enumerate(specs):
        for rank, of_rank in enumerate(results):
            whole, later = of_rank[i]
            assert whole == later, (spec, rank)
            assert any(key.endswith("/anchor") for key in whole[2]) == (rank % 2 == 0)
        assert results[0][i][0][0] == results[1][i][0][0] != results[2][i][0][0]


# -- steps that do not count ----------------------------------------------------------------------


def skipping(kind: str, per_machine: int = 1) -> Any:
    """Each replica has its own scaler; a gradient of one of them overflows in the second step."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Branching(), bucket_cap_mb=0.003)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    network = ReplicaNetwork(smallest=SMALLEST, per_machine=per_machine)
    handle = mpcomp.compress_gradients(ddp, "diloco:3+ef+topk:0.1", network=network, scaler=scaler)
    if kind == "fused":  # which the scaler calls in any case, and which then does nothing
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01, fused=True)
    else:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle.follow(optimizer)
    helper = Training.__new__(Training)
    helper.run, helper.ddp = Run(None), ddp
    digests, counts = [], []
    for step in range(8):
        hooks = []
        if step in (1, 6) and dist.get_rank() == 1:
            hooks = [ddp.module.middle.weight.register_hook(lambda g: g * math.inf)]
        scaler.scale(helper.loss(step)).backward()
        for hook in hooks:
            hook.remove()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        digests.append(digest(dict(ddp.module.state_dict())))
        counts.append(handle.report()["steps"])
    finite = all(bool(p.isfinite().all()) for p in ddp.parameters())
    return digests, counts, scaler.get_scale(), finite


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_a_step_that_one_scaler_would_skip_is_skipped_by_all_and_not_counted(ranks, kind):
    results = ranks(skipping, 2, kind)
    for _, counts, scale, finite in results:
        assert counts == [1, 1, 2, 3, 4, 5, 5, 6] and scale == 16.0 and finite
    alike = [a == b for a, b in zip(results[0][0], results[1][0], strict=True)]
    assert alike == [False, False, False, True, False, False, False, True]


@pytest.mark.slow
def test_a_machine_skips_with_the_others(ranks):
    results = ranks(skipping, 4, "plain", 2)
    for _, counts, scale, finite in results:
        assert counts == [1, 1, 2, 3, 4, 5, 5, 6] and scale == 16.0 and finite
    for place in (0, 2):
        assert results[place][0] == results[place + 1][0]


def diverging() -> list[str]:
    """Without a scaler nothing is skipped: what one replica ends with, all are told."""
    training = Training(Run("diloco:3"))
    training.go(0, 2)
    held = digest(training.state()["replica"]["tensors"])
    if dist.get_rank() == 1:
        with torch.no_grad():
            training.model.last.weight[0, 0] = math.nan
    said = []
    try:
        training.step(2)
    except FloatingPointError as error:
        said.append(str(error))
    assert training.handle is not None and held == digest(training.state()["replica"]["tensors"])
    return said


def test_a_replica_that_has_diverged_is_an_error_on_all(ranks):
    for said in ranks(diverging, 2):
        assert len(said) == 1 and "after step 3: the model has diverged" in said[0]


# -- what is refused ------------------------------------------------------------------------------


def wrong(cases: list[str]) -> list[str]:
    said = []
    for what in cases:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 5))
        network = ReplicaNetwork(smallest=16)
        method = f"diloco:{2 + dist.get_rank()}" if what == "another period" else "diloco:2"
        if what == "sharded":
            wrapped: Any = fully_shard(model)
        else:
            wrapped = DistributedDataParallel(model)
        try:
            handle = mpcomp.compress_gradients(wrapped, method, network=network)
            if what == "another optimizer":
                handle.follow(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
            wrapped(torch.randn(2, 40)).sum().backward()
            said.append("done")
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
    return said


REFUSED = {
    "no optimizer": "acts after the optimizer's step, and none was named: call follow(optimizer)",
    "another optimizer": "the optimizer has none of the parameters that replicas train",
    "sharded": "diloco:2 with sharded parameters: replicas that train alone need all of them each",
    "another period": "replicas 1 were given another model, method, network or seed",
}


def test_it_is_refused_on_all_ranks(ranks):
    for said in ranks(wrong, 2, list(REFUSED)):
        for (what, message), found in zip(REFUSED.items(), said, strict=True):
            assert message in found, what


def renamed() -> int:
    """The optimizer that was named last counts; no other does."""
    training = Training(Run("diloco:2"))
    first = training.optimizer
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    assert training.handle is not None
    training.handle.follow(training.optimizer)
    training.handle.follow(training.optimizer)
    training.loss(0).backward()
    first.step()
    assert training.handle.report()["steps"] == 0
    training.optimizer.step()
    training.optimizer.step()  # without a backward
    return int(training.handle.report()["steps"])


def test_one_optimizer_is_followed(ranks):
    assert ranks(renamed, 2) == [1, 1]
