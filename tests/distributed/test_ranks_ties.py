"""A parameter that two ranks have copies of: they stay equal, and are one again where it ends.

What ranks find is checked in them where only they can; the first failed assert ends the test.
"""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from everyday import by_halves, slow
from lm_runs import check, gpt2, lm_run, lora, lora_late, make_lm, not_adapted, text
from methods import same_bits
from models import adamw
from runs import links_of

import mpcomp
from mpcomp import PeerError
from mpcomp.links.tied_weights import TiedWeights

pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")
pytest.importorskip("transformers")

EMBEDDING, HEAD = "transformer.wte.weight", "lm_head.weight"


# Links of the tied embedding of GPT-2 in two stages.
FIRST, LAST = (f"tied transformer.wte.weight, copy of stage {stage}" for stage in (0, 1))


def apart(model="gpt2", *arguments, pipeline=None, **rest):
    """`lm_run`, whose tied weight has a copy on each of two ranks."""
    return lm_run(model, *arguments, pipeline={"ties": "apart", **(pipeline or {})}, **rest)


def step(pipe, optimizer, batch, target=None, **kwargs):
    """One step of a loop that clips; its loss."""
    loss = pipe.forward_backward(batch, target, **kwargs)
    mpcomp.clip_grad_norm_(pipe, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def state_of(pipe):
    return {name: value.clone() for name, value in pipe.state_dict().items()}


def assert_same_tensors(ours, theirs):
    """Both are {name: tensor}, the first may have fewer."""
    assert ours
    for name, value in ours.items():
        assert same_bits(value, theirs[name]), name


# -- what is sent, and where it ends --------------------------------------------------------------


def judge(alone, folder):
    """Two steps; then evaluation, inference, and the whole model."""
    pipe = make_lm(apart("gpt2", pipeline={"tie_comp": "topk:0.3"}), alone=alone)
    optimizer = adamw(pipe)
    for number in range(2):
        step(pipe, optimizer, *text(7, number))
    messages = {link.name: link.meter.train.messages for link in pipe.links}
    if not alone:  # the head of the uncut model holds on to no embedding of another rank
        assert pipe.stages[0].original.lm_head.weight.is_meta == (pipe.rank == 1)
    (batch, labels), (other, others) = text(5, 10), text(2, 11, "left")
    loader = [{**batch, "labels": labels}, (other, others), text(3, 12, "")]
    mean = pipe.evaluate(loader)
    pipe.eval()
    with torch.no_grad():
        logits = [pipe(batch), pipe({**other, "labels": others})]
        last = pipe(batch, everywhere=False)
    assert (last is None) == (not alone and pipe.rank == 0)
    whole = pipe.merge()
    assert whole.get_output_embeddings().weight is whole.get_input_embeddings().weight
    if pipe.rank == 0 and folder is not None:
        whole.save_pretrained(folder)
    return mean, logits, state_of(whole), messages


def test_judged_as_in_one_process_and_one_parameter_again(ranks, tmp_path):
    import transformers

    results = ranks(judge, 2, False, str(tmp_path))
    mean, logits, state, messages = judge(True, None)
    # One message of each copy a step, however many microbatches.
    assert messages == {
        "boundary 0 act": 8,
        "boundary 0 grad": 8,
        FIRST: 2,
        LAST: 2,
    }
    sent = [found[3] for found in results]
    assert {name: sum(part[name] for part in sent) for name in messages} == messages
    assert sent[0][LAST] == sent[1][FIRST] == 0
    for our_mean, our_logits, our_state, _ in results:
        assert our_mean == mean
        assert all(same_bits(a, b) for a, b in zip(our_logits, logits, strict=True))
        assert list(our_state) == list(state)
        assert_same_tensors(our_state, state)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        plain = loaded(**text(5, 10)[0]).logits
    assert same_bits(plain, logits[0])


def from_folder(folder, alone):
    """A model without values, its weights from a folder that has the tied one once."""
    with torch.device("meta"):
        model = gpt2()
    pipe = mpcomp.pipeline(
        model, 2, split=2, weights=folder, engine="local" if alone else None, timeout=60.0
    )
    for name, parameter in pipe.named_parameters():
        assert not parameter.is_meta, name
    if not alone:
        away = [stage for stage in pipe.cut_stages if all(stage is not s for s in pipe.stages)]
        assert all(parameter.is_meta for stage in away for parameter in stage.parameters())
    losses = [step(pipe, optimizer, *text(4, i)) for optimizer in [adamw(pipe)] for i in range(2)]
    return losses, state_of(pipe.merge())


def test_each_rank_reads_its_own_tensors(ranks, tmp_path):
    torch.manual_seed(3)
    gpt2().save_pretrained(tmp_path)
    losses, state = from_folder(str(tmp_path), True)
    for our_losses, our_state in ranks(from_folder, 2, str(tmp_path), False):
        assert same_bits(torch.stack(our_losses), torch.stack(losses))
        assert_same_tensors(our_state, state)


def test_rows_of_the_batchs_tokens_alone_are_sent(ranks):
    """By any compressor, as in one process; methods that keep all rows send all."""
    methods = ["none", "topk:0.3", "ef+quant:4", "ef+topk:0.3", "ef21+topk:0.3"]
    runs = [apart("gpt2 few", pipeline={"tie_comp": method}) for method in methods]
    scaled = apart("gpt2 few", pipeline={"tie_comp": "ef+topk:0.3"}, scale=64.0, overflow=(1, 1))
    for method, ours in zip([*methods, "scaled"], check(ranks, 2, [*runs, scaled]), strict=True):
        first, last = ours[0].sent[FIRST][0], ours[1].sent[LAST][0]
        assert (first < last / 3) if method != "ef21+topk:0.3" else (first > last / 2), method


# -- replicas -------------------------------------------------------------------------------------

WAYS = {
    "plain": {},
    "v": {"stages": 4, "schedule": "ZBVZeroBubble"},
    "compressed": {"act": "topk:0.3", "grad": "ef+topk:0.3", "tie": "ef+topk:0.3"},
}


def replica_run(way):
    settings = dict(WAYS[way])
    pipeline = {"tie_comp": settings.pop("tie", None)}
    return apart("gpt2", chunks=3, **{"stages": 2, **settings}, pipeline=pipeline)


def silent(number, labels):
    """In one step the second half of the rows has nothing to predict, in another no row has."""
    first = {2: 6, 3: 0}.get(number, len(labels))
    return torch.cat([labels[:first], torch.full_like(labels[first:], -100)])


def train_replicas(ways):
    """Four steps of each; replicas have as many rows, of different lengths."""
    found = []
    for way in ways:
        pipe = make_lm(replica_run(way), replicas=2)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.9)
        losses, own = [], slice(6 * pipe.replica, 6 * pipe.replica + 6)
        for number in range(4):
            batch, labels = text(12, number)
            labels = silent(number, labels)
            batch = {name: value[own] for name, value in batch.items()}
            losses.append(step(pipe, optimizer, batch, labels[own]))
        found.append((torch.stack(losses), state_of(pipe), state_of(pipe.merge())))
    return found


@pytest.mark.slow
def test_first_the_sum_over_the_tie_then_the_mean_over_replicas(ranks):
    results = ranks(train_replicas, 4, list(WAYS))
    run = replica_run("plain")
    pipe = make_lm(run, alone=True, engine="local")
    pipe.chunks = 6
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for number in range(4):
        batch, labels = text(12, number)
        losses.append(step(pipe, optimizer, batch, silent(number, labels)))
    whole = state_of(pipe.merge())
    for i, way in enumerate(WAYS):
        states = [found[i][1] for found in results]
        copies = [state[name] for state in states for name in (EMBEDDING, HEAD) if name in state]
        assert len(copies) == 4
        for rank in range(4):
            assert same_bits(results[rank][i][0], results[0][i][0])
            assert_same_tensors(states[rank], states[rank ^ 2])
            assert_same_tensors(states[rank], results[0][i][2])
        assert all(same_bits(copy, copies[0]) for copy in copies), way
        if way != "plain":  # dropout is drawn by stage, so that another cut draws another
            continue
        torch.testing.assert_close(results[0][i][0], torch.stack(losses), rtol=1e-6, atol=0)
        for name, value in whole.items():
            bound = 1e-6 * float(value.abs().max())
            torch.testing.assert_close(results[0][i][2][name], value, rtol=0, atol=bound)


def train_apart(dp):
    """Five steps, with everything compressed; the embedding after each."""
    run = apart("gpt2", 2, act="quant:8", grad="quant:8", pipeline={"tie_comp": "ef+topk:0.3"})
    pipe = make_lm(run, replicas=2, dp_comp=dp, network=mpcomp.ReplicaNetwork(smallest=32))
    optimizer = adamw(pipe)
    pipe.follow(optimizer)
    own, copies = slice(6 * pipe.replica, 6 * pipe.replica + 6), []
    for number in range(5):
        batch, labels = text(12, number)
        step(pipe, optimizer, {name: value[own] for name, value in batch.items()}, labels[own])
        copies += [v.clone() for n, v in pipe.state_dict().items() if n in (EMBEDDING, HEAD)]
    return copies


@pytest.mark.parametrize("dp", [slow("diloco:2"), "diloco:2:parts=2+ef+topk:0.2+quant:2"])
def test_copies_stay_alike_where_replicas_train_alone(ranks, dp):
    """In each replica after every step; over the replicas after their turn."""
    met = []
    for first, last, other_first, other_last in zip(*ranks(train_apart, 4, dp), strict=True):
        assert same_bits(first, last) and same_bits(other_first, other_last)
        met.append(same_bits(first, other_first))
    assert met in ([False, True, False, True, False], [True, False, True, False, True])


# -- checkpoints ----------------------------------------------------------------------------------


def saved(folder):
    """Saves on four ranks and goes on; then the same from what was saved."""
    plain = make_lm(apart("calm gpt2", 4))
    optimizer = adamw(plain)
    for number in range(2):
        step(plain, optimizer, *text(7, number))
    plain.save(f"{folder}/plain", optimizer=optimizer)
    losses = [step(plain, optimizer, *text(7, number)) for number in (2, 3)]

    run = apart("gpt2", 4, act="topk:0.3", pipeline={"tie_comp": "ef21+topk:0.3"})
    one = make_lm(run)
    of_one = adamw(one)
    for number in range(2):
        step(one, of_one, *text(7, number))
    one.save(f"{folder}/compressed", optimizer=of_one)
    two = make_lm(run)
    of_two = adamw(two)
    two.load(f"{folder}/compressed", optimizer=of_two)
    for number in (2, 3):
        a, b = (step(p, o, *text(7, number)) for p, o in ((one, of_one), (two, of_two)))
        assert same_bits(a, b)
    assert_same_tensors(state_of(one), state_of(two))
    held = links_of(one)
    assert held.keys() == links_of(two).keys()
    for name, state in held.items():
        for key, value in links_of(two)[name].items():
            assert same_bits(value, state[key]) if torch.is_tensor(value) else value == state[key]
    if one.rank in (0, 3):
        assert any("tie" in name and state for name, state in held.items())
    assert (one.wire_bytes, one.dense_bytes) == (two.wire_bytes, two.dense_bytes)
    return torch.stack(losses), state_of(plain.merge())


def loaded(folder, alone):
    pipe = make_lm(apart("calm gpt2", 2), alone=alone)
    optimizer = adamw(pipe)
    pipe.load(f"{folder}/plain", optimizer=optimizer)
    losses = [step(pipe, optimizer, *text(7, number)) for number in (2, 3)]
    return torch.stack(losses), state_of(pipe.merge())


@pytest.mark.slow
def test_a_checkpoint_goes_on_on_other_ranks(ranks, tmp_path):
    """A cut moves no bit where nothing is compressed or dropped: two stages go on as four."""
    losses, state = ranks(saved, 4, str(tmp_path))[0]
    for found in (*ranks(loaded, 2, str(tmp_path), False), loaded(str(tmp_path), True)):
        assert same_bits(found[0], losses)
        assert_same_tensors(found[1], state)


# -- what is not trained --------------------------------------------------------------------------

FROZEN = {
    # name: (run, links that send nothing)
    "first stage": (
        apart("gpt2", frozen=("transformer.w", "transformer.h.0.", "transformer.h.1.")),
        {"boundary 0 grad", FIRST, LAST},
    ),
    "blocks": (apart("gpt2 left", frozen=("transformer.h.",)), set()),
    "llama": (
        apart("llama", 4, "ZBVZeroBubble", frozen=("model.embed", "model.layers.0.")),
        {"boundary 0 grad", "boundary 1 act", "boundary 1 grad"},
    ),
    "thawed": (apart("gpt2", frozen=("transformer.w",), thaw=1), set()),
    "scaled": (
        apart(
            "gpt2",
            frozen=("transformer.w", "transformer.h.0.", "transformer.h.1."),
            scale=64.0,
            overflow=(1, 1),
        ),
        {"boundary 0 grad", FIRST, LAST},
    ),
}


@pytest.mark.parametrize("names", by_halves(FROZEN))
def test_nothing_goes_back_to_what_is_frozen(ranks, names):
    found = check(ranks, 2, [FROZEN[name][0] for name in names])
    for name, ours in zip(names, found, strict=True):
        _, quiet = FROZEN[name]
        sent = [outcome.sent for outcome in ours]
        assert {link for link in sent[0] if not any(s[link][0] for s in sent)} == quiet, name


@pytest.mark.slow
def test_adapters(ranks):
    """LoRA: the tied weight is frozen; where only late stages have adapters, nothing goes back."""
    pytest.importorskip("peft")
    methods = {"act": "topk:0.3", "grad": "ef+topk:0.3"}
    wte = "base_model.model.transformer.wte.weight"
    ties = {f"tied {wte}, copy of stage {stage}" for stage in (0, 3)}
    late = {"boundary 0 grad", "boundary 1 grad", *ties}
    some, all_ = {"frozen": not_adapted(lora_late)}, {"frozen": not_adapted(lora)}
    cases = [
        (apart("lora", 4, steps=2, **all_), ties),
        (apart("lora", 4, steps=2, **all_, **methods), ties),
        (apart("late lora", 4, steps=2, **some, **methods), late),
        (apart("late lora", 4, steps=2, **some, scale=64.0, overflow=(1, 3)), late),
    ]
    found = check(ranks, 4, [run for run, _ in cases])
    for (run, quiet), ours in zip(cases, found, strict=True):
        sent = [outcome.sent for outcome in ours]
        assert {link for link in sent[0] if not any(s[link][0] for s in sent)} == quiet, run
        assert not same_bits(ours[0].losses[0], ours[0].losses[-1])


# -- faults ---------------------------------------------------------------------------------------


def bad_batches():
    """What every rank says of each, and two steps with good batches between."""
    pipe = make_lm(apart("gpt2"))
    optimizer = adamw(pipe)
    (batch, labels), said = text(7, 0), []
    ids, mask = batch["input_ids"], batch["attention_mask"]
    losses = [step(pipe, optimizer, batch, labels)]
    sent = pipe.wire_bytes, [link.meter.train.messages for link in pipe.links]
    for bad in (
        {"input_ids": ids, "attention_mask": mask[:, :-1]},
        {"input_ids": ids.repeat(1, 2)},
        {"input_ids": ids + 30},
        {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids},
        {"input_ids": ids, "position_ids": torch.arange(8).expand(7, 8)},
    ):
        with pytest.raises(ValueError) as caught:
            pipe.forward_backward(bad, labels)
        said.append(str(caught.value))
        with pytest.raises(ValueError) as caught:
            pipe.evaluate([(bad, labels)])
        assert str(caught.value) == said[-1]
    assert sent == (pipe.wire_bytes, [link.meter.train.messages for link in pipe.links])
    return said, [*losses, step(pipe, optimizer, batch, labels)]


def test_a_batch_that_cannot_be_is_refused_by_every_rank_before_anything_is_sent(ranks):
    (said, losses), other = ranks(bad_batches, 2)
    for message, part in zip(
        said,
        (
            "attention_mask is [7, 8] torch.int64; expected one number for each token, [7, 9]",
            "sequences of 18 tokens are longer than the model's 16 positions",
            "but the model's vocabulary has the tokens 0 to 36",
            "the batch has",
            "position_ids",
        ),
        strict=True,
    ):
        assert part in message
    assert other == (said, losses)
    assert losses[1] < losses[0]


def half_frozen(schedule, alone):
    """One name of the tied parameter is frozen after it was cut apart."""
    pipe = make_lm(apart("gpt2", 4 if schedule else 2, schedule), alone=alone)
    parameters = dict(pipe.named_parameters())
    if EMBEDDING in parameters:
        parameters[EMBEDDING].requires_grad_(False)
    with pytest.raises(ValueError, match="are one parameter in two stages") as caught:
        pipe.forward_backward(*text(7, 0))
    pipe.requires_grad_(True)
    return str(caught.value), pipe.forward_backward(*text(7, 0))


@pytest.mark.parametrize("schedule", [None, "ZBVZeroBubble"])
def test_a_copy_that_is_frozen_alone_is_an_error_on_every_rank(ranks, schedule):
    """Else one rank would wait for a gradient that never comes."""
    message, loss = half_frozen(schedule, True)
    for found in ranks(half_frozen, 2, schedule, False):
        assert found[0] == message and same_bits(found[1], loss)


def dying(victim):
    """The victim dies as it is about to add up gradients, in the second step."""
    pipe = make_lm(apart("gpt2", 3, pipeline={"split": [1, 2, 1]}), timeout=90.0)
    optimizer = adamw(pipe)
    step(pipe, optimizer, *text(7, 0))
    if dist.get_rank() == victim:
        TiedWeights.add_up = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        step(pipe, optimizer, *text(7, 1))
    except PeerError as error:
        return str(error), time.monotonic() - begin
    return "", 0.0


@pytest.mark.parametrize("victim", [slow(0), 2])
def test_a_rank_that_dies_in_the_exchange_is_named(ranks, victim):
    results = ranks(dying, 3, victim, may_fail=True)
    for rank, found in enumerate(results):
        if rank == victim:
            assert found == ("died", str(-signal.SIGKILL))
        else:
            message, seconds = found
            assert message.startswith(f"rank {victim} (stage {victim}) is gone"), (rank, found)
            assert seconds < 45.0


# -- copies that come apart ------------------------------------------------------------------------


def come_apart():
    """The errors of ranks with seeds of their own, and of an optimizer over the uncut model."""
    errors = []
    for seeds_differ in (True, False):
        torch.manual_seed(dist.get_rank() if seeds_differ else 0)
        model = gpt2()
        pipe = mpcomp.pipeline(model, 2, split=2, ties="apart", timeout=60.0)
        optimizer = torch.optim.SGD([p for p in model.parameters() if not p.is_meta], lr=0.1)
        with pytest.raises(RuntimeError) as caught:
            for number in range(2):
                step(pipe, optimizer, *text(4, number))
                pipe.evaluate([text(4, number)])  # which compares nothing
        errors.append((pipe.num_steps, str(caught.value)))
    return errors


def test_copies_that_come_apart_are_an_error_on_all_ranks(ranks):
    found = ranks(come_apart, 2)
    assert found[0] == found[1]
    (first, seeds), (second, optimizer) = found[0]
    assert first == 0 and "torch.manual_seed" in seeds
    assert second == 1 and "pipe.parameters()" in optimizer
