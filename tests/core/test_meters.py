"""Meters: bytes, ratio, relative error, cosine, and what a checkpoint keeps of them."""

import json
import math
from dataclasses import replace

import pytest
import torch

from mpcomp.core.traffic import Meter, ReplicaTraffic, Traffic


def test_fidelity_is_over_all_messages():
    traffic = Traffic()
    xs, ys = torch.randn(3, 2, 40), torch.randn(3, 2, 40)
    for x, y in zip(xs, ys, strict=True):
        traffic.count(100, 320, 80)
        traffic.compare(x, y)
    assert traffic.ratio == 300 / 960 and traffic.messages == 3
    assert traffic.below_bf16 == 2 * 240 / 300
    assert traffic.relative_error == pytest.approx(float((xs - ys).norm() / xs.norm()), rel=1e-5)
    cosine = float((xs * ys).sum() / (xs.norm() * ys.norm()))
    assert traffic.cosine == pytest.approx(cosine, rel=1e-4)


def test_before_the_first_message_there_are_no_figures():
    traffic = Traffic()
    for value in (traffic.ratio, traffic.relative_error, traffic.cosine):
        assert math.isnan(value)
    assert traffic.below_bf16 is None


def test_zeros_that_arrive_as_zeros_are_no_error():
    traffic = Traffic()
    traffic.count(10, 40, 10)
    traffic.compare(torch.zeros(10), torch.zeros(10))
    assert traffic.relative_error == 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_skipped_message_does_not_spoil_the_figures(bad):
    """One overflow under a loss scaler must not turn the report of a whole run into NaN."""
    clean, spoilt = Traffic(), Traffic()
    x, y = torch.randn(2, 50)
    for traffic in (clean, spoilt):
        traffic.count(10, 200, 50)
        traffic.compare(x, y)
    spoilt.compare(torch.full((50,), bad), torch.full((50,), torch.nan))
    assert spoilt.relative_error == clean.relative_error and spoilt.cosine == clean.cosine
    first = Traffic()
    first.compare(torch.full((50,), bad), torch.full((50,), torch.nan))
    first.count(10, 200, 50)
    first.compare(x, y)
    assert first.relative_error == clean.relative_error


def test_half_precision_is_metered_in_full():
    traffic = Traffic()
    x = torch.full((1000,), 300.0, dtype=torch.float16)  # whose squares overflow fp16
    traffic.count(1, 2000, 1000)
    traffic.compare(x, x / 2)
    assert traffic.relative_error == pytest.approx(0.5)


def test_state_goes_through_json():
    traffic = Traffic()
    traffic.count(10, 40, 10)
    traffic.compare(torch.randn(10), torch.randn(10))
    traffic.nonfinite = 2
    again = Traffic()
    again.load_state(json.loads(json.dumps(traffic.to_state())))
    assert again.to_dict() == traffic.to_dict()
    traffic.compare(torch.ones(10), torch.zeros(10))
    again.compare(torch.ones(10), torch.zeros(10))
    assert again.to_dict() == traffic.to_dict()
    empty = Traffic()
    empty.load_state(json.loads(json.dumps(Traffic().to_state())))
    assert empty.messages == 0 and math.isnan(empty.ratio)


def test_counts_of_a_time_before_elements_were_counted_say_so():
    """Whatever is added to what is not known, is not known."""
    new = Traffic()
    new.count(10, 40, 10)
    old = {name: value for name, value in new.to_state().items() if name != "num_elements"}
    total = Traffic.merged([old, new.to_state()])
    assert total.ratio == 20 / 80 and total.below_bf16 is None
    assert "num_elements" not in total.to_state() and total.to_dict()["num_elements"] is None
    total.count(10, 40, 10)
    assert total.below_bf16 is None
    assert new.below_bf16 == 2
    empty = {name: value for name, value in Traffic().to_state().items() if name != "num_elements"}
    assert Traffic.merged([empty, new.to_state()]).below_bf16 == 2  # nothing was missed
    of_replicas = ReplicaTraffic(messages=1, dense_bytes=40, num_elements=10).of_gradients()
    assert ReplicaTraffic.from_gradients(of_replicas).num_elements == 10
    del of_replicas["num_elements"]
    resumed = ReplicaTraffic.from_gradients(of_replicas)
    assert math.isnan(resumed.num_elements) and "num_elements" not in resumed.of_gradients()


def test_what_came_since_a_copy():
    traffic, last = Traffic(), Traffic()
    for part in range(2):
        before = replace(traffic)
        last = Traffic()
        for each in (traffic, last):
            each.count(10 + part, 40, 10)
            x = torch.arange(10.0) + part
            each.compare(x, -x)  # whose inner product is negative, and is to stay so
    since = traffic.since(before)
    assert (since.messages, since.wire_bytes, since.num_elements) == (1, 11, 10)
    assert since.relative_error == pytest.approx(last.relative_error)
    assert since.cosine == pytest.approx(last.cosine) == pytest.approx(-1)
    assert traffic.since(traffic).energies is None
    assert Traffic().since(traffic) == Traffic()  # a checkpoint of an earlier time was loaded


def test_training_and_evaluation_are_metered_apart():
    meter = Meter()
    meter.of(True).count(1, 2, 1)
    assert meter.train.messages == 1 and meter.eval.messages == 0


def test_traffic_between_replicas_goes_through_json_under_the_names_of_checkpoints():
    step, total = ReplicaTraffic(), ReplicaTraffic()
    for _ in range(2):
        step = ReplicaTraffic(messages=1, dense_bytes=40, traffic_bytes=30.0)
        step.count_part(10, 2.5)
        step.count_part(5, 1.0)
        total.add(step)
    with total.timed("wait_s"):
        pass
    state = json.loads(json.dumps(total.of_gradients()))
    assert (state["steps"], state["wire_bytes"], state["floats"]) == (2, 30, 7.0)
    assert state["traffic_bytes"] == 60 and state["wait_s"] > 0 and total.ratio == 30 / 80
    assert ReplicaTraffic.from_gradients(state) == total


def test_fidelity_of_all_is_that_of_the_parts():
    x, y = torch.randn(2, 50)
    parts, whole = [Traffic(), Traffic()], Traffic()
    for part, slot in zip(parts, (slice(20), slice(20, 50)), strict=True):
        part.compare(x[slot], y[slot])
    whole.compare(x, y)
    parts[0].add(parts[1])
    assert parts[0].relative_error == pytest.approx(whole.relative_error)
    assert parts[0].cosine == pytest.approx(whole.cosine)
