"""Planned steps, what a plan recommends, and the rate at which that turns."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from torch import nn

import mpcomp
from mpcomp.core.account import agreed_in_step
from mpcomp.links.auto import BEFORE_HEAD, TIE_COMP
from mpcomp.plan import Compute, Network, predict
from mpcomp.plan.coding import Coding, CutCost, measure_coding
from mpcomp.plan.curve import LONGEST, RATES, WORTHWHILE, break_even_mbps
from mpcomp.plan.network import PACKET_SHARE
from mpcomp.plan.outcome import Outcome, plan
from mpcomp.plan.planner import BASELINE, DENSE, Planner, at_rate
from mpcomp.plan.profile import Profile, Tie, count_profile

#: What coding takes is asserted nowhere here.
pytestmark = pytest.mark.usefixtures("_no_walk_through_memory")

#: Such that a microbatch's activation is 64 kB.
X = torch.randn(4, 16, 256, generator=torch.Generator().manual_seed(0))
QUANT = ("quant:4", "quant:8")
TOPK = ("topk:0.1", "topk:0.1")


def model(num_blocks: int = 8) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(num_blocks)))


@pytest.fixture(autouse=True)
def _always_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coding that takes the same on a busy machine, so that verdicts are the same there."""

    def measured(*arguments: Any, **options: Any) -> CutCost:
        return measure_coding(*arguments, **options)._replace(coding=Coding(*[1e-4] * 4))

    monkeypatch.setattr("mpcomp.plan.planner.measure_coding", measured)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return count_profile(model(), X, flops_per_s=1e9)


def planner(profile: Profile, mbps: float, latency_s: float = 0.0, **options: Any) -> Planner:
    given: dict[str, Any] = {"chunks": 4, "cuts": [[2, 2, 2, 2]], "task": "images", **options}
    return Planner(profile, Network.alike(4, mbps, latency_s), **given)


def outcome(profile: Profile, mbps: float, floor: float = 2.0, **options: Any) -> Outcome:
    made = planner(profile, mbps, **options)
    return plan(made, [QUANT, TOPK, ("quant:3", "quant:3")], task="images", floor=floor)


def test_a_step_is_the_simulations(profile: Profile) -> None:
    step = planner(profile, 100.0).step(DENSE)
    one = Compute(*(2 * seconds for seconds in profile.blocks[0].compute))
    expected = predict([one] * 4, step.cuts, Network.alike(4, 100.0), chunks=4)
    assert step.prediction.step_s == expected.step_s == step.step_s
    header = step.cuts[0].messages.act_bytes - X.nbytes
    assert 0 < header < 64
    assert step.account.cuts.dense_bytes == 2 * 4 * 3 * X.nbytes
    assert step.wire_bytes == 2 * 4 * 3 * (X.nbytes + header)


def test_the_fastest_cut_is_taken(profile: Profile) -> None:
    uneven = [5, 1, 1, 1]
    for cuts in ([uneven, [2, 2, 2, 2]], [[2, 2, 2, 2], uneven]):
        assert planner(profile, 1e5, cuts=cuts).step(DENSE).counts == (2, 2, 2, 2)
    # A first machine that is five times as fast takes more.
    own = [block.compute for block in profile.blocks]
    fast = [Compute(*(seconds / 5 for seconds in each)) for each in own]
    made = planner(profile, 1e5, cuts=[uneven, [2, 2, 2, 2]], computes=[fast, own, own, own])
    assert made.step(DENSE).counts == tuple(uneven)


def test_what_comes_after_the_last_backward_is_added(profile: Profile) -> None:
    step = planner(profile, 100.0, exchange_s=0.5).step(DENSE)
    assert step.step_s == step.prediction.step_s + 0.5
    numel = 1 << 21
    tied = dataclasses.replace(profile, ties=(Tie(0, 7, mpcomp.TensorMeta((1, numel))),))
    steps = {pair: planner(tied, 100.0).step(pair) for pair in (DENSE, BASELINE, QUANT)}
    assert steps[DENSE].tie_bytes == pytest.approx(2 * 4 * numel, rel=1e-3)
    assert steps[BASELINE].tie_bytes == pytest.approx(2 * 2 * numel, rel=1e-3)
    assert steps[QUANT].tie_comp == TIE_COMP == "ef+quant:4:scale=128"
    assert steps[QUANT].tie_bytes == pytest.approx(2 * numel * 4.125 / 8, rel=1e-3)
    for step in steps.values():  # all of a step, and its cuts alone
        account = step.account
        assert account.ties.num_elements == 2 * numel
        assert account.agreements == agreed_in_step(4, 8) and not account.replicas.wire_bytes
        whole = step.wire_bytes + step.tie_bytes + account.agreements.wire_bytes
        elements = account.cuts.num_elements + 2 * numel
        assert account.below_bf16 == pytest.approx(2 * elements / whole)
    assert steps[BASELINE].account.below_bf16 == pytest.approx(1, rel=0.01)
    of_all = plan(planner(tied, 100.0), [QUANT], task="images", floor=2.0)
    (row,) = [one for one in of_all.to_dict()["steps"] if (one["act"], one["grad"]) == QUANT]
    assert row["below_bf16"] == pytest.approx(steps[QUANT].account.below_bf16)
    assert row["below_bf16"] != row["cuts_below_bf16"] and "cuts alone" in of_all.table()
    assert any("in all" in sentence for sentence in of_all.summary())
    on_link = 4 * numel * 8e-6 / 100 / PACKET_SHARE
    ((_, _, (coding, _)),) = steps[DENSE].ties
    coded = coding.encode_act_s + coding.decode_act_s
    assert steps[DENSE].tie_s == pytest.approx(on_link + coded, rel=1e-2)
    assert steps[DENSE].step_s == pytest.approx(steps[DENSE].prediction.step_s + steps[DENSE].tie_s)
    # The first host's gradient has rows of the tokens, of which a step has 4 x 32 at most.
    by_token = Tie(0, 7, mpcomp.TensorMeta((2048, numel // 2048)), by_token=True)
    some = dataclasses.replace(profile, ties=(by_token,))
    tokens = 4 * profile.blocks[0].output.numel // profile.blocks[0].output.last_dim
    assert tokens < 2048
    for pair, all_rows in steps.items():
        step = planner(some, 100.0).step(pair)
        ((_, _, (_, messages)),) = step.ties
        assert messages.grad_bytes == pytest.approx(all_rows.tie_bytes / 2, rel=1e-3)
        assert messages.act_bytes == pytest.approx(messages.grad_bytes * tokens / 2048, rel=0.1)
        assert step.tie_s < all_rows.tie_s * 1.2 and step.account.ties.num_elements == 2 * numel
    # Two blocks of one stage share it without sending anything.
    inside = dataclasses.replace(profile, ties=(Tie(0, 1, mpcomp.TensorMeta((1, numel))),))
    assert planner(inside, 100.0).step(DENSE).tie_s == 0


def test_state_is_that_of_a_pipeline() -> None:
    """Of a pipeline of two stages each host keeps an end of both links."""
    pair = ("ef21+topk:0.1", "ef+topk:0.1")
    net = nn.Sequential(nn.Flatten(), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    x = torch.randn(8, 32)
    small = count_profile(net, x[:2], flops_per_s=1e9)
    made = Planner(small, Network.alike(2, 10.0), chunks=4, cuts=[[2, 2]], task="images")
    pipe = mpcomp.pipeline(
        net, chunks=4, split=[2, 2], act_comp=pair[0], grad_comp=pair[1], loss_fn=nn.MSELoss()
    )
    ends = pipe.state_bytes(x)["per_link"]
    both: dict[str, int] = {"sender": 0, "receiver": 0}
    for end in ends:
        first = (end["role"] == "sender") == (end["direction"] == "act")
        both["sender" if first else "receiver"] += end["bytes"]
    assert made.step(pair).state_bytes == max(both.values()) > 0


def test_a_memory_of_samples_needs_their_number(profile: Profile) -> None:
    pair = ("auto:memory", "auto:memory")
    assert planner(profile, 10.0).step(pair).state_bytes is None
    ten, twenty = (planner(profile, 10.0, num_samples=n).step(pair).state_bytes for n in (10, 20))
    assert ten is not None and twenty == 2 * ten
    # What changed a little is what is sent, not all of it.
    assert (
        planner(profile, 10.0).step(pair).wire_bytes
        < 0.05 * planner(profile, 10.0).step(DENSE).wire_bytes
    )


def test_slow_links_want_compression_and_fast_ones_none(profile: Profile) -> None:
    slow, fast = outcome(profile, 5.0), outcome(profile, 1e5)
    assert slow.compresses and slow.best.pair == QUANT
    assert "start with act_comp='quant:4', grad_comp='quant:8'" in slow.summary()[0]
    assert not fast.compresses
    assert fast.summary()[0].startswith("do not compress")


def test_the_floor_decides_what_may_be_recommended(profile: Profile) -> None:
    assert outcome(profile, 5.0, floor=0.0).best.pair == BASELINE
    assert outcome(profile, 5.0, floor=20.0).best.pair == TOPK
    # What is not known is not recommended, however fast it is.
    assert ("quant:3", "quant:3") in [step.pair for step in outcome(profile, 5.0).steps]


def test_break_even_is_where_the_curves_meet(profile: Profile) -> None:
    found = outcome(profile, 5.0)
    step = next(step for step in found.steps if step.pair == QUANT)
    even = found.break_even(step)
    assert even is not None and 5 < even < 1e4
    made = planner(profile, 5.0)
    for rate, gains in ((even / 2, True), (even * 2, False)):
        network = at_rate(made.network, rate)
        ratio = made.on(network, found.baseline) / made.on(network, step)
        assert (ratio > WORTHWHILE) == gains


def test_break_even_at_the_ends() -> None:
    ones = [1.0] * len(RATES)
    assert break_even_mbps([0.5] * len(RATES), ones) == math.inf
    assert break_even_mbps(ones, ones) == 0
    assert break_even_mbps([0.5, *ones[1:]], ones) == pytest.approx(RATES[1], rel=0.5)


def test_long_pipelines_have_no_curve(profile: Profile) -> None:
    chunks = LONGEST // 4 + 1
    found = plan(planner(profile, 5.0, chunks=chunks), [], task="images", floor=1)
    assert found.times is None and found.break_even(found.best) is None
    assert "pays below" in found.table()
    json.dumps(found.to_dict(), allow_nan=False)


def test_what_a_pipeline_that_does_not_drain_takes_is_said(profile: Profile) -> None:
    """Unless ranks wait for each other anyway."""
    made = planner(profile, 100.0, latency_s=0.02)
    found = plan(made, [QUANT], task="images", floor=2.0)
    assert found.asynchronous_s is not None and found.asynchronous_s < found.best.step_s / 2
    assert any("asynchronously" in line for line in found.summary())
    assert found.to_dict()["recommended"]["updates"] == 16
    of_replicas = planner(profile, 100.0, latency_s=0.02, exchange_s=0.1)
    assert of_replicas.asynchronous_s(of_replicas.step(QUANT), 16) is None
    tied = dataclasses.replace(profile, ties=(Tie(0, 7, profile.blocks[0].output),))
    of_tied = plan(planner(tied, 100.0, latency_s=0.02), [QUANT], task="images", floor=2.0)
    assert of_tied.asynchronous_s is None and of_tied.to_dict()["recommended"]["updates"] is None


def tied_profile() -> Profile:
    """As `model`, with an embedding before and a head with its weight behind: a third of it all."""
    embedding, head = nn.Embedding(1024, 256), nn.Linear(256, 1024, bias=False)
    head.weight = embedding.weight
    tokens = torch.randint(1024, (4, 16), generator=torch.Generator().manual_seed(0))
    whole = nn.Sequential(embedding, *model(), head)
    return count_profile(whole, tokens, flops_per_s=1e9, together=True)


def test_both_uses_of_a_weight_on_the_first_host_exchange_nothing() -> None:
    tied, counts = tied_profile(), [1, 3, 3, 3]
    made = planner(tied, 100.0, 0.02, cuts=[counts])
    step = made.step(BASELINE)
    assert step.uses == "together" and (step.ties, step.tie_s, step.tie_bytes) == ((), 0, 0)
    block, head = tied.blocks[1].compute, tied.blocks[-1].compute
    two, three = (Compute(*(n * seconds for seconds in block)) for n in (2, 3))
    computes = [tied.blocks[0].compute, three, three, two, head]
    expected = predict(computes, step.cuts, Network.alike(4, 100.0, 0.02), chunks=4)
    assert step.step_s == expected.step_s
    assert len(step.cuts) == 4 and step.account.cuts.num_elements == 2 * 4 * 4 * X.numel()
    several = predict(computes, step.cuts, Network.alike(4, 100.0, 0.02), chunks=4, updates=16)
    assert made.asynchronous_s(step, 16) == several.step_s < step.step_s
    found = plan(made, [QUANT], task="images", floor=2.0)
    assert found.asynchronous_s is None  # such steps did not learn
    # A first machine that is twice as fast runs the head as fast.
    own = [each.compute for each in tied.blocks]
    fast = [Compute(*(seconds / 2 for seconds in each)) for each in own]
    step = planner(tied, 1e5, cuts=[counts], computes=[fast, own, own, own]).step(DENSE)
    spans = [span for span in step.prediction.timeline.spans if span.stage == 4]
    assert sum(span.end_s - span.start_s for span in spans) == pytest.approx(
        4 * (sum(head) / 2 + sum(step.cuts[3].coding[1:3])) + step.cuts[3].coding.decode_grad_s
    )


def test_a_word_has_its_own_methods_before_a_head() -> None:
    tied, word = tied_profile(), ("auto:memory", "auto:memory")
    of_head = BEFORE_HEAD["auto:memory"]
    spelt = of_head["act_comp"], of_head["grad_comp"]
    given: dict[str, Any] = {"cuts": [[1, 3, 3, 3]], "num_samples": 64}
    made = planner(tied, 100.0, **given)
    step, of_spelt = made.step(word), made.step(spelt)
    bytes_at_cuts = [cut.messages for cut in step.cuts]
    assert bytes_at_cuts[3] == of_spelt.cuts[3].messages != bytes_at_cuts[2]
    assert bytes_at_cuts[2] == bytes_at_cuts[0] != of_spelt.cuts[0].messages
    assert step.wire_bytes == 4 * sum(map(sum, bytes_at_cuts))
    # The first host keeps a basis at the last cut, beside the memory that all have.
    apart = dataclasses.replace(tied, again=None)
    plain = planner(apart, 100.0, **given).step(word)
    kept = [each.state_bytes or 0 for each in (plain, step, of_spelt)]
    assert 0 < kept[0] < kept[1] < kept[2]


def test_what_is_recommended_says_where_both_uses_are() -> None:
    found = plan(
        planner(tied_profile(), 5.0, cuts=[[1, 3, 3, 3]]), [QUANT], task="images", floor=2.0
    )
    first, *others = found.summary()
    assert found.compresses and "tie_comp" not in first
    assert sum("ties='together'" in line for line in others) == 1
    assert found.to_dict()["recommended"]["ties"] == "together"


def test_state_of_a_ring_is_kept_by_host() -> None:
    """The first host keeps ends of the first cut and of the last."""
    pair, tied = ("ef21+topk:0.1", "ef+topk:0.1"), tied_profile()
    of_ring = planner(tied, 10.0, cuts=[[1, 3, 3, 3]]).step(pair).state_bytes
    plain = planner(dataclasses.replace(tied, again=None), 10.0, cuts=[[1, 3, 3, 3]]).step(pair)
    assert of_ring == plain.state_bytes != 0  # two cuts' ends, on every host


def test_figures_are_json(profile: Profile) -> None:
    found = outcome(profile, 5.0).to_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["recommended"]["act"] == "quant:4"
    assert len(found["steps"]) == len(found["timelines"]) == 5
    assert found["steps"][0]["step_s_at_rates"][0] > found["steps"][0]["step_s_at_rates"][-1]


def test_bad_input(profile: Profile) -> None:
    with pytest.raises(ValueError, match="3 stages for 4 hosts"):
        planner(profile, 1.0, cuts=[[2, 3, 3]])
    with pytest.raises(ValueError, match="add up to 7"):
        planner(profile, 1.0, cuts=[[1, 2, 2, 2]])
    with pytest.raises(ValueError, match="topq"):
        planner(profile, 1.0).step(("topq:1", "none"))
