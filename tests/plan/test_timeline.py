"""A simulated step against what can be said of one without a simulation."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from mpcomp.engines.schedules import ring_order, warmup_of
from mpcomp.plan import Messages, Network, StageTimes, Timeline, timeline
from mpcomp.plan.network import FIRST_WINDOW, PACKET_SHARE, Wires
from mpcomp.plan.timeline import BACKWARD, FORWARD
from recipes.bench.link_bound import least_step_s

NOTHING = Messages(0, 0)


def step(
    stages: Sequence[StageTimes],
    sent: Messages = NOTHING,
    mbps: float = math.inf,
    latency_s: float = 0.0,
    *,
    chunks: int = 8,
    message_s: float = 0.0,
    in_flight: int | None = None,
    num_cores: int | None = None,
) -> Timeline:
    network = Network.alike(len(stages), mbps, latency_s, message_s=message_s)
    return timeline(
        stages,
        [sent] * (len(stages) - 1),
        network,
        chunks=chunks,
        in_flight=in_flight,
        num_cores=num_cores,
    )


def test_one_stage_computes_all_microbatches_in_turn() -> None:
    assert step([StageTimes(2, 3)], chunks=4).step_s == pytest.approx(20)


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("chunks", [1, 4, 9])
def test_free_links_leave_the_bubble_of_1f1b(num_stages: int, chunks: int) -> None:
    found = step([StageTimes(1, 2)] * num_stages, chunks=chunks)
    assert found.step_s == pytest.approx((chunks + num_stages - 1) * 3)
    assert found.bubble == pytest.approx((num_stages - 1) / (chunks + num_stages - 1))


def test_coding_is_work_of_the_stage_that_codes() -> None:
    stages = [
        StageTimes(1, 2, encode_act_s=0.25, decode_grad_s=0.5),
        StageTimes(1, 2, decode_act_s=0.125, encode_grad_s=1),
    ]
    found = step(stages, chunks=1)
    assert found.step_s == pytest.approx(1.25 + 1.125 + 3 + 2.5)
    assert found.busy_s == pytest.approx([3.75, 4.125])


def test_a_message_takes_its_bytes_with_headers_over_the_rate_and_the_latency() -> None:
    there, back = Messages(1e6, 0), Messages(0, 5e5)
    stages = [StageTimes(0, 0)] * 2
    assert step(stages, there, 8, 0.25, chunks=1).step_s == pytest.approx(1 / PACKET_SHARE + 0.5)
    assert step(stages, back, 8, 0.25, chunks=1).step_s == pytest.approx(0.5 / PACKET_SHARE + 0.5)


def test_latency_is_hidden_by_microbatches_under_way_and_no_others() -> None:
    stages = [StageTimes(1, 1)] * 2
    deep, shallow = (step(stages, latency_s=4, chunks=16, in_flight=n) for n in (16, 2))
    assert deep.step_s == pytest.approx((1 + 4) + 16 * 2 + (4 + 1))  # there and back, once
    assert shallow.step_s > 2 * deep.step_s


def test_a_middle_host_has_one_wire_for_both_of_its_cuts() -> None:
    """Three stages, many microbatches: the one in the middle receives two messages for each."""
    seconds = 0.5
    sent = Messages(*[seconds * PACKET_SHARE * 1e6] * 2)
    found = step([StageTimes(0, 0)] * 3, sent, 8, chunks=100)
    assert 100 <= found.step_s <= 104


def test_a_slow_link_holds_back_its_own_messages_alone() -> None:
    stages = [StageTimes(1, 1)] * 3
    sent = [Messages(1e6 * PACKET_SHARE, 0)] * 2
    rates = ((math.inf,) * 3, (0.0, 0.0))
    slow_first = timeline(stages, sent, Network(*rates, link_mbps=(2.0, 80.0)), chunks=8)
    fast = timeline(stages, sent, Network(*rates, link_mbps=(80.0, 80.0)), chunks=8)
    assert slow_first.step_s > 32  # eight messages of four seconds
    assert fast.step_s < 22


def test_cores_are_shared() -> None:
    stages = [StageTimes(1, 2)] * 4
    assert step(stages, num_cores=1).step_s == pytest.approx(8 * 4 * 3)
    assert step(stages, num_cores=4).step_s == step(stages).step_s
    two = step(stages, num_cores=2).step_s
    assert 8 * 4 * 3 / 2 <= two < 8 * 4 * 3
    events = [(s.start_s, 1) for s in step(stages, num_cores=2).spans]
    events += [(s.end_s, -1) for s in step(stages, num_cores=2).spans]
    busy = 0
    for _, change in sorted(events):
        busy += change
        assert 0 <= busy <= 2


def test_every_pass_comes_after_what_it_needs() -> None:
    stages = [StageTimes(1, 2, 0.1, 0.1, 0.1, 0.1)] * 4
    found = step(stages, Messages(1e5, 2e5), 5, 0.3)
    when = {(span.stage, span.kind, span.microbatch): span for span in found.spans}
    assert len(when) == len(found.spans) == 4 * 2 * 8
    for (stage, kind, microbatch), span in when.items():
        if kind == FORWARD and stage > 0:
            assert span.start_s >= when[stage - 1, FORWARD, microbatch].end_s + 0.3
        if kind == BACKWARD and stage < 3:
            assert span.start_s >= when[stage + 1, BACKWARD, microbatch].end_s + 0.3
        if kind == BACKWARD and microbatch:
            assert span.start_s >= when[stage, BACKWARD, microbatch - 1].end_s
    assert found.step_s == max(span.end_s for span in found.spans)


@pytest.mark.parametrize("num_cores", [None, 1, 3])
@pytest.mark.parametrize("in_flight", [None, 1, 3])
@pytest.mark.parametrize("latency_s", [0.0, 0.25, 4.0])
def test_work_waits_for_its_stage_its_input_and_a_core_and_nothing_else(
    latency_s: float, in_flight: int | None, num_cores: int | None
) -> None:
    """Times are multiples of a quarter: sums are exact, and much happens at one time."""
    draw = random.Random(0)
    stages = [StageTimes(*(draw.randrange(8) / 4 for _ in range(6))) for _ in range(5)]
    found = step(stages, latency_s=latency_s, chunks=12, in_flight=in_flight, num_cores=num_cores)
    ends = {(span.stage, span.kind, span.microbatch): span.end_s for span in found.spans}
    stage_free = [0.0] * 5
    for stage, kind, microbatch, start, end in found.spans:
        sender = ends.get((stage + (1 if kind == BACKWARD else -1), kind, microbatch))
        due = max(stage_free[stage], 0.0 if sender is None else sender + latency_s)
        if num_cores is None:
            assert start == due
        else:  # all cores were at work until then
            overlaps = (min(start, s.end_s) - max(due, s.start_s) for s in found.spans)
            assert sum(max(0.0, overlap) for overlap in overlaps) == num_cores * (start - due)
        stage_free[stage] = end
    starts = [span.start_s for span in found.spans]
    assert starts == sorted(starts)


@pytest.mark.parametrize("in_flight", [None, 1, 3, 20])
def test_a_stage_alternates_after_its_first_forwards(in_flight: int | None) -> None:
    num_stages, chunks = 4, 9
    found = step([StageTimes(1, 2)] * num_stages, chunks=chunks, in_flight=in_flight)
    for stage in range(num_stages):
        depth = min(chunks, in_flight or 2 * num_stages - 1)
        first = warmup_of(stage, num_stages, depth)
        kinds = [FORWARD] * first + [BACKWARD, FORWARD] * (chunks - first) + [BACKWARD] * first
        own = [span for span in found.spans if span.stage == stage]
        assert [span.kind for span in own] == kinds
        for kind in (FORWARD, BACKWARD):
            assert [span.microbatch for span in own if span.kind == kind] == list(range(chunks))


@pytest.mark.parametrize(
    ("bytes_a_token", "chunks", "recorded_s"), [(4096 / 2, 64, 100.475), (644 / 2, 32, 19.889)]
)
def test_the_records_of_protocol_nanogpt(
    bytes_a_token: float, chunks: int, recorded_s: float
) -> None:
    """Eight stages, 200 Mbit/s, and 50 ms for which a message occupies the wire; no headers."""
    message = 524_288 / chunks * bytes_a_token * PACKET_SHARE
    found = step(
        [StageTimes(0, 0)] * 8,
        Messages(message, message),
        200,
        chunks=chunks,
        message_s=0.05,
        in_flight=8,
    )
    assert found.step_s == pytest.approx(recorded_s, rel=0.01)


@pytest.mark.parametrize("mbps", [1.0, 10.0, 1000.0])
@pytest.mark.parametrize("chunks", [2, 8, 20])
def test_no_step_is_faster_than_its_bound(mbps: float, chunks: int) -> None:
    stages = [StageTimes(0.05, 0.1), StageTimes(0.1, 0.2), StageTimes(0.02, 0.03)]
    size = 20_000.0
    message_s = size / PACKET_SHARE * 8e-6 / mbps
    both = 2 * chunks * message_s
    bound = least_step_s(
        [stage.forward_s for stage in stages],
        [stage.backward_s for stage in stages],
        chunks=chunks,
        message_s=message_s,
        sent_s=[both / 2, both, both / 2],
        received_s=[both / 2, both, both / 2],
        num_cores=3,
    )
    found = step(stages, Messages(size, size), mbps, chunks=chunks, in_flight=chunks)
    assert bound <= found.step_s * (1 + 1e-9)
    assert found.step_s < 1.6 * bound


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"chunks": 0}, "chunks is 0"),
        ({"in_flight": 0}, "in_flight is 0"),
        ({"num_cores": 0}, "num_cores is 0"),
        ({"mbps": 0.0}, "above 0"),
        ({"latency_s": -1.0}, "from 0 up"),
    ],
)
def test_bad_settings_are_refused(change: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        step([StageTimes(1, 1)] * 2, **change)  # type: ignore[arg-type]


def test_numbers_that_do_not_fit_are_refused() -> None:
    network = Network.alike(2, 10)
    with pytest.raises(ValueError, match="3 stages, 1 cuts and 2 hosts"):
        timeline([StageTimes(1, 1)] * 3, [NOTHING], network, chunks=1)
    with pytest.raises(ValueError, match="latency_s has 1 values for 2 links"):
        Network((1.0, 1.0, 1.0), (0.0,))


@pytest.mark.parametrize(
    ("num_bytes", "round_trips"), [(10_000, 0), (14_480, 0), (20_000, 1), (100_000, 2)]
)
def test_a_window_is_doubled_with_each_round_trip(num_bytes: int, round_trips: int) -> None:
    """Of 14,480 bytes, 28,960 and so on, until all are sent; without a limit of the rate."""
    network = Network.alike(2, math.inf, 0.05, window_bytes=FIRST_WINDOW)
    arrived = Wires(network, 2).arrival(0, 1, num_bytes, 1.0)
    assert arrived == pytest.approx(1.05 + 0.1 * round_trips)


def test_a_window_is_as_large_as_what_it_has_carried() -> None:
    network = Network.alike(2, math.inf, 0.05, window_bytes=10_000)
    wires = Wires(network, 2)
    first, second, third = (wires.arrival(0, 1, 20_000, now) for now in (0.0, 10.0, 20.0))
    assert first == pytest.approx(0.15)
    assert second == pytest.approx(10.05)  # 30,000 by now
    assert third == pytest.approx(20.05)
    assert wires.arrival(1, 0, 20_000, 30.0) == pytest.approx(30.15)  # another connection


@pytest.mark.parametrize(
    ("num_bytes", "round_trips"), [(14_480, 0), (57_920, 0), (57_921, 1), (173_761, 2)]
)
def test_every_connection_has_a_window(num_bytes: int, round_trips: int) -> None:
    network = Network.alike(2, math.inf, 0.05, window_bytes=FIRST_WINDOW, connections=4)
    arrived = Wires(network, 2).arrival(0, 1, num_bytes, 1.0)
    assert arrived == pytest.approx(1.05 + 0.1 * round_trips)
    with pytest.raises(ValueError, match="connections=0: pass a whole number"):
        Network.alike(2, 1.0, connections=0)


def test_where_the_rate_is_the_limit_no_window_is() -> None:
    slow, free = (
        Wires(Network.alike(2, 1.0, 0.01, window_bytes=window), 2).arrival(0, 1, 1e6, 0.0)
        for window in (FIRST_WINDOW, math.inf)
    )
    assert slow == free  # a round trip's worth of 1 Mbit/s is 2,500 bytes


ONE = StageTimes(1, 2)


def ring(
    num_hosts: int,
    sent: Messages = NOTHING,
    mbps: float = math.inf,
    latency_s: float = 0.0,
    *,
    times: StageTimes = ONE,
    chunks: int = 1,
    in_flight: int | None = None,
    num_cores: int | None = None,
) -> Timeline:
    """A step where the first host has the last stage as well."""
    return timeline(
        [times] * (num_hosts + 1),
        [sent] * num_hosts,
        Network.alike(num_hosts, mbps, latency_s),
        chunks=chunks,
        in_flight=in_flight,
        num_cores=num_cores,
    )


@pytest.mark.parametrize("num_hosts", [2, 3, 5])
def test_one_microbatch_goes_round_and_back(num_hosts: int) -> None:
    """All stages compute in turn; each way it crosses as many links as there are hosts."""
    assert ring(num_hosts).step_s == pytest.approx(3 * (num_hosts + 1))
    assert ring(num_hosts, latency_s=0.25).step_s == pytest.approx(
        3 * (num_hosts + 1) + 2 * num_hosts * 0.25
    )
    second = Messages(1e6 * PACKET_SHARE, 1e6 * PACKET_SHARE)
    nothing = StageTimes(0, 0)
    assert ring(num_hosts, second, 8, times=nothing).step_s == pytest.approx(2 * num_hosts)


def test_a_ring_of_two_hosts_by_hand() -> None:
    """Three microbatches, forward 1 s and backward 2 s everywhere, links that cost nothing."""
    found = ring(2, chunks=3)
    assert [tuple(span) for span in found.spans if span.stage != 1] == [
        (0, FORWARD, 0, 0, 1),
        (0, FORWARD, 1, 1, 2),
        (2, FORWARD, 0, 2, 3),
        (2, BACKWARD, 0, 3, 5),
        (0, FORWARD, 2, 5, 6),
        (2, FORWARD, 1, 6, 7),
        (2, BACKWARD, 1, 7, 9),
        (2, FORWARD, 2, 9, 10),
        (2, BACKWARD, 2, 10, 12),
        (0, BACKWARD, 0, 12, 14),
        (0, BACKWARD, 1, 14, 16),
        (0, BACKWARD, 2, 16, 18),
    ]
    assert [tuple(span) for span in found.spans if span.stage == 1] == [
        (1, FORWARD, 0, 1, 2),
        (1, FORWARD, 1, 2, 3),
        (1, BACKWARD, 0, 5, 7),
        (1, FORWARD, 2, 7, 8),
        (1, BACKWARD, 1, 9, 11),
        (1, BACKWARD, 2, 12, 14),
    ]
    assert found.busy_s == pytest.approx([9, 9, 9])
    assert found.bubble == pytest.approx(1 - 27 / (2 * 18))


def test_two_hosts_have_one_wire_each_for_both_cuts() -> None:
    """Each sends two messages for a microbatch, and receives two."""
    seconds = 0.5
    sent = Messages(*[seconds * PACKET_SHARE * 1e6] * 2)
    found = ring(2, sent, 8, times=StageTimes(0, 0), chunks=100)
    assert 100 <= found.step_s <= 104


@pytest.mark.parametrize(
    ("latencies", "rates", "there_s"),
    [
        ((0.25, 0.5), (8.0, 4.0), 0.25 + 0.5 + 0.5 + 1 + 2 + 2),
        ((0.5, 0.25), (4.0, 8.0), 0.5 + 0.25 + 0.5 + 2 + 1 + 2),
        ((0.25, 0.5, 4.0), (8.0, 4.0, 16.0), 0.25 + 0.5 + 4.0 + 1 + 2 + 0.5),
    ],
)
def test_the_way_back_is_the_slowest_link_unless_it_is_known(
    latencies: tuple[float, ...], rates: tuple[float, ...], there_s: float
) -> None:
    network = Network((math.inf,) * 3, latencies, link_mbps=rates)
    second = Messages(1e6 * PACKET_SHARE, 1e6 * PACKET_SHARE)
    found = timeline([StageTimes(0, 0)] * 4, [second] * 3, network, chunks=1)
    assert found.step_s == pytest.approx(2 * there_s)


@pytest.mark.parametrize("in_flight", [None, 1, 2, 5, 20])
@pytest.mark.parametrize("chunks", [1, 2, 3, 9])
@pytest.mark.parametrize("num_hosts", [2, 3, 4, 8])
def test_the_first_host_goes_in_the_order_of_the_ring(
    num_hosts: int, chunks: int, in_flight: int | None
) -> None:
    """And the others in that of all pipelines, with a stage more behind them."""
    times = StageTimes(1, 2, 0.1, 0.1, 0.1, 0.1)
    found = ring(
        num_hosts, Messages(1e5, 2e5), 5, 0.3, times=times, chunks=chunks, in_flight=in_flight
    )
    assert len(found.spans) == 2 * chunks * (num_hosts + 1)
    depth = min(chunks, in_flight or 2 * num_hosts + 1)
    names = {(0, FORWARD): "F", (0, BACKWARD): "B", (num_hosts, FORWARD): "L"}
    own = [span for span in found.spans if span.stage in (0, num_hosts)]
    done = [(names.get(span[:2], "loss"), span.microbatch) for span in own]
    expected = list(ring_order(chunks, depth, num_hosts))
    assert [each for each in done if each[0] != "loss"] == expected
    for (what, i), after in itertools.pairwise(done):
        assert (what == "L") == (after == ("loss", i))
    for one, other in itertools.pairwise(own):
        assert one.end_s <= other.start_s  # on one processor
    for stage in range(1, num_hosts):
        warmup = warmup_of(stage, num_hosts + 1, depth)
        kinds = [FORWARD] * warmup + [BACKWARD, FORWARD] * (chunks - warmup) + [BACKWARD] * warmup
        assert [span.kind for span in found.spans if span.stage == stage] == kinds
    when = {(span.stage, span.kind, span.microbatch): span for span in found.spans}
    for (stage, kind, microbatch), span in when.items():
        if kind == FORWARD and stage > 0:
            assert span.start_s >= when[stage - 1, FORWARD, microbatch].end_s + 0.3
        if kind == BACKWARD and stage < num_hosts:
            assert span.start_s >= when[stage + 1, BACKWARD, microbatch].end_s + 0.3


@pytest.mark.parametrize("num_hosts", [2, 4, 8])
@pytest.mark.parametrize("chunks", [2, 4, 8, 16])
def test_on_free_links_the_first_host_waits_for_a_round_there_and_back(
    num_hosts: int, chunks: int
) -> None:
    """And no longer, whether there are fewer microbatches than hosts or more."""
    found = ring(num_hosts, chunks=chunks)
    busiest = 3 * 2 * chunks
    assert busiest <= found.step_s <= busiest + 2 * 3 * (num_hosts - 1) + 3


def test_hosts_of_a_ring_share_cores() -> None:
    assert ring(3, chunks=4, num_cores=1).step_s == pytest.approx(4 * 4 * 3)
    assert ring(3, chunks=4, num_cores=3).step_s == ring(3, chunks=4).step_s


def test_a_host_alone_has_one_stage() -> None:
    with pytest.raises(ValueError, match="2 stages, 1 cuts and 1 hosts"):
        ring(1)
    with pytest.raises(ValueError, match="4 stages, 3 cuts and 2 hosts"):
        timeline([StageTimes(1, 1)] * 4, [NOTHING] * 3, Network.alike(2, 1.0), chunks=1)
