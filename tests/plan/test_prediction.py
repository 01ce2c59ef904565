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
