"""A predicted step: the parts of its time besides computing and links."""

import math

import pytest

from mpcomp.plan import Coding, Compute, CutCost, Messages, Network, predict


def test_a_sender_decodes_one_message_a_step_to_meter_it() -> None:
    coding = Coding(encode_act_s=0.25, decode_act_s=0.5, encode_grad_s=0.125, decode_grad_s=1.0)
    found = predict(
        [Compute(2, 4)] * 2,
        [CutCost(coding, Messages(0, 0))],
        Network.alike(2, math.inf),
        chunks=4,
    )
    first = 4 * (2 + 4 + coding.encode_act_s + coding.decode_grad_s) + coding.decode_act_s
    last = 4 * (2 + 4 + coding.encode_grad_s + coding.decode_act_s) + coding.decode_grad_s
    assert found.timeline.busy_s == pytest.approx([first, last])


def test_a_pipeline_that_does_not_drain_waits_once_a_call() -> None:
    """One stage is as busy as can be; what a call takes besides is its fill and drain."""
    compute, latency_s, num_stages = [Compute(1, 2)] * 4, 0.25, 4
    cut = CutCost(Coding(), Messages(0, 0))
    network = Network.alike(num_stages, math.inf, latency_s)
    of_call = [
        predict(compute, [cut] * 3, network, chunks=2, updates=updates) for updates in (1, 8, 64)
    ]
    ways = 2 * (num_stages - 1) * latency_s
    for found, updates in zip(of_call, (1, 8, 64), strict=True):
        least = 2 * updates * 3
        assert found.step_s * updates - found.agreement_s == pytest.approx(found.timeline.step_s)
        assert found.timeline.step_s >= least + 3 * (num_stages - 1) + ways - 1e-9
        assert found.agreement_s == of_call[0].agreement_s
    assert of_call[2].step_s < of_call[1].step_s < of_call[0].step_s
    assert of_call[2].step_s == pytest.approx(2 * 3, rel=0.15)
    with pytest.raises(ValueError, match="updates is 0"):
        predict(compute, [cut] * 3, network, chunks=2, updates=0)


@pytest.mark.parametrize("num_hosts", [2, 3, 4, 8])
@pytest.mark.parametrize("latency_s", [0.0, 0.5])
def test_a_last_stage_on_the_first_host_drains_once_a_call(
    num_hosts: int, latency_s: float
) -> None:
    """The first host is as busy as can be, within what a microbatch takes around the ring."""
    compute = [Compute(1, 2)] * num_hosts + [Compute(0.25, 0.5)]
    cut = CutCost(Coding(), Messages(0, 0))
    network = Network.alike(num_hosts, math.inf, latency_s)
    times = [
        predict(compute, [cut] * num_hosts, network, chunks=2, updates=updates).step_s
        for updates in (1, 2, 8, 64)
    ]
    assert times == sorted(times, reverse=True)
    assert 2 * 3.75 <= times[-1] <= 1.3 * 2 * 3.75


def test_ranks_agree_and_not_stages() -> None:
    """Sixteen have each other's records after one round; the seventeenth stage is on the first."""
    latency_s, cut = 0.25, CutCost(Coding(), Messages(0, 0))
    network = Network.alike(16, math.inf, latency_s)
    plain, together = (
        predict([Compute(1, 2)] * (n + 1), [cut] * n, network, chunks=4) for n in (15, 16)
    )
    assert plain.agreement_s == together.agreement_s == pytest.approx(2 * latency_s)
    assert together.timeline.step_s > plain.timeline.step_s
