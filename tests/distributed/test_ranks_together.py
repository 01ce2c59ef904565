"""A weight of both ends on one rank: the first stage and the last one are there."""

from collections import Counter

import pytest
import torch
from everyday import slow
from lm_runs import check, lm_run, make_lm, text
from methods import same_bits
from runs import KINDS, train

import mpcomp
from mpcomp.engines.schedules import ring_order
from mpcomp.engines.updates import behind_of, in_flight_of, lag_of, late_of

CODED = {"act": "ef+topk:0.3", "grad": "ef21+topk:0.3"}

RUNS = {
    2: [
        lm_run("gpt2", 2),
        lm_run("gpt2", 2, **CODED, pipeline={"in_flight": 1}),
        lm_run("gpt2 left", 2, chunks=5, pipeline={"in_flight": 3, "recompute": True}),
        lm_run("gpt2", 2, scale=8.0, overflow=(1, 2), steps=3, **CODED),
        lm_run("lora", 2, **CODED),  # the weight is frozen
    ],
    3: [
        lm_run("tied llama", 3, act="aqsgd+quant:4", chunks=5, pipeline={"in_flight": "auto"}),
        lm_run("gpt2 full", 3, chunks=1),
        lm_run("gpt2", 3, accumulate=2, autocast=torch.bfloat16),
    ],
}


@pytest.mark.parametrize(
    "num_ranks, runs", [(2, RUNS[2][1::2]), slow(2, RUNS[2][::2]), slow(3, RUNS[3])]
)
def test_ranks_give_the_bits_of_one_process(ranks, num_ranks, runs):
    """Also what each link sends; nothing is exchanged at the end of a step."""
    for outcomes in check(ranks, num_ranks, runs):
        assert all(name.startswith("boundary ") for name in outcomes[0].sent)
        assert len(outcomes[0].sent) == 2 * num_ranks  # one cut more than between so many stages


@pytest.mark.parametrize("chunks", [1, 4])
def test_together_is_apart(chunks):
    """The same bits, losses, gradients' norms and weights; of one microbatch the plain model's."""
    together, apart = (
        train(lm_run("calm gpt2", 2, chunks=chunks, pipeline={"ties": ties}))
        for ties in ("together", "apart")
    )
    assert same_bits(torch.stack(together.losses), torch.stack(apart.losses))
    assert same_bits(torch.stack(together.norms), torch.stack(apart.norms))
    for name, value in apart.state.items():
        assert same_bits(together.state[name], value), name
    if chunks > 1:
        return
    torch.manual_seed(0)
    model = KINDS["calm gpt2"].make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step, loss in enumerate(together.losses):
        batch, labels = text((7, 5)[step % 2], step)
        ours = model(**batch, labels=labels).loss
        ours.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert same_bits(ours.detach(), loss)
    for name, value in model.state_dict().items():
        assert same_bits(together.state[name], value), name


def of_replicas():
    """Weights of two replicas after three steps, by method between them and by ties."""
    found = {}
    for method in (None, "ef+topk:0.2", "powersgd:1"):
        for ties in ("together", "apart"):
            run = lm_run("calm gpt2", pipeline={"ties": ties})
            network = mpcomp.ReplicaNetwork(smallest=32) if method else None
            pipe = make_lm(run, replicas=2, dp_comp=method, network=network)
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
            losses = []
            for number in range(3):
                losses.append(pipe.forward_backward(*text(6, 2 * number + pipe.replica)))
                optimizer.step()
                optimizer.zero_grad()
            found[method, ties] = torch.stack(losses), pipe.merge().state_dict()
    return found


@pytest.mark.slow
def test_replicas_average_the_weight_once(ranks):
    """The bits are as with two copies, by DDP and by methods; replicas stay equal."""
    for found in ranks(of_replicas, 4):
        for method in (None, "ef+topk:0.2", "powersgd:1"):
            losses, state = found[method, "together"]
            others, expected = found[method, "apart"]
            assert same_bits(losses, others)
            assert all(same_bits(state[name], value) for name, value in expected.items()), method


def one_weight(folder):
    """What a rank holds: parameters, what an optimizer remembers, and a checkpoint of it."""
    pipe = make_lm(lm_run("gpt2"))
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    for number in range(2):
        pipe.forward_backward(*text(7, number))
        optimizer.step()
        optimizer.zero_grad()
    pipe.save(folder, optimizer=optimizer)
    held = [name for name, _ in pipe.named_parameters()]
    losses = [float(pipe.forward_backward(*text(7, 2)))]
    again = make_lm(lm_run("gpt2", seed=1))
    other = torch.optim.AdamW(again.parameters(), lr=0.01)
    again.load(folder, optimizer=other)
    losses.append(float(again.forward_backward(*text(7, 2))))
    return held, len(optimizer.state), losses, again.engine.computes_loss


def test_a_rank_has_the_weight_once(ranks, tmp_path):
    """In its parameters, in the optimizer, and after a checkpoint."""
    (first, first_state, losses, here), (later, _, others, elsewhere) = ranks(
        one_weight, 2, str(tmp_path)
    )
    assert "transformer.wte.weight" in first and "lm_head.weight" not in first + later
    assert "transformer.ln_f.weight" in first and first_state == len(first)
    assert losses[0] == losses[1] == others[0] == others[1]
    assert here and not elsewhere


def test_what_is_put_in_the_weights_place_is_used():
    """Data of its own for the parameter, dtypes, freezing: the second use follows."""
    pipe = make_lm(lm_run("calm gpt2", chunks=1), alone=True)
    weight = dict(pipe.named_parameters())["transformer.wte.weight"]
    batch, labels = text(4, 0)
    with torch.no_grad():
        weight.data = weight.data * 2
    state = pipe.state_dict()
    assert same_bits(state["lm_head.weight"], state["transformer.wte.weight"])
    model = KINDS["calm gpt2"].make()
    model.load_state_dict(state)
    loss = pipe.forward_backward(batch, labels)
    assert same_bits(loss, model(**batch, labels=labels).loss.detach())
    weight.grad = None
    weight.requires_grad_(False)
    pipe.forward_backward(batch, labels)
    assert weight.grad is None
    pipe.to(torch.bfloat16)
    assert pipe.eval()(batch).dtype == torch.bfloat16


@pytest.mark.parametrize("options", [{"tie_comp": "quant:8"}, {"schedule": "GPipe"}])
def test_what_does_not_go_together_is_refused(options):
    with pytest.raises(ValueError, match="ties='together' with"):
        make_lm(lm_run("gpt2", pipeline={"ties": "together", **options}), alone=True)


def test_the_reason_is_said():
    chain = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    with pytest.raises(ValueError, match="no weight of the first stage is used"):
        mpcomp.pipeline(chain, 2, split=2, ties="together", loss_fn=torch.nn.MSELoss())
    with pytest.raises(ValueError, match="ties='both': expected one of together, apart"):
        mpcomp.pipeline(chain, 2, split=2, ties="both", loss_fn=torch.nn.MSELoss())


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("in_flight", [1, 2, 5, 11])
@pytest.mark.parametrize("count", [1, 4, 9])
def test_the_order_of_the_first_rank(count, in_flight, num_ranks):
    """Each pass once, in order; L between F and B; no more under way than may be."""
    done: Counter[str] = Counter()
    for what, i in ring_order(count, in_flight, num_ranks):
        assert done[what] == i
        done[what] += 1
        assert done["F"] >= done["L"] >= done["B"]
        assert done["F"] - done["B"] <= in_flight
    assert done == Counter(F=count, L=count, B=count)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("of_each", [1, 2, 3])
@pytest.mark.parametrize("updates", [1, 2, 5, 12])
def test_the_order_of_the_first_rank_with_updates(updates, of_each, num_ranks):
    """Each pass comes after as many updates as its lag says, or before the one that takes it."""
    stages = num_ranks + 1
    late = (num_ranks + 1) // 2
    lags = {"F": num_ranks - late, "L": 0, "B": -late}
    assert lags == {
        "F": lag_of(0, stages, together=True),
        "L": lag_of(num_ranks, stages, together=True),
        "B": -late_of(0, stages, together=True),
    }
    in_flight, behind = in_flight_of(of_each, stages), behind_of(of_each, stages)
    done: Counter[str] = Counter()
    for what, i in ring_order(updates * of_each, in_flight, num_ranks, behind):
        assert done[what] == i
        if what in lags:
            made = max(0, i // of_each - lags[what])
            assert done["U"] // of_each == min(made, updates - 1)
        done[what] += 1
        assert done["F"] >= done["L"] >= done["B"] and done["L"] >= done["U"]
        assert done["F"] - done["B"] <= in_flight and done["L"] - done["B"] <= behind + 1
    assert done == Counter(dict.fromkeys("FLBU", updates * of_each))
