"""`recipes.lab.divergence`: distance from a reference, over the tokens that are predicted."""

import pytest
import torch
import torch.nn.functional as F

from mpcomp.core.loss import CausalLMLoss
from recipes.lab.divergence import Against


def test_means_are_over_predicted_tokens():
    logits, reference = torch.randn(2, 2, 6, 11).unbind()
    labels = torch.randint(11, (2, 6))
    labels[1, 4:] = CausalLMLoss.ignore_index
    found = Against(reference)(logits, labels)
    # Row 0 predicts its five last tokens, row 1 three.
    own, of_reference = (
        torch.cat([each[0, :5], each[1, :3]]).double().log_softmax(-1)
        for each in (logits, reference)
    )
    expected = F.kl_div(own, of_reference, reduction="batchmean", log_target=True)
    assert float(found["divergence"]) == pytest.approx(float(expected), rel=1e-5)
    same = (own.argmax(-1) == of_reference.argmax(-1)).double().mean()
    assert float(found["agreement"]) == pytest.approx(float(same))
    assert torch.equal(found["loss"], CausalLMLoss()(logits, labels))


def test_a_model_is_not_far_from_itself():
    logits, labels = torch.randn(1, 5, 7), torch.randint(7, (1, 5))
    found = Against(logits)(logits.bfloat16(), labels)
    assert 0 < float(found["divergence"]) < 1e-4  # rounded
    found = Against(logits)(logits, labels)
    assert float(found["divergence"]) == 0.0 and float(found["agreement"]) == 1.0
