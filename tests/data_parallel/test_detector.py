"""Accordion: which phases are critical, for how long, and its settings."""

import json
import math
import random

import pytest

from mpcomp import Cast, ErrorFeedback, RandomK, SameIndices, TopK, parse
from mpcomp.data_parallel.methods.accordion import Accordion, Detector
from mpcomp.data_parallel.methods.gravac import GraVAC

INTERVAL = 4


def drive(detector, norms, count=INTERVAL, lr=0.1):
    """``count`` steps; for each, whether the layers were critical in it."""
    seen = []
    for _ in range(count):
        detector.note_lr(lr)
        seen.append({name: detector.is_critical(name) for name in norms})
        if detector.due:
            detector.compare(norms)
        detector.end_step()
    return seen


def critical(detector, *names):
    return [detector.is_critical(name) for name in names]


class TestDetector:
    def test_all_are_critical_until_two_norms_can_be_compared(self):
        detector = Detector(INTERVAL)
        assert all(step["a"] for step in drive(detector, {"a": 1.0}))
        assert all(step["a"] for step in drive(detector, {"a": 1.0}))
        assert not detector.is_critical("a")
        assert not any(step["a"] for step in drive(detector, {"a": 1.0}))

    def test_layers_are_compared_by_themselves(self):
        detector = Detector(INTERVAL)
        drive(detector, {"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.0})
        drive(detector, {"a": 0.6, "b": 0.5, "c": 1.5, "d": 0.0})
        assert critical(detector, "a", "b", "c", "d") == [False, True, True, True]
        # Compared with the norm one interval ago, not with the first.
        drive(detector, {"a": 0.4, "b": 0.5, "c": 1.5, "d": 1.0})
        assert critical(detector, "a", "b", "c", "d") == [False, False, False, True]

    @pytest.mark.parametrize(("norm", "expected"), [(1.19, False), (1.21, True), (0.79, True)])
    def test_threshold(self, norm, expected):
        detector = Detector(INTERVAL, threshold=0.2)
        drive(detector, {"a": 1.0})
        drive(detector, {"a": norm})
        assert detector.is_critical("a") == expected

    def test_a_layer_never_compared_is_critical(self):
        detector = Detector(1)
        drive(detector, {"a": 1.0}, 2)
        assert critical(detector, "a", "new") == [False, True]
        drive(detector, {"a": 1.0, "new": 1.0}, 1)
        assert critical(detector, "a", "new") == [False, True]

    def test_a_falling_rate_makes_all_critical_until_the_next_comparison(self):
        detector = Detector(INTERVAL)
        drive(detector, {"a": 1.0}, 2 * INTERVAL + 1)
        assert not detector.is_critical("a")
        seen = drive(detector, {"a": 1.0}, 3, lr=0.01)
        assert [step["a"] for step in seen[:2]] == [True, True]
        assert not detector.is_critical("a")

    def test_a_rate_that_falls_in_the_step_of_a_comparison_holds_for_an_interval(self):
        detector = Detector(INTERVAL)
        drive(detector, {"a": 1.0}, 3 * INTERVAL - 1)
        assert detector.due
        drive(detector, {"a": 1.0}, 1, lr=0.01)
        seen = drive(detector, {"a": 1.0}, INTERVAL, lr=0.01)
        assert all(step["a"] for step in seen)
        assert not detector.is_critical("a")

    def test_a_rising_rate_changes_nothing(self):
        detector = Detector(INTERVAL)
        drive(detector, {"a": 1.0}, 2 * INTERVAL)
        assert not any(step["a"] for step in drive(detector, {"a": 1.0}, lr=0.2))

    def test_span(self):
        """Sums of the first two steps of every four, as of one epoch of every ten."""
        detector = Detector(4, span=2)
        flags = []
        for _ in range(8):
            flags.append((detector.accumulating, detector.due))
            detector.end_step()
        yes, due, no = (True, False), (True, True), (False, False)
        assert flags == [yes, due, no, no] * 2

    def test_without_span_all_steps_are_accumulated(self):
        detector = Detector(3)
        flags = []
        for _ in range(6):
            flags.append((detector.accumulating, detector.due))
            detector.end_step()
        assert flags == [(True, False), (True, False), (True, True)] * 2

    @pytest.mark.parametrize("norm", [math.nan, math.inf, -1.0])
    def test_norms_that_are_none(self, norm):
        detector = Detector(1)
        with pytest.raises(ValueError, match="norm .* of 'a'"):
            detector.compare({"a": norm})

    def test_compare_tells_what_is_critical(self):
        detector = Detector(1)
        assert detector.compare({"a": 1.0, "b": 1.0}) == {"a": True, "b": True}
        detector.end_step()
        assert detector.compare({"a": 1.0, "b": 9.0}) == {"a": False, "b": True}

    def test_resumed_equals_uninterrupted(self):
        def run(detector, draw, count):
            seen = []
            for _ in range(count):
                lr = draw.choice([0.1, 0.1, 0.1, 0.1, 0.1, 0.01])
                norms = {name: draw.uniform(0.5, 1.5) for name in "abc"}
                seen += drive(detector, norms, 1, lr=lr)
            return seen

        whole = Detector(5, span=3)
        expected = run(whole, random.Random(1), 1000)
        assert len({tuple(step.values()) for step in expected}) == 8  # all combinations

        detector, draw, seen = Detector(5, span=3), random.Random(1), []
        for count in (1, 2, 4, 13, 480, 500):
            seen += run(detector, draw, count)
            text = json.dumps(detector.state_dict(), allow_nan=False)
            detector = Detector(5, span=3)
            detector.load_state_dict(json.loads(text))
        assert seen == expected and detector.state_dict() == whole.state_dict()

    @pytest.mark.parametrize("settings", [{"interval": 8}, {"interval": 4, "span": 2}])
    def test_other_settings_are_refused(self, settings):
        with pytest.raises(ValueError, match="resume with the same settings"):
            Detector(**settings).load_state_dict(Detector(4).state_dict())


class TestSettings:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            (
                "accordion:low=topk/0.99:high=topk/0.1:interval=1000",
                Accordion(TopK(0.99), TopK(0.1), 1000),
            ),
            (
                "accordion:topk/0.5,fp16:high=randomk/0.1:interval=10:span=2:threshold=0.2"
                ":feedback=false",
                Accordion(
                    TopK(0.5, values=Cast("fp16")),
                    RandomK(0.1),
                    10,
                    span=2,
                    threshold=0.2,
                    feedback=False,
                ),
            ),
        ],
    )
    def test_spec(self, text, value):
        assert parse(text) == value
        assert parse(str(value)) == value

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"interval": 0}, "interval=0: expected a number of steps"),
            ({"interval": 2.5}, "interval=2.5: expected a number of steps"),
            ({"span": 0}, "span=0: expected a number of steps, 1 to interval=10"),
            ({"span": 11}, "span=11: expected a number of steps, 1 to interval=10"),
            ({"threshold": 0}, "threshold=0: expected a relative change"),
            ({"threshold": math.nan}, "threshold=nan: expected a relative change"),
        ],
    )
    def test_bad_settings(self, settings, message):
        with pytest.raises(ValueError, match=message):
            Accordion(TopK(0.99), TopK(0.1), **{"interval": 10, **settings})

    @pytest.mark.parametrize(
        "method", [ErrorFeedback(TopK(0.1)), SameIndices(), GraVAC(TopK(0.1)), "topk:0.1", None]
    )
    def test_what_it_switches_between(self, method):
        with pytest.raises(TypeError, match="low="):
            Accordion(method, TopK(0.1), 10)
        with pytest.raises(TypeError, match="high="):
            Accordion(TopK(0.99), method, 10)

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("accordion", "accordion needs low, high, interval; write accordion:<low>"),
            ("accordion:topk/0.9:topk/0.1", "write accordion:interval=<interval>"),
            ("accordion:low=ef,topk/0.9:high=topk/0.1:interval=10", "between two compressors"),
            ("accordion:low=topc/0.9:high=topk/0.1:interval=10", "did you mean 'topk'"),
        ],
    )
    def test_bad_specs(self, spec, message):
        with pytest.raises(ValueError, match=message):
            parse(spec)

    def test_detector(self):
        detector = Accordion(TopK(0.99), TopK(0.1), 10, span=3, threshold=0.2).detector()
        assert (detector.interval, detector.span, detector.threshold) == (10, 3, 0.2)
