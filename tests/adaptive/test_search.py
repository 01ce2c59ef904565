"""GraVAC's search: the paper's ladders and choices, what it leaves open, and its settings."""

import itertools
import json
import math
import random
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpcomp import ErrorFeedback, Quantize, RandomK, Sign, TopK, parse
from mpcomp.adaptive.clock import ModelledClock, WallClock
from mpcomp.adaptive.search import Search, ladder
from mpcomp.data_parallel.methods.gravac import GraVAC

WINDOW = 10
#: Settings of the paper's evaluation, 32 workers: DGC's threshold, RedSync's, and random-k inside.
PAPER = {
    "dgc": {"cf": (10, 1000), "eps": 0.7, "window": 500, "omega": 0.01},
    "redsync": {"cf": (10, 2000), "eps": 0.7, "window": 2000, "omega": 0.01, "policy": "geometric"},
    "randomk": {
        "cf": (1.5, 1000),
        "eps": 0.7,
        "window": 2000,
        "omega": 0.01,
        "policy": "geometric",
    },
}


def search(cf=(10, 1000), **settings):
    return Search(cf, **{"window": WINDOW, "smoothing": 0.5, **settings})


def steps(run, gain, seconds, count=WINDOW):
    """``count`` steps with gains and seconds that are functions of the CF; the branches taken."""
    taken = []
    for _ in range(count):
        run.average(gain(run.cf_min), gain(run.cf_candidate))
        branch = run.branch()
        run.record(branch, seconds(run.cf_of(branch)))
        run.end_step()
        taken.append(branch)
    return taken


def falling(cf):
    """A gain that is well above 0.7 for all CFs, and differs by more than 1 % from one to next."""
    return 0.98 - 0.03 * math.log2(cf) / 2


def sending(cf):
    """Seconds of a step that does nothing but send."""
    return 1 / cf


class TestLadder:
    def test_exponential(self):
        assert ladder((10, 1000), "exponential") == (10, 20, 40, 160, 1000)

    def test_geometric(self):
        expected = (10, 20, 40, 80, 160, 320, 640, 1280, 2000)
        assert ladder((10, 2000), "geometric") == expected

    @pytest.mark.parametrize("policy", ["exponential", "geometric"])
    def test_one_cf(self, policy):
        assert ladder((8, 8), policy) == (8,)

    @given(st.floats(1, 1e300), st.floats(1, 1e300), st.sampled_from(["exponential", "geometric"]))
    def test_ascends_from_smallest_to_largest(self, a, b, policy):
        rungs = ladder((min(a, b), max(a, b)), policy)
        assert rungs[0] == min(a, b) and rungs[-1] == max(a, b)
        assert all(x < y for x, y in itertools.pairwise(rungs))


class TestAscent:
    def test_candidates_of_each_window(self):
        run = search()
        tested = []
        for _ in range(6):
            tested.append(run.cf_candidate)
            assert set(steps(run, falling, sending)) == {"candidate"}
        assert tested == [20, 40, 160, 1000, 1000, 1000]
        assert run.cf_min == 10 and not run.saturated
        assert [decision["tested"] for decision in run.history] == tested
        assert [decision["actions"] for decision in run.history[:3]] == [["candidate up"]] * 3
        assert run.history[-1]["actions"] == []

    def test_stops_at_1280_where_2000_is_no_faster(self):
        """ResNet101 with RedSync: 1029.9 samples a second at 1280, 1035.4 at 2000."""
        throughput = {1280: 1029.9, 2000: 1035.4}
        run = search((10, 2000), policy="geometric")
        for _ in range(8):
            steps(run, falling, lambda cf: falling(cf) / throughput.get(cf, cf / 2))
        assert run.saturated and run.cf_candidate == 1280
        assert run.history[-1]["actions"] == ["saturated"]
        assert run.throughputs[1280] == pytest.approx(1029.9)
        steps(run, falling, lambda cf: 1 / cf, 5 * WINDOW)
        assert run.cf_candidate == 1280

    def test_takes_the_smaller_cf_where_throughput_falls(self):
        throughput = {20: 100.5, 40: 100.0}
        run = search()
        steps(run, falling, lambda cf: falling(cf) / throughput[cf], 2 * WINDOW)
        assert run.saturated and run.cf_candidate == 20

    def test_throughput_is_a_median_over_the_window(self):
        """A step with an evaluation in it, the last one here, does not count for much."""
        run = search(window=4)
        for seconds in (0.1, 0.1, 0.2, 50.0):
            run.average(0.9, 0.8)
            run.record("candidate", seconds)
            if seconds < 1:
                run.end_step()
        assert run.throughputs == {20: pytest.approx((0.8 / 0.1 + 0.8 / 0.2) / 2)}

    def test_a_later_window_replaces_an_earlier_one(self):
        run = search((10, 20))
        steps(run, lambda cf: 0.9 if cf == 10 else 0.8, lambda cf: 1.0)
        assert run.throughputs == {20: pytest.approx(0.8)}
        steps(run, lambda cf: 0.9 if cf == 10 else 0.8, lambda cf: 0.5)
        assert run.throughputs == {20: pytest.approx(1.6)}

    def test_an_old_throughput_is_forgotten(self):
        run = search((10, 40))  # three rungs
        steps(run, falling, sending)
        assert set(run.throughputs) == {20}
        steps(run, falling, sending, 2 * WINDOW)
        assert set(run.throughputs) == {20, 40}
        steps(run, falling, sending, WINDOW)
        assert set(run.throughputs) == {40}

    def test_minimum_moves_to_the_candidate_that_was_tested(self):
        run = search()
        steps(run, lambda cf: {10: 0.9, 20: 0.8, 40: 0.795}[cf], sending)
        assert (run.cf_min, run.cf_candidate) == (10, 40)  # 20 loses more than 1 %
        steps(run, lambda cf: {10: 0.8, 40: 0.795}[cf], sending)
        assert run.history[-1]["actions"] == ["minimum up", "candidate up"]
        assert (run.cf_min, run.cf_candidate) == (40, 160)

    def test_a_cf_takes_its_average_along(self):
        run = search()
        steps(run, lambda cf: 0.8, sending)
        assert run.cf_min == 20
        assert run.gain_min == pytest.approx(0.8) and run.gain_candidate is None

    def test_one_rung_is_the_minimum(self):
        run = search((50, 50))
        assert run.cf_candidate == 50
        taken = steps(run, lambda cf: 0.8, sending, 3 * WINDOW)
        assert set(taken) == {"minimum"} and run.throughputs == {50: pytest.approx(40)}


class TestEpsilon:
    def test_dense_before_anything_is_known(self):
        assert search().branch() == "dense"

    def test_gain_at_eps_is_enough(self):
        run = search(eps=0.7)
        run.average(0.8, 0.7)
        assert run.branch() == "candidate" and run.cf_of("candidate") == 20

    def test_falls_back_to_the_minimum_then_to_dense_and_recovers(self):
        run = search(smoothing=1.0)
        run.average(0.8, 0.6)
        assert run.branch() == "minimum" and run.cf_of("minimum") == 10
        run.average(0.6, 0.5)
        assert run.branch() == "dense" and run.cf_of("dense") == 1
        run.average(0.9, 0.8)
        assert run.branch() == "candidate"

    def test_averages_delay_the_fall(self):
        run = search(smoothing=0.5)
        run.average(0.9, 0.9)
        run.average(0.9, 0.6)
        assert run.gain_candidate == pytest.approx(0.75) and run.branch() == "candidate"
        run.average(0.9, 0.6)
        assert run.gain_candidate == pytest.approx(0.675) and run.branch() == "minimum"

    def test_a_new_candidate_waits_for_its_own_gain(self):
        run = search()
        steps(run, falling, sending)
        assert run.gain_candidate is None and run.branch() == "minimum"
        run.average(0.9, 0.8)
        assert run.gain_candidate == 0.8 and run.branch() == "candidate"

    def test_dense_steps_are_no_candidate_for_saturation(self):
        run = search(smoothing=1.0)
        half = WINDOW // 2
        steps(run, lambda cf: 0.5, lambda cf: 1.0, half)
        assert run.dense_throughput == 1 and run.throughputs == {}
        # Exactly as fast as the dense steps before.
        steps(run, lambda cf: 0.9 if cf == 10 else 0.8, lambda cf: 0.8, half)
        assert not run.saturated and run.cf_candidate == 40

    def test_a_rejected_candidate_makes_room_for_the_next(self):
        run = search()
        assert set(steps(run, lambda cf: 0.9 if cf == 10 else 0.5, sending)) == {"minimum"}
        assert run.cf_candidate == 40 and run.throughputs == {10: pytest.approx(9)}

    def test_saturation_ends_where_the_gain_is_lost(self):
        run = search()
        steps(run, falling, lambda cf: falling(cf) / (100 if cf < 40 else 200), 2 * WINDOW)
        steps(run, falling, lambda cf: falling(cf) / 200)
        assert run.saturated and run.cf_candidate == 40
        steps(run, lambda cf: 0.9 if cf < 40 else 0.5, sending)
        assert run.history[-1]["actions"] == ["candidate down"]
        assert not run.saturated and run.cf_candidate == 20 and run.throughputs == {}
        steps(run, falling, sending)
        assert run.cf_candidate == 40

    def test_a_saturated_minimum_has_nowhere_to_go_down_to(self):
        run = search()
        run.average(0.9, 0.8)
        run.record("minimum", 0.9)
        run.record("candidate", 0.8)
        steps(run, lambda cf: 0.9 if cf == 10 else 0.8, lambda cf: 0.8)
        assert run.saturated and run.cf_candidate == run.cf_min == 10
        assert set(steps(run, lambda cf: 0.5, sending)[1:]) == {"dense"}
        assert run.saturated
        assert steps(run, lambda cf: 0.9, sending)[-1] == "minimum"

    def test_the_minimum_goes_back_to_the_first_rung(self):
        run = search()
        steps(run, lambda cf: 0.9, sending)
        assert run.cf_min == 20
        steps(run, lambda cf: 0.5, sending)
        assert run.history[-1]["actions"] == ["minimum down", "candidate up"]
        assert run.cf_min == 10 and run.gain_min is None and run.branch() == "dense"


class TestDescent:
    """Decision 11: where the largest CF is rejected."""

    GAINS: ClassVar = {10: 0.95, 20: 0.9, 40: 0.85, 160: 0.65, 1000: 0.5}

    def driven(self, run, gains, windows):
        """The candidate of each window, and what was sent at the end of it."""
        found = []
        for _ in range(windows):
            candidate = run.cf_candidate
            found.append((candidate, steps(run, gains.__getitem__, sending)[-1]))
        return found

    def test_down_a_rung_in_each_window_then_it_stays_and_tries_again(self):
        run = search()
        ascent = [(20, "candidate"), (40, "candidate"), (160, "minimum"), (1000, "minimum")]
        down = [(160, "minimum")]
        stays = [(40, "candidate")] * (1 + len(run.rungs))
        assert self.driven(run, self.GAINS, 4) == ascent
        assert run.history[-1]["actions"] == ["candidate down"]
        again = [*down, *stays]
        assert self.driven(run, self.GAINS, 3 * len(again)) == 3 * again
        assert run.cf_min == 10 and not run.saturated
        # Most of what Algorithm 1 would have sent by the minimum goes by the candidate.
        assert len(stays) > 5 * len(down)

    def test_gains_that_grow_are_used(self):
        run = search()
        self.driven(run, self.GAINS, 6)
        grown = {**self.GAINS, 160: 0.8, 1000: 0.75}
        later = self.driven(run, grown, 10)
        assert later == 5 * [(40, "candidate")] + [(160, "candidate")] + 4 * [(1000, "candidate")]

    def test_down_to_the_minimum_and_up_again(self):
        """None but the minimum is accepted: its own gain decides, and 20 is tested now and then."""
        run = search()
        gains = {10: 0.8, 20: 0.6, 40: 0.5, 160: 0.4, 1000: 0.3}
        found = self.driven(run, gains, 30)
        assert {branch for _, branch in found} == {"minimum"}
        assert [cf for cf, _ in found[:7]] == [20, 40, 160, 1000, 160, 40, 20]
        assert set(found[8:]) == {(10, "minimum"), (20, "minimum")}
        assert found.count((10, "minimum")) > 5 * found[8:].count((20, "minimum"))

    def test_the_way_down_is_resumed(self):
        whole, run = search(), search()
        self.driven(whole, self.GAINS, 20)
        for windows in (4, 1, 3, 12):
            self.driven(run, self.GAINS, windows)
            text = json.dumps(run.state_dict(), allow_nan=False)
            run = search()
            run.load_state_dict(json.loads(text))
        assert run.state_dict() == whole.state_dict()


class TestSteps:
    def test_skipped_steps_count_and_change_nothing_else(self):
        run = search()
        for _ in range(WINDOW - 1):
            assert run.end_step() is None
        decision = run.end_step()
        assert decision is not None and decision["actions"] == ["not measured"]
        assert (run.cf_min, run.cf_candidate) == (10, 20)

    def test_unknown_seconds_record_nothing(self):
        run = search()
        run.average(0.9, 0.8)
        run.record("candidate", math.nan)
        run.record("candidate", 0.0)
        assert run.throughputs == {}

    @pytest.mark.parametrize("seconds", [-1.0, math.inf, -math.inf])
    def test_impossible_seconds(self, seconds):
        run = search()
        run.average(0.9, 0.8)
        with pytest.raises(ValueError, match="finite time"):
            run.record("candidate", seconds)

    @pytest.mark.parametrize("gains", [(math.nan, 0.5), (0.5, math.nan), (-0.1, 0), (math.inf, 1)])
    def test_gains_that_are_none(self, gains):
        run = search()
        with pytest.raises(ValueError, match="leave out steps whose gradient is not finite"):
            run.average(*gains)
        assert run.gain_min is None and run.gain_candidate is None

    def test_gain_above_one_is_kept_as_it_is(self):
        run = search()
        run.average(1.2, 1.1)
        assert run.gain_min == 1.2 and run.branch() == "candidate"

    def test_gain_of_zero(self):
        run = search()
        assert set(steps(run, lambda cf: 0.0, sending, 3 * WINDOW)) == {"dense"}
        assert run.cf_min == 10

    @pytest.mark.parametrize("policy", ["exponential", "geometric"])
    def test_random_steps(self, policy):
        draw = random.Random(7)
        seen = set()
        for _ in range(50):
            run = search((3, 700), policy=policy, smoothing=0.2)
            for step in range(1, 401):
                if step % 80 == 1:  # phases, in which gains and seconds do and do not differ
                    level, slope = draw.uniform(0.5, 1.0), draw.choice([0.0, 0.02, 0.03])
                    sends = draw.choice([0.0, 1.0])
                before = (run.cf_min, run.cf_candidate, run.saturated)
                if draw.random() < 0.95:
                    gains = [
                        max(0.0, level - slope * math.log2(cf) + draw.uniform(-0.01, 0.01))
                        for cf in (run.cf_min, run.cf_candidate)
                    ]
                    run.average(*gains)
                    branch = run.branch()
                    assert branch == "dense" or run.cf_of(branch) in run.rungs
                    assert branch != "candidate" or run.cf_candidate > run.cf_min
                    seconds = 0.1 + sends / run.cf_of(branch)
                    run.record(branch, math.nan if draw.random() < 0.1 else seconds)
                decision = run.end_step()
                assert run.steps == step and (decision is None) == (step % WINDOW != 0)
                assert 3 <= run.cf_min <= run.cf_candidate <= 700
                assert set(run.throughputs) <= set(run.rungs)
                if decision is None:
                    assert before == (run.cf_min, run.cf_candidate, run.saturated)
                else:
                    seen.update(decision["actions"])
            assert len(run.history) == 400 // WINDOW
        # All kinds of decisions did occur, so the assertions have seen them.
        ups, downs = {"minimum up", "candidate up"}, {"minimum down", "candidate down"}
        assert ups | downs | {"saturated"} <= seen


class TestState:
    def test_resumed_equals_uninterrupted(self):
        def drive(run, draw, count):
            for _ in range(count):
                if draw.random() < 0.9:
                    low = draw.uniform(0.4, 1.0)
                    run.average(low, low * draw.uniform(0.9, 1.0))
                    branch = run.branch()
                    run.record(branch, draw.uniform(0.5, 1.5) / run.cf_of(branch))
                run.end_step()

        whole, draw = search(), random.Random(3)
        drive(whole, draw, 10_000)

        run, draw = search(), random.Random(3)
        for count in (1, 9, 14, 2971, 5, 7000):
            drive(run, draw, count)
            text = json.dumps(run.state_dict(), allow_nan=False)
            run = search()
            run.load_state_dict(json.loads(text))
        assert run.state_dict() == whole.state_dict()
        assert run.history == whole.history and run.throughputs == whole.throughputs

    def test_a_state_is_no_view(self):
        run = search()
        steps(run, falling, sending)
        state = run.state_dict()
        text = json.dumps(state)
        steps(run, falling, sending, 3 * WINDOW)
        assert json.dumps(state) == text

    @pytest.mark.parametrize(
        "other", [{"cf": (10, 2000)}, {"policy": "geometric"}, {"window": WINDOW + 1}]
    )
    def test_other_settings_are_refused(self, other):
        with pytest.raises(ValueError, match="same cf, policy and window"):
            search(**other).load_state_dict(search().state_dict())


class TestSettings:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("gravac+topk:0.1", GraVAC(TopK(0.1))),
            ("gravac:cf=10-1000+topk:0.1", GraVAC(TopK(0.1), cf=(10, 1000))),
            ("gravac:2-64.5+randomk:0.1", GraVAC(RandomK(0.1), cf=(2, 64.5))),
            ("gravac:cf=4-32:eps=0.9+quant:8", GraVAC(Quantize(8), cf=(4, 32), eps=0.9)),
            (
                "gravac:window=20:omega=0.05:policy=geometric:exact=true:smoothing=0.5+topk:0.1",
                GraVAC(
                    TopK(0.1), window=20, omega=0.05, policy="geometric", exact=True, smoothing=0.5
                ),
            ),
            (
                "gravac:bandwidth_mbps=100:latency_ms=1:compute_ms=20+topk:0.1",
                GraVAC(TopK(0.1), bandwidth_mbps=100.0, latency_ms=1.0, compute_ms=20.0),
            ),
        ],
    )
    def test_spec(self, text, value):
        assert parse(text) == value
        assert parse(str(value)) == value
        assert hash(parse(str(value))) == hash(value)

    @given(st.floats(1, 1e300), st.floats(1, 1e300))
    def test_any_two_factors_survive_as_text(self, a, b):
        value = GraVAC(TopK(0.1), cf=(min(a, b), max(a, b)))
        assert parse(str(value)) == value

    def test_factors_as_a_list_of_whole_numbers(self):
        value = GraVAC(TopK(0.1), cf=[10, 1000])
        assert value == GraVAC(TopK(0.1)) and value.cf == (10.0, 1000.0)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"cf": (0.5, 10)}, "1 or more"),
            ({"cf": (10, math.inf)}, "1 or more"),
            ({"cf": (math.nan, 10)}, "1 or more"),
            ({"cf": (1000, 10)}, r"write cf=\(10, 1000\)"),
            ({"cf": 10}, "smallest and the largest"),
            ({"cf": (1, 2, 3)}, "smallest and the largest"),
            ({"eps": 0}, "eps=0: expected a number in"),
            ({"eps": 1}, "eps=1: expected a number in"),
            ({"omega": 0}, "omega=0: expected a number in"),
            ({"omega": 1.5}, "omega=1.5: expected a number in"),
            ({"window": 0}, "window=0: expected a number of steps"),
            ({"window": 2.5}, "window=2.5: expected a number of steps"),
            ({"policy": "linear"}, "exponential or geometric"),
            ({"smoothing": 0}, "smoothing=0: expected a weight"),
            ({"latency_ms": 1}, "without bandwidth_mbps"),
            ({"compute_ms": 1}, "without bandwidth_mbps"),
            ({"bandwidth_mbps": 0}, "more than 0"),
            ({"bandwidth_mbps": 10, "compute_ms": -1}, "0 or more"),
        ],
    )
    def test_bad_settings(self, settings, message):
        with pytest.raises(ValueError, match=message):
            GraVAC(TopK(0.1), **settings)

    def test_what_stands_inside(self):
        with pytest.raises(TypeError, match="leave out other methods"):
            GraVAC(ErrorFeedback(TopK(0.1)))
        with pytest.raises(TypeError, match="leave out other methods"):
            GraVAC(GraVAC(TopK(0.1)))
        with pytest.raises(TypeError, match="has no compression factor to set"):
            GraVAC(Sign())
        with pytest.raises(ValueError, match="unbiased"):
            GraVAC(RandomK(0.1, unbiased=True))

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("gravac", "gravac needs inner"),
            ("gravac+ef+topk:0.1", "leave out other methods"),
            ("gravac+sign", "no compression factor"),
            ("gravac:cf=10+topk:0.1", "not 2 numbers; write 10-100"),
            ("gravac:cf=1-2-3+topk:0.1", "not 2 numbers; write 10-100"),
            ("gravac:cf=a-b+topk:0.1", "'a' is not float"),
            ("gravac:windows=10+topk:0.1", "did you mean 'window'"),
        ],
    )
    def test_bad_specs(self, spec, message):
        with pytest.raises(ValueError, match=message):
            parse(spec)

    @pytest.mark.parametrize("name", PAPER)
    def test_settings_of_the_paper(self, name):
        value = GraVAC(TopK(0.1), **{**PAPER[name], "eps": 0.9})
        assert value.eps == 0.9 and parse(str(value)) == value
        assert value.search(32).smoothing == 0.32

    def test_first_settings_of_the_paper_are_the_defaults(self):
        assert GraVAC(TopK(0.1), **PAPER["dgc"]) == GraVAC(TopK(0.1))

    def test_random_k_of_the_paper_passes_48(self):
        rungs = GraVAC(RandomK(0.1), **PAPER["randomk"]).search(32).rungs
        assert rungs[0] == 1.5 and 48 in rungs and rungs[-1] == 1000

    def test_smoothing(self):
        assert GraVAC(TopK(0.1)).search(4).smoothing == 0.04
        assert GraVAC(TopK(0.1)).search(500).smoothing == 1
        assert GraVAC(TopK(0.1), smoothing=0.3).search(4).smoothing == 0.3

    def test_clock(self):
        assert isinstance(GraVAC(TopK(0.1)).clock(), WallClock)
        modelled = GraVAC(TopK(0.1), bandwidth_mbps=100, latency_ms=2, compute_ms=30).clock()
        assert modelled == ModelledClock(30, 100, 2)
