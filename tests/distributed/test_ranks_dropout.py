"""Dropout over replicas: each draws its own masks, those of one process with all microbatches."""

import torch
import torch.nn.functional as F
from models import rows
from torch import nn

import mpcomp


def _train(replicas, chunks):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 17), nn.Dropout(0.5), nn.Linear(17, 5))
    pipe = mpcomp.pipeline(model, chunks, split=[2, 1], loss_fn=F.cross_entropy, replicas=replicas)
    x, y = rows(16)
    own = slice(8 * pipe.replica, 8 * (pipe.replica + 1)) if replicas > 1 else slice(None)
    loss = pipe.forward_backward(x[own], y[own])
    grads = {name: p.grad.clone() for name, p in pipe.named_parameters()}
    return loss, grads


def test_replicas_draw_the_masks_of_one_process_on_all_their_data(ranks):
    loss, grads = _train(1, 4)
    results = ranks(_train, 4, 2, 2)
    for theirs, own in results:
        torch.testing.assert_close(theirs, loss)
        for name, grad in own.items():
            torch.testing.assert_close(grad, grads[name], rtol=1e-5, atol=1e-7)
