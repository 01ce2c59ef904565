"""The choice of ``auto`` on several ranks: the same on all, and in one process."""

import warnings

import lms
import pytest
import torch
from methods import same_bits
from ranks import preload
from torch import nn

import mpcomp
from mpcomp.pilot import dial, paying

preload("test_ranks_dial", "lms")

BOTH = {"act_comp": "auto", "grad_comp": "auto"}
IDS = torch.arange(4)
#: By case: whether the model is trained, options of the pipeline, and whether batches have ids.
CASES = {
    "samples that come again": (True, {}, True),
    "one rank has the data": (True, {"data": "first"}, True),
    "batches that are new": (True, {}, False),
    "one direction": (True, {"act_comp": None}, True),
    "one cut": (True, {"act_comp": ["quant:8", "auto"], "grad_comp": "none"}, True),
}


def model_of(is_trained: bool) -> nn.Module:
    torch.manual_seed(0)
    model = lms.gpt2()
    for module in model.modules():
        if is_trained and isinstance(module, nn.LayerNorm):
            module.weight.data[::2] *= 1.1
    return model


def built(is_trained, options):
    dial.RELEASED = 1000  # tiny models stand for released ones
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mpcomp.pipeline(model_of(is_trained), 2, split=2, timeout=60.0, **BOTH | options)


def train(case, *, alone=False):
    """Losses, methods, the sentence and the bytes of three steps."""
    is_trained, options, ids = CASES[case]
    if alone:
        options = {k: v for k, v in options.items() if k != "data"} | {"engine": "local"}
    pipe = built(is_trained, options)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05)
    losses = []
    for step in range(3):
        given = (lms.text(4, seed=step % 2), None) if pipe.has_data else (None, None)
        some = IDS + 4 * (step % 2) if ids and pipe.has_data else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses.append(pipe.forward_backward(*given, sample_ids=some))
        optimizer.step()
        optimizer.zero_grad()
    methods = [str(link.method) for link in pipe.links]
    said = pipe.report(show=False)["auto"]
    return torch.stack(losses), methods, said, pipe.wire_bytes


def on_ranks(cases):
    return [train(case) for case in cases]


def raised(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def disagreeing():
    """Errors on each rank where evidence differs between them; and the steps after."""
    rank = torch.distributed.get_rank()
    built_so = raised(lambda: built(rank == 0, {}))
    pipe = built(True, {})
    batch = lms.text(4)
    stepped = raised(lambda: pipe.forward_backward(batch, sample_ids=IDS if rank == 0 else None))
    pipe.zero_grad()
    after = [float(pipe.forward_backward(batch, sample_ids=IDS)) for _ in range(2)]
    return built_so, stepped, after, [str(link.method) for link in pipe.links]


def test_all_ranks_come_to_what_one_process_comes_to(ranks):
    by_rank = ranks(on_ranks, 2, list(CASES))
    for case, *found in zip(CASES, *by_rank, strict=True):
        losses, methods, said, num_bytes = train(case, alone=True)
        for ours in found:
            assert same_bits(ours[0], losses), case
            assert ours[1:] == (methods, said, num_bytes), case
        again = CASES[case][0] and CASES[case][2]
        assert any("aqsgd" in method for method in methods) == again, case


def test_ranks_that_know_different_things_do_not_begin(ranks):
    for built_so, stepped, after, methods in ranks(disagreeing, 2):
        assert "auto" in built_so and "different" in built_so
        assert stepped
        assert len(after) == 2 and all("aqsgd" in method for method in methods)


#: Links whose rates decide, however long steps take here: Mbit/s, and seconds of a round trip.
SLOW, FAST = (1e-3, 0.04), (1e9, 0.0)


def looking(links, num_steps):
    """Methods after each step, losses and sentences, where links are found to be ``links``."""
    paying.FIRST, paying.WINDOW, paying._CHANGED = 1, 2, 0.0
    pipe = built(False, {})
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05)
    methods, losses = [], []
    measure = pipe.engine.probe
    for found in links:
        pipe.engine.probe = measure if found is None else lambda found=found: found
        for step in range(num_steps):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                losses.append(float(pipe.forward_backward(lms.text(4, seed=step % 2))))
            optimizer.step()
            optimizer.zero_grad()
        methods.append([str(link.method) for link in pipe.links])
    return methods, losses, pipe.report(show=False)["auto"]


def test_each_cut_goes_by_its_link_and_changes_with_it(ranks):
    """Both uses of the tie are on the first rank, so there are two cuts."""
    links = [[SLOW, FAST], [FAST, SLOW], [SLOW, SLOW], None]
    one, other = ranks(looking, 2, links, 8)
    assert one == other
    methods, _, said = one
    scratch = methods[2][:2]
    assert scratch[0].startswith("klt") and scratch[1].startswith("klt")
    in_bf16 = ["bf16", "bf16"]
    assert methods[:3] == [scratch + in_bf16, in_bf16 + scratch, scratch * 2]
    assert said.startswith("'auto' is ")


def of_replicas():
    """Errors where the first batches of replicas differ in having ids; methods of steps after."""
    pipe = built(True, {"replicas": 2})
    batch = lms.text(4, seed=pipe.replica)
    ids = IDS if pipe.replica == 0 else None
    stepped = raised(lambda: pipe.forward_backward(batch, sample_ids=ids))
    pipe.zero_grad()
    pipe.forward_backward(batch, sample_ids=IDS)
    return stepped, pipe.num_steps, [str(link.method) for link in pipe.links]


@pytest.mark.slow
def test_replicas_choose_alike_or_not_at_all(ranks):
    for stepped, num_steps, methods in ranks(of_replicas, 4):
        assert (
            "ranks 0, 1 were given sample_ids in step 0 (training) and the others were" in stepped
        )
        assert num_steps == 1
        assert all("aqsgd" in method for method in methods)
