"""Language models of transformers in a pipeline: the plain model's numbers, and clear refusals."""

import copy
import math

import pytest
import torch
from lms import (
    VOCABULARY,
    gpt2,
    language_model,
    llama,
    logits_of,
    num_tokens,
    parts_of,
    plain_step,
    sum_tied,
    text,
    untied,
    without_labels,
)
from methods import same_bits
from models import adamw, sgd, store_of
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import mpcomp
from mpcomp import CausalLMLoss
from mpcomp.core.randomness import stage_randomness
from stages import split

#: Padding, rows of the microbatches, whether activations are recomputed.
CASES = [
    (None, [4], False),
    (None, [1, 1, 1, 1], False),
    (None, [2, 2, 2, 1], True),
    ("left", [2, 2], False),
    ("left", [1, 1, 1, 1], True),
    ("right", [4], True),
    ("right", [2, 2], True),
    ("right", [2, 2, 2, 1], False),
]
FAMILIES = ["gpt2", "llama"]
HEAD, EMBEDDING = "lm_head.weight", "transformer.wte.weight"


def tied_llama():
    return llama(tie_word_embeddings=True)


def grads(model):
    """Of all parameters, by name; of those of a tied head too."""
    return {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}


def assert_same(pipe, plain):
    """Parameters and gradients agree in every bit, under the same names."""
    theirs = dict(plain.named_parameters(remove_duplicate=False))
    ours = dict(pipe.named_parameters())
    assert theirs.keys() - ours.keys() == {one.copies[1][1] for one in pipe.shared_weights}
    for name, parameter in ours.items():
        assert same_bits(parameter, theirs[name]), f"parameter {name}"
        mine, other = parameter.grad, theirs[name].grad
        assert (mine is None) == (other is None), f"gradient {name}"
        assert mine is None or same_bits(mine, other), f"gradient {name}"


# -- law 1 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("side, sizes, recompute", CASES)
def test_llama_is_the_plain_model(side, sizes, recompute, global_rng_untouched):
    """Untied: loss, every gradient and three steps, bit for bit."""
    model = llama()
    plain = copy.deepcopy(model)
    pipe = mpcomp.pipeline(model, len(sizes), split=3, recompute=recompute)
    optimizers = adamw(pipe), adamw(plain)
    for step in range(3):
        batch = text(sum(sizes), step, side=side)
        with global_rng_untouched():
            loss = pipe.forward_backward(batch)
        assert same_bits(loss, plain_step(plain, batch, sizes))
        for optimizer in optimizers:
            optimizer.step()
        assert_same(pipe, plain)
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert pipe.num_steps == 3 and not pipe.ties


@pytest.mark.parametrize("side, sizes, recompute", CASES)
def test_gpt2_is_the_plain_model_with_its_two_uses_apart(side, sizes, recompute):
    """Embedding and head gather their gradients apart, and both then get the sum."""
    model = gpt2()
    plain = untied(model)
    pipe = mpcomp.pipeline(model, len(sizes), split=3, recompute=recompute, ties="apart")
    optimizers = adamw(pipe), adamw(plain)
    for step in range(3):
        batch = text(sum(sizes), step, side=side)
        loss = pipe.forward_backward(batch)
        assert same_bits(loss, plain_step(plain, batch, sizes))
        sum_tied(plain)
        for optimizer in optimizers:
            optimizer.step()
        assert_same(pipe, plain)
        for optimizer in optimizers:
            optimizer.zero_grad()


@pytest.mark.parametrize("make", [gpt2, tied_llama], ids=["gpt2", "llama"])
@pytest.mark.parametrize("optimizer, ties", [(sgd, "apart"), (adamw, "apart"), (adamw, "together")])
def test_tied_models_differ_from_the_tied_model_by_rounding(make, optimizer, ties):
    """All other gradients of the first step have the bits of the model as transformers has it."""
    model = make()
    plain = copy.deepcopy(model)
    pipe = mpcomp.pipeline(model, 4, split=4, ties=ties)
    optimizers = optimizer(pipe), optimizer(plain)
    for step in range(3):
        batch = text(7, step, side="right")
        loss = pipe.forward_backward(batch)
        expected = plain_step(plain, batch, [2, 2, 2, 1])
        theirs = grads(plain)
        assert math.isclose(loss, expected, rel_tol=1e-6)
        for name, parameter in pipe.named_parameters():
            tied = name == HEAD or parameter.shape[0] == VOCABULARY
            if step == 0 and not tied:
                assert same_bits(parameter.grad, theirs[name]), name
            torch.testing.assert_close(parameter.grad, theirs[name], atol=1e-6, rtol=1e-4)
        for each in optimizers:
            each.step()
            each.zero_grad()
    assert len(pipe.ties) == (ties == "apart") and len(pipe.stages) == 4 + (ties == "together")


@pytest.mark.parametrize("ties", ["apart", "together"])
def test_at_one_microbatch_the_tie_is_exact_too(ties):
    """One use each: the same two addends."""
    model = gpt2()
    plain = copy.deepcopy(model)
    pipe = mpcomp.pipeline(model, 1, split=2, ties=ties)
    batch = text(4)
    assert same_bits(pipe.forward_backward(batch), plain_step(plain, batch, [4]))
    assert_same(pipe, plain)


@pytest.mark.parametrize("ties", ["apart", "together"])
@pytest.mark.parametrize("make", [gpt2, tied_llama], ids=["gpt2", "llama"])
def test_accumulation_over_two_calls(make, ties):
    """What was gathered before is added to, and not sent again."""
    model = make()
    plain = untied(model)
    pipe = mpcomp.pipeline(model, 2, split=2, ties=ties)
    former = None
    for step in range(2):
        batch = text(4, step, side="left")
        pipe.forward_backward(batch)
        plain.zero_grad()
        plain_step(plain, batch, [2, 2])
        sum_tied(plain)
        total = {name: grad.clone() for name, grad in grads(plain).items()}
        if former is not None:
            total = {name: former[name] + grad for name, grad in total.items()}
        former = total
    for name, parameter in pipe.named_parameters():
        if parameter.shape[0] == VOCABULARY:
            assert same_bits(parameter.grad, former[name]), name
        # Others add microbatch by microbatch to what they had: another order of the same sum.
        torch.testing.assert_close(parameter.grad, former[name], atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("make", [gpt2, llama], ids=["gpt2", "llama"])
def test_clipping_counts_a_tied_parameter_once(make):
    model = make()
    plain = copy.deepcopy(model)
    pipe = mpcomp.pipeline(model, 2, split=3)
    batch = text(4, side="right")
    pipe.forward_backward(batch)
    plain_step(plain, batch, [2, 2])
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    assert float(expected) > 0.1
    torch.testing.assert_close(mpcomp.clip_grad_norm_(pipe, 0.1), expected, rtol=1e-6, atol=0)
    theirs = grads(plain)
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("tie_comp", [None, "ef+topk:0.1"])
def test_a_loss_scaler_skips_an_overflow(tie_comp):
    """Nothing changes in a skipped step; a following one is that of a plain pipeline."""
    scaler = torch.amp.GradScaler("cpu", init_scale=3e38, growth_interval=1000)
    model = gpt2()
    plain = copy.deepcopy(model)
    pipe = mpcomp.pipeline(model, 2, split=2, scaler=scaler, tie_comp=tie_comp)
    other = mpcomp.pipeline(plain, 2, split=2, tie_comp=tie_comp)
    before = copy.deepcopy(pipe.state_dict())
    optimizer, theirs = adamw(pipe), adamw(other)

    def step(seed):
        pipe.forward_backward(text(4, seed))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    step(0)
    assert pipe.step_skipped and pipe.num_steps == 1
    assert all(same_bits(value, before[name]) for name, value in pipe.state_dict().items())
    for tie in pipe.ties:
        for link in tie.links:
            assert not link.endpoint.ends or all(
                store_of(end) is None or not len(store_of(end))
                for end in link.endpoint.ends.values()
            )
    scaler.load_state_dict({**scaler.state_dict(), "scale": 1024.0})
    other.num_steps = 1
    step(1)
    assert not pipe.step_skipped
    other.forward_backward(text(4, 1))
    theirs.step()
    for name, value in other.state_dict().items():
        torch.testing.assert_close(pipe.state_dict()[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_autocast(family, recompute):
    """Bit for bit the plain model under the same autocast."""
    model = language_model(family)
    plain = untied(model)
    pipe = mpcomp.pipeline(model, 2, split=2, recompute=recompute)
    batch = text(5, side="right")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = pipe.forward_backward(batch)
        expected = plain_step(plain, batch, [3, 2])
    if pipe.ties or pipe.shared_weights:
        sum_tied(plain)
    assert same_bits(loss, expected) and loss.dtype == torch.float32
    assert_same(pipe, plain)
    with torch.no_grad():
        assert not torch.equal(loss, plain_step_loss(plain, batch, [3, 2]))  # autocast mattered


def plain_step_loss(model, batch, sizes):
    total = sum(num_tokens(part["labels"]) for part in parts_of(batch, sizes))
    return sum(
        CausalLMLoss()(model(**without_labels(part), use_cache=False).logits, part["labels"])
        * (num_tokens(part["labels"]) / total)
        for part in parts_of(batch, sizes)
    )


@pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])
@pytest.mark.parametrize(
    "family, settings",
    [
        ("gpt2", {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}),
        ("llama", {"attention_dropout": 0.2}),
    ],
    ids=FAMILIES,
)
def test_dropout_is_drawn_per_stage_and_microbatch(
    family, settings, recompute, global_rng_untouched
):
    model = language_model(family, **settings)
    plain = untied(model)
    pipe = mpcomp.pipeline(model, 2, split=3, seed=5, recompute=recompute, ties="apart")
    cut = split(plain, 3)
    losses = []
    for step in range(2):
        batch = text(4, side="right")
        with global_rng_untouched():
            losses.append(pipe.forward_backward(batch))
        parts = parts_of(batch, [2, 2])
        tokens = num_tokens(batch["labels"])
        total = torch.zeros(())
        for i, part in enumerate(parts):
            inputs = without_labels(part)
            x = None
            for j, stage in enumerate(cut):
                with stage_randomness(torch.device("cpu"), 5, step, j, i):
                    x = stage(**inputs) if j == 0 else stage(x, **stage.takes(inputs))
            loss = CausalLMLoss()(x, part["labels"]) * (num_tokens(part["labels"]) / tokens)
            loss.backward()
            total = loss.detach() if i == 0 else total + loss.detach()
        if pipe.ties or pipe.shared_weights:
            sum_tied(plain)
        assert same_bits(losses[-1], total)
        assert_same(pipe, plain)
        pipe.zero_grad()
        plain.zero_grad()
    assert losses[0] != losses[1]  # another step, another draw


@pytest.mark.parametrize("family", FAMILIES)
def test_position_ids_of_packed_sequences(family):
    """Two texts in a row, each with positions of its own."""
    model = language_model(family)
    plain = untied(model)
    pipe = mpcomp.pipeline(model, 2, split=3)
    batch = text(4)
    positions = torch.cat([torch.arange(4), torch.arange(5)]).repeat(4, 1)
    given = {**batch, "position_ids": positions}
    assert same_bits(pipe.forward_backward(given), plain_step(plain, given, [2, 2]))
    if pipe.ties or pipe.shared_weights:
        sum_tied(plain)
    assert_same(pipe, plain)
    pipe.zero_grad()
    assert pipe.forward_backward(given) != pipe.forward_backward(batch)


@pytest.mark.parametrize("family", FAMILIES)
def test_inference_is_the_plain_models(family):
    model = language_model(family)
    batch = text(5, side="left")
    expected = [logits_of(model, part) for part in parts_of(batch, [2, 2, 1])]
    pipe = mpcomp.pipeline(model, 3, split=2).eval()
    with torch.no_grad():
        assert same_bits(pipe(batch), torch.cat(expected))
        ids = batch["input_ids"]
        assert same_bits(pipe(ids), pipe({"input_ids": ids}))


# -- compression ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_compressed_training_with_padding(family):
    """It learns a batch by heart, with fewer bytes; padding costs no loss."""
    pipe = mpcomp.pipeline(
        language_model(family), 2, split=2, act_comp="topk:0.5", grad_comp="ef+topk:0.5"
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.02)
    losses = []
    for _ in range(12):
        losses.append(float(pipe.forward_backward(text(4, side="right"))))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] * 0.7
    sent = [link.meter.train for link in pipe.boundaries[0].links]
    assert all(0 < traffic.wire_bytes < 0.7 * traffic.dense_bytes for traffic in sent)


# -- bad input ------------------------------------------------------------------------------------


BAD = {
    "long": (lambda b: text(4, positions=20), r"of 20 tokens are longer than the model's 16"),
    "outside": (lambda b: {**b, "input_ids": b["input_ids"] + 53}, "vocabulary has the tokens 0"),
    "negative": (lambda b: {**b, "input_ids": b["input_ids"] - 60}, "input_ids holds -"),
    "mask 1-d": (lambda b: {**b, "attention_mask": torch.ones(4)}, r"attention_mask is \[4\]"),
    "mask wide": (
        lambda b: {**b, "attention_mask": torch.ones(4, 10)},
        r"attention_mask is \[4, 10\] torch.float32; expected one number for each.*\[4, 9\]",
    ),
    "mask list": (lambda b: {**b, "attention_mask": [[1] * 9] * 4}, "attention_mask is a list"),
    "mask rows": (lambda b: {**b, "attention_mask": torch.ones(3, 9)}, "differ in dim 0"),
    "unknown": (
        lambda b: {**b, "token_type_ids": b["input_ids"]},
        "the batch has 'token_type_ids'; accepted are 'input_ids', 'attention_mask', 'position_ids",
    ),
    "float": (lambda b: {**b, "input_ids": torch.zeros(4, 9)}, r"\[4, 9\] torch.float32; a lang"),
    "bool": (lambda b: {**b, "input_ids": b["input_ids"] > 3}, r"\[4, 9\] torch.bool; a language"),
    "1-d": (lambda b: {**b, "input_ids": b["input_ids"][:, 0]}, r"input_ids is \[4\] torch.int64"),
    "no rows": (lambda b: {k: v[:0] for k, v in b.items()}, "the batch has no rows"),
    "no tokens": (lambda b: {k: v[:, :0] for k, v in b.items()}, "expected a token or more a row"),
    "no ids": (lambda b: {"attention_mask": b["input_ids"], **b, "input_ids": None}, "is missing"),
    "no labels": (without_labels, "there is no target: pass one, or a mapping with 'labels'"),
    "labels": (
        lambda b: {**b, "labels": b["labels"][:, :5]},
        r"labels are \[2, 5\] torch.int64, but",
    ),
    "labels rows": (lambda b: {**b, "labels": b["labels"][:3]}, "target has 3 rows, the batch 4"),
    "labels 1-d": (
        lambda b: {**b, "labels": b["labels"][:, 0]},
        r"labels are \[2\] torch.int64:",
    ),
    "cache": (lambda b: {**b, "past_key_values": DynamicCache()}, "each stage has a cache of its"),
    "positions": (
        lambda b: {**b, "position_ids": torch.arange(8).repeat(4, 1)},
        r"position_ids is \[4, 8\] torch.int64; expected whole numbers \[4, 9\], as input_ids",
    ),
    "positions float": (lambda b: {**b, "position_ids": torch.ones(4, 9)}, "expected whole number"),
    "positions list": (lambda b: {**b, "position_ids": [1]}, "position_ids is a list; expected"),
    "positions outside": (
        lambda b: {**b, "position_ids": torch.full((4, 9), 16)},
        "position_ids holds 16, but the model has the positions 0 to 15",
    ),
    "few rows": (lambda b: {k: v[:1] for k, v in b.items()}, "chunks=2 is larger than the batch"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_batches_change_nothing(name):
    """The error says what is accepted; gradients, also those held from before, stay as they are."""
    make, message = BAD[name]
    pipe = mpcomp.pipeline(gpt2(), 2, split=2, tie_comp="ef+topk:0.1")
    pipe.forward_backward(text(4, 1))
    held = {name: p.grad.clone() for name, p in pipe.named_parameters()}
    state = copy.deepcopy([link.endpoint.state_dict() for link in pipe.links])
    with pytest.raises(ValueError, match=message):
        pipe.forward_backward(make(text(4)))
    assert pipe.num_steps == 1
    assert all(same_bits(p.grad, held[name]) for name, p in pipe.named_parameters())
    assert str([link.endpoint.state_dict() for link in pipe.links]) == str(state)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_tokens_of_both_kinds_of_whole_numbers(dtype):
    pipe = mpcomp.pipeline(llama(), 2, split=2)
    batch = text(4)
    expected = pipe.forward_backward(batch)
    assert same_bits(
        pipe.forward_backward({**batch, "input_ids": batch["input_ids"].to(dtype)}), expected
    )


def test_a_model_in_evaluation_mode_is_not_trained_as_if_it_were_not(tmp_path):
    """As transformers loads it: without dropout, until somebody says otherwise."""
    gpt2().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, resid_pdrop=0.5)
    pipe = mpcomp.pipeline(model, 2, split=2)
    assert not pipe.training and not any(stage.training for stage in pipe.stages)
    with pytest.raises(ValueError, match=r"evaluation mode: call pipe.train\(\).*from_pretrained"):
        pipe.forward_backward(text(4))
    assert pipe.evaluate([text(4)]) == pipe.evaluate([text(4)])
    pipe.train()
    assert all(module.training for module in pipe.modules())
    dropped, again = pipe.forward_backward(text(4)), pipe.forward_backward(text(4))
    assert dropped != again  # each step draws its own
    assert mpcomp.pipeline(model.train(), 2, split=2).training


def test_a_tied_model_trains_by_forward_backward_alone():
    pipe = mpcomp.pipeline(gpt2(), 2, split=2)
    with pytest.raises(ValueError, match=r"two stages share transformer.wte.weight.*forward_backw"):
        pipe(text(4))
    with torch.no_grad():
        assert pipe(text(4)).shape == (4, 9, VOCABULARY)
    assert pipe.eval()(text(4)).shape == (4, 9, VOCABULARY)


def test_an_untied_model_trains_as_any_module():
    model = llama()
    plain = copy.deepcopy(model)
    pipe = mpcomp.pipeline(model, 2, split=2)
    batch = text(4, side="right")
    CausalLMLoss()(pipe(batch), batch["labels"]).backward()
    plain(**batch, use_cache=False).loss.backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(dict(pipe.named_parameters())[name].grad, parameter.grad)


# -- weights in files -----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [gpt2, llama, tied_llama], ids=["gpt2", "llama", "tied llama"])
def test_merge_saves_what_transformers_loads(make, tmp_path):
    """And a model without values, on "meta", takes the same weights."""
    model = make()
    pipe = mpcomp.pipeline(model, 2, split=3)
    optimizer = adamw(pipe)
    pipe.forward_backward(text(4))
    optimizer.step()
    merged = pipe.merge()
    assert merged is model
    merged.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    batch = text(4, 1, side="left")
    expected = logits_of(model, batch)
    assert same_bits(logits_of(loaded, batch), expected)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    other = mpcomp.pipeline(empty, 4, split=2, weights=tmp_path).eval()
    with torch.no_grad():
        logits = other(batch)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    again = other.train().merge()
    assert same_bits(logits_of(again, batch), expected)
    assert not [n for n, t in again.named_parameters() if t.is_meta]
    if pipe.ties or pipe.shared_weights:
        assert again.get_input_embeddings().weight is again.get_output_embeddings().weight


def test_a_folder_that_lacks_a_tensor(tmp_path):
    gpt2(num_hidden_layers=3).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lack transformer.h.3"):
        mpcomp.pipeline(gpt2(), 2, split=2, weights=tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_load_into_another_cut(family, tmp_path):
    pipe = mpcomp.pipeline(language_model(family), 2, split=3)
    optimizer = adamw(pipe)
    pipe.forward_backward(text(4))
    optimizer.step()
    pipe.save(tmp_path / "saved")
    other = mpcomp.pipeline(language_model(family), 2, split=2)
    other.load(tmp_path / "saved")
    assert all(same_bits(v, pipe.state_dict()[k]) for k, v in other.state_dict().items())
    batch = text(4, 1)
    assert same_bits(logits_of(other.merge(), batch), logits_of(pipe.merge(), batch))


@pytest.mark.parametrize(
    "model, tie_comp",
    [(gpt2, None), (gpt2, "ef+topk:0.2"), (llama, None), (tied_llama, "ef+topk:0.2")],
    ids=["gpt2", "gpt2 ef tie", "llama", "tied llama ef tie"],
)
def test_a_checkpoint_goes_on(model, tie_comp, tmp_path):
    """Optimizer, links and a stateful tie: as if never stopped, bit for bit."""

    def made():
        pipe = mpcomp.pipeline(
            model(),
            2,
            split=2,
            act_comp="ef21+topk:0.3",
            grad_comp="ef+topk:0.3",
            tie_comp=tie_comp,
        )
        return pipe, adamw(pipe)

    def train(pipe, optimizer, steps):
        losses = []
        for step in steps:
            losses.append(pipe.forward_backward(text(4, step, side="right")))
            optimizer.step()
            optimizer.zero_grad()
        return losses

    pipe, optimizer = made()
    train(pipe, optimizer, range(2))
    pipe.save(tmp_path / "saved", optimizer=optimizer)
    expected = train(pipe, optimizer, range(2, 4))
    other, its = made()
    other.load(tmp_path / "saved", optimizer=its)
    assert [float(x) for x in train(other, its, range(2, 4))] == [float(x) for x in expected]
    assert all(same_bits(v, pipe.state_dict()[k]) for k, v in other.state_dict().items())


# -- peft -----------------------------------------------------------------------------------------


def lora(family, **settings):
    peft = pytest.importorskip("peft")
    modules = {"gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"]}[family]
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=2,
        lora_dropout=0.0,
        target_modules=modules,
        init_lora_weights=False,  # else half of the gradients are 0 at first
        fan_in_fan_out=family == "gpt2",
        **settings,
    )
    return peft.get_peft_model(language_model(family), config).train()


@pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])
@pytest.mark.parametrize("family", FAMILIES)
def test_lora_is_the_plain_peft_model(family, recompute):
    """Adapters in every stage; what is frozen gets nothing, and no tie is exchanged."""
    model = lora(family)
    plain = copy.deepcopy(model)
    pipe = mpcomp.pipeline(model, 2, split=3, recompute=recompute)
    optimizers = adamw(pipe), adamw(plain)
    for step in range(3):
        batch = text(4, step, side="right")
        assert same_bits(pipe.forward_backward(batch), plain_step(plain, batch, [2, 2]))
        for name, parameter in pipe.named_parameters():
            assert (parameter.grad is not None) == ("lora_" in name), name
        for optimizer in optimizers:
            optimizer.step()
        assert_same(pipe, plain)
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert all(link.meter.train.messages == 0 for tie in pipe.ties for link in tie.links)
    merged = pipe.merge()
    assert merged is model
    batch = text(4, 5)
    assert same_bits(logits_of(merged, batch), logits_of(plain, batch))


def test_nothing_to_train_before_a_cut_sends_no_gradient():
    model = llama().requires_grad_(False)
    for parameter in (*model.model.layers[3].parameters(), *model.lm_head.parameters()):
        parameter.requires_grad_(True)
    plain = copy.deepcopy(model)
    pipe = mpcomp.pipeline(model, 2, split=["model.layers.0", "model.layers.1", "model.layers.2"])
    batch = text(4)
    assert same_bits(pipe.forward_backward(batch), plain_step(plain, batch, [2, 2]))
    assert_same(pipe, plain)
    for boundary in pipe.boundaries:
        assert boundary.act.meter.train.messages == 2
        assert boundary.grad.meter.train.messages == 0


def test_peft_methods_that_change_the_inputs_are_refused():
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = peft.get_peft_model(gpt2(), config)
    with pytest.raises(ValueError, match="PROMPT_TUNING changes the model's inputs.*LoRA"):
        mpcomp.pipeline(model, 2, split=2)
