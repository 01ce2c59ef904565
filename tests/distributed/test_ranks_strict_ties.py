"""Ties under the rules of NCCL, whose messages begin in batches, if only of one.

Such operations take the group's communicator, which was made when ranks connected. NCCL makes
another for those that stand alone, at their first use, where each rank might wait for the other.
"""

import pytest
import torch
import torch.distributed as dist
from lm_runs import lm_run, make_lm, text
from methods import same_bits
from ranks import preload
from strict import strictly

import mpcomp

preload("strict")
pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")
pytest.importorskip("transformers")

#: A tied matrix goes by gloo, as rows that are zero are left out; cuts by NCCL with half of these.
SPECS = (None, "topk:0.3", "quant:8", "ef+quant:4:scale=128", "randomk:0.5", "step:0.1")


def trained(spec, alone):
    run = lm_run("gpt2", pipeline={"ties": "apart", "tie_comp": spec})
    pipe = make_lm(run, alone=alone)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for number in range(2):
        pipe.forward_backward(*text(7, number))
        mpcomp.clip_grad_norm_(pipe, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in pipe.state_dict().items()}


def train_strictly(specs):
    """In each rank; of each run its weights, and how many operations began together."""
    found, begin = [], dist.batch_isend_irecv

    def begun(operations):
        counts.append(len(operations))
        return begin(operations)

    dist.batch_isend_irecv = begun
    for spec in specs:
        counts: list[int] = []
        with strictly():
            found.append((trained(spec, alone=False), counts))
    return found


def test_a_tie_gives_the_bits_of_one_process_and_messages_begin_in_batches(ranks):
    for spec, *ours in zip(SPECS, *ranks(train_strictly, 2, SPECS), strict=True):
        alone = trained(spec, alone=True)
        for state, counts in ours:
            # Two steps, four microbatches, a message each way at the cut.
            assert counts == 16 * [1], spec
            assert all(same_bits(value, alone[name]) for name, value in state.items()), spec
