"""Does compression pay: the estimate by hand, and what is said about it."""

import itertools
import json

import pytest

from mpcomp.monitor.payoff import CutTimes, PayOff, RankTimes, Simulation
from mpcomp.monitor.report import _times_of
from mpcomp.monitor.step_costs import cut_times, stage_times
from mpcomp.plan import Coding, Messages
from mpcomp.plan.curve import WORTHWHILE
from mpcomp.plan.network import PACKET_SHARE

CHUNKS = 8
# Rank 0 computes for 0.28 s and waits for 0.1, rank 1 computes for 0.12 and waits for 0.25.
RANKS = [RankTimes(0.40, 0.10, 0.02), RankTimes(0.41, 0.25, 0.04)]
#: Of a microbatch; 2 MB a step one way are dense, 0.2 MB are sent.
CODING = Coding(0.001, 0.002, 0.003, 0.0015)
WIRE, DENSE = Messages(25_000, 25_000), Messages(250_000, 250_000)
BF16 = Messages(125_000, 125_000)


def payoff(bandwidth_mbps, wire=WIRE, round_trip=0.0, ranks=RANKS):
    link = None if bandwidth_mbps is None else (bandwidth_mbps, round_trip)
    return PayOff.of(ranks, [CutTimes(CODING, wire, DENSE, BF16, link)], chunks=CHUNKS)


def test_figures_of_a_step():
    """The slowest rank's step, the busiest rank's work, the most coding: each its own maximum."""
    found = payoff(10.0)
    assert found.step_s == 0.41
    assert found.coding_s == 0.04
    assert found.busy_s == pytest.approx(0.30)
    assert (found.wire_bytes, found.dense_bytes, found.bandwidth_mbps) == (2e5, 2e6, 10.0)


@pytest.mark.parametrize("bandwidth_mbps", [0.5, 1.0])
def test_where_the_link_decides_times_are_those_of_the_bytes(bandwidth_mbps):
    found = payoff(bandwidth_mbps)
    # Both ways at once; a stage computes while the first message and the last are on their way.
    dense_s = 2e6 * 8e-6 / bandwidth_mbps / PACKET_SHARE
    ratio = found.uncompressed_step_s / found.step_s
    assert ratio == pytest.approx(10, rel=0.15)
    assert found.uncompressed_step_s / found.bf16_step_s == pytest.approx(2, rel=0.05)
    assert ratio * (dense_s / 10) < dense_s * 1.2


def test_on_a_link_without_limit_what_is_saved_is_coding():
    found = payoff(1e5)
    assert 0.8 * found.step_s < found.uncompressed_step_s < found.step_s
    assert found.bf16_step_s == pytest.approx(found.uncompressed_step_s, rel=0.01)


def test_latency_is_in_both():
    """The longer messages are on their way in any case, the less is gained."""
    gains = [
        found.uncompressed_step_s / found.step_s
        for found in (payoff(20.0, round_trip=seconds) for seconds in (0.0, 0.1, 1.0))
    ]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 1.5 * gains[2]


def test_the_verdict_turns_at_the_break_even_rate():
    even = payoff(10.0).break_even_mbps
    assert 10 < even < 1000
    assert payoff(even / 2).bf16_step_s > WORTHWHILE * payoff(even / 2).step_s
    assert payoff(2 * even).bf16_step_s < WORTHWHILE * payoff(2 * even).step_s
    # Links need not be known for it.
    assert payoff(None).break_even_mbps == even


def test_what_is_not_compressed_does_not_pay():
    found = payoff(10.0, wire=DENSE)
    assert found.break_even_mbps == 0
    assert "it does not pay" in found.summary()[1]


def test_it_pays():
    figures, verdict = payoff(10.0).summary()
    assert figures == (
        "a step takes 410.0 ms, of which 40.0 ms go into coding; the busiest link carries 0.200 MB "
        "a step one way, 2.000 MB dense"
    )
    assert verdict.startswith("at the measured 10 Mbit/s a step without compression would take ")
    assert (
        "with bf16 at the cuts" in verdict and ": compression pays; it gains nothing on" in verdict
    )


def test_without_a_bandwidth_there_is_no_verdict():
    found = payoff(None)
    assert found.uncompressed_step_s is None and found.bandwidth_mbps is None
    assert found.summary() == payoff(10.0).summary()[:1]


def test_the_slower_the_link_the_more_is_gained():
    gains = [payoff(mbps).uncompressed_step_s for mbps in (1, 5, 20, 39, 60, 1000)]
    assert gains == sorted(gains, reverse=True)


def test_it_is_plain_numbers():
    """Reports are written as JSON."""
    figures = payoff(10.0).to_dict()
    assert PayOff(**json.loads(json.dumps(figures))) == payoff(10.0)
    assert json.loads(json.dumps(payoff(None).to_dict()))["uncompressed_step_s"] is None


def test_one_stall_leaves_a_rank_some_work():
    """Nine steps of 0.1 s with 0.02 s of waiting, and one of 10 s, nearly all of it waiting."""
    times = RankTimes(*_times_of([], [(0.1, 0.02)] * 9 + [(10.0, 9.92)], 10))
    found = payoff(10.0, ranks=[times, times])
    assert found.busy_s == pytest.approx(0.08)
    assert found.break_even_mbps > 0


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("round_trip", [0.0, 0.2])
def test_a_last_stage_on_the_first_rank_computes_there(num_ranks, round_trip):
    """One microbatch goes through all stages in turn, and over as many links as there are ranks."""
    ranks = [RankTimes(0.9, 0.3, 0.0, last_share=0.25)]
    ranks += [RankTimes(0.9, 0.5, 0.0)] * (num_ranks - 1)
    cuts = [CutTimes(Coding(), DENSE, DENSE, BF16, (1e6, round_trip))] * num_ranks
    simulation = Simulation(ranks, cuts, chunks=1, in_flight=None)
    assert len(simulation.network.host_mbps) == num_ranks
    computed = 0.6 + 0.4 * (num_ranks - 1)
    agreed = round_trip  # twice one way
    step_s = simulation.seconds(simulation.network, simulation.dense)
    windows = 2 * num_ranks * 4 * round_trip  # from 14,480 bytes on, doubled for 250,000
    assert step_s == pytest.approx(computed + num_ranks * round_trip + agreed + windows, abs=2e-2)


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_the_way_back_is_a_link_of_its_own(slow):
    """Whichever of three links is slow, a step without compression takes as long as its bytes."""
    links = [(1.0 if cut == slow else 1e5, 0.0) for cut in range(3)]
    cuts = [CutTimes(Coding(), WIRE, DENSE, BF16, link) for link in links]
    found = PayOff.of([RankTimes(0.4, 0.1, 0.02)] * 3, cuts, chunks=CHUNKS)
    assert found.bandwidth_mbps == 1.0
    assert found.uncompressed_step_s / found.step_s == pytest.approx(10, rel=0.15)


def test_a_process_alone_has_as_many_machines_as_would_have_its_stages():
    """Of three stages the last is where the first is: its computing, and coding, count there."""
    cuts = [CutTimes(CODING, WIRE, DENSE, BF16, None)] * 2
    coded = CHUNKS * sum(CODING)
    own = (1.0 + 2 * coded, 0.0, 2 * coded)
    apart = stage_times([own], [(0.25, 0.5, 0.25)], cuts, CHUNKS)
    first, second = stage_times([own], [(0.25, 0.5, 0.25)], cuts, CHUNKS, together=True)
    assert [times.computed_s for times in apart] == pytest.approx([0.25, 0.5, 0.25])
    assert [first.computed_s, second.computed_s] == pytest.approx([0.5, 0.5])
    assert first.last_share == 0.5 and second.last_share == 0.0
    assert first.coding_s + second.coding_s == pytest.approx(2 * coded)
    assert first.coding_s == pytest.approx(apart[0].coding_s + apart[2].coding_s)


@pytest.mark.parametrize(("element_bytes", "of_dense"), [(8, 1 / 4), (4, 1 / 2), (2, 1), (1, 1)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_bf16_is_two_bytes_an_element_whatever_the_tensors_are(element_bytes, of_dense, ranks):
    """What autocast sends uncompressed is bf16 already; nobody would send fp8 as bf16."""
    counted = {"messages": 4, "wire_bytes": 100, "num_elements": 1000, "seconds": 0.1}
    sender = counted | {"dense_bytes": 1000 * element_bytes}
    idle = dict.fromkeys(sender, 0)
    (cut,) = cut_times([[sender, idle][:ranks]] * 2, [None])
    assert cut.dense == (250 * element_bytes,) * 2
    assert cut.bf16 == tuple(of_dense * each for each in cut.dense)


#: A link on which bf16 takes a quarter of a second a message; one on which it takes no time; and
#: one on which messages go while stages compute, compressed or not.
SLOW, FAST, HIDDEN = (4.0, 0.0), (1e6, 0.0), (400.0, 0.0)


@pytest.mark.parametrize(
    ("links", "pays"),
    [
        ([SLOW], [True]),
        ([FAST], [False]),
        ([HIDDEN], [False]),
        ([SLOW, FAST], [True, False]),
        ([FAST, SLOW, FAST], [False, True, False]),
        ([SLOW, HIDDEN, SLOW], [True, False, True]),
    ],
    ids=str,
)
def test_each_cut_compresses_where_that_makes_a_step_shorter(links, pays):
    simulation, cuts = over(links)
    others = [cut.in_bf16() for cut in cuts]
    assert simulation.where_it_pays(others) == pays
    best = simulation.at_cuts(pays, others)
    for other in itertools.product([True, False], repeat=len(links)):  # no other choice is faster
        assert best <= WORTHWHILE ** len(links) * simulation.at_cuts(other, others)


def over(links, coding=CODING):
    cuts = [CutTimes(coding, WIRE, DENSE, BF16, link) for link in links]
    return Simulation([RankTimes(0.41, 0.1, 0.02)] * (len(links) + 1), cuts, CHUNKS, None), cuts


def test_a_run_that_has_chosen_changes_only_for_what_is_well_worth_it():
    """Between the rates at which it would change there and back lies a band."""
    chosen = []
    rates = [10 ** (k / 20) for k in range(20, 60)]
    for now in (True, False):
        stays = []
        for rate in rates:
            simulation, (cut,) = over([(rate, 0.0)])
            stays.append(simulation.where_it_pays([cut.in_bf16()], [now]) == [now])
        chosen.append(stays)
    compressed, bf16 = chosen
    assert compressed == sorted(compressed, reverse=True) and bf16 == sorted(bf16)
    assert any(a and b for a, b in zip(compressed, bf16, strict=True))
    assert not compressed[-1] and not bf16[0]


@pytest.mark.parametrize("act", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_bf16_one_way_costs_nothing_there_and_the_same_elsewhere(act, grad):
    coding, messages = CutTimes(CODING, WIRE, DENSE, BF16, FAST).in_bf16(act, grad)
    assert coding[:2] == ((0, 0) if act else CODING[:2])
    assert coding[2:] == ((0, 0) if grad else CODING[2:])
    assert messages == (125_000 if act else 25_000, 125_000 if grad else 25_000)
