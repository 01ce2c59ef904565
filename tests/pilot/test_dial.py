"""The choice of ``auto``: for the README's tasks, in the first step, from a checkpoint."""

import warnings

import lms
import pytest
import torch
import torch.nn.functional as F
from encoders import encoder
from methods import same_bits
from models import MLP_SPLIT, images, mlp, rows
from torch import nn

import mpcomp
import stages
from mpcomp.links import budget
from mpcomp.links.auto import AUTO, INFERENCE, TIE_COMP
from mpcomp.links.budget import Measured, spelt
from mpcomp.links.build import method_of
from mpcomp.pilot import dial, paying

BOTH = {"act_comp": "auto", "grad_comp": "auto"}
AT_INFERENCE = spelt(INFERENCE, None)


def trained(model: nn.Module) -> nn.Module:
    """The model with scales of its norms as a training leaves them."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for module in model.modules():
            if "Norm" in type(module).__name__:
                noise = torch.rand(module.weight.shape, generator=generator)
                module.weight.mul_(0.9 + 0.2 * noise)
    return model


def of_cuts(pipe) -> list[tuple[str, str]]:
    return [(str(each.act.method), str(each.grad.method)) for each in pipe.boundaries]


def meant(methods) -> tuple[str, str]:
    act, grad = (str(method_of(name, methods[name])) for name in BOTH)
    return act, grad


def built(model, split=2, chunks=2, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mpcomp.pipeline(model, chunks, split=split, **{**BOTH, **options})


@pytest.fixture
def small_is_released(monkeypatch):
    """Tiny models stand for those from which a language model is taken for a released one."""
    monkeypatch.setattr(dial, "RELEASED", 1000)


def step_of(pipe, seed=0, *, ids=None):
    loss = pipe.forward_backward(lms.text(4, seed=seed), sample_ids=ids)
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter -= 0.05 * parameter.grad
            parameter.grad = None
    return loss


# -- the tasks of the README's table --------------------------------------------------------------


def test_a_resnet_from_scratch():
    pipe = built(stages.resnet18(width=4), 4, loss_fn=F.cross_entropy)
    assert of_cuts(pipe) == [meant(AUTO["auto:relu"])] * 3
    assert pipe.report(show=False)["auto"] == "'auto' is 'auto:relu' (behind a ReLU)"
    assert torch.isfinite(pipe.forward_backward(*images(4)))
    assert of_cuts(pipe) == [meant(AUTO["auto:relu"])] * 3


@pytest.mark.parametrize("ties", [None, "apart"])
def test_a_gpt2_from_scratch(ties):
    """With both uses of the tie on one rank, and with two copies."""
    pipe = built(lms.gpt2(), 2, ties=ties)
    assert of_cuts(pipe) == [meant(AUTO["auto:scratch"])] * len(pipe.boundaries)
    assert len(pipe.boundaries) == (2 if ties is None else 1)
    assert [str(link.method) for tie in pipe.ties for link in tie.links] == [TIE_COMP] * (
        0 if ties is None else 2
    )
    assert "'auto:scratch' (a language model, and no norm" in pipe.report(show=False)["auto"]


def smollm2():
    """SmolLM2-135M as it is released, but for weights that nobody reads."""
    config = lms.config_of(
        "llama",
        num_hidden_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = lms.transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu").tie_weights()
    return trained(model)


def test_smollm2_before_it_is_trained_is_at_inference():
    """At its own size: 135 million parameters are released, whatever the batch may be."""
    pipe = built(smollm2(), 3)
    assert pipe.report(show=False)["auto"] == (
        "'auto' is step:0.2:centre=true:spikes=16 until it is trained "
        "(a trained language model of 135 million parameters)"
    )
    assert of_cuts(pipe) == [meant(AT_INFERENCE)] * 3


def test_fine_tuned_over_samples_that_come_again(small_is_released):
    pipe = built(trained(lms.llama()), 3)
    with pipe.uncompressed():
        pipe.evaluate([lms.text(4)])
    assert of_cuts(pipe) == [meant(AT_INFERENCE)] * 2
    step_of(pipe, ids=torch.arange(4))
    assert of_cuts(pipe) == [meant(AUTO["auto:memory"])] * 2
    said = pipe.report(show=False)["auto"]
    assert said.startswith("'auto' is 'auto:memory' (a trained language model of ")
    assert said.endswith(" parameters, with sample_ids)")


def test_lora_over_samples_that_come_again(small_is_released):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    pipe = built(peft.get_peft_model(trained(lms.llama()), config), 2).train()
    assert of_cuts(pipe) == [meant(AT_INFERENCE)]
    pipe.forward_backward(lms.text(4), sample_ids=torch.arange(4))
    assert of_cuts(pipe) == [meant(AUTO["auto:memory"])]


# -- other evidence, and none ---------------------------------------------------------------------


def test_fine_tuned_on_batches_that_are_new(small_is_released):
    pipe = built(trained(lms.llama()), 2)
    step_of(pipe)
    assert of_cuts(pipe) == [meant(AUTO["auto"])]
    assert "is itself (" in pipe.report(show=False)["auto"]
    step_of(pipe, ids=torch.arange(4))  # too late: what both ends hold is known by then
    assert of_cuts(pipe) == [meant(AUTO["auto"])]


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.relu, self.two = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)

    def forward(self, x):
        return self.two(self.relu(self.one(x)))


OTHERS = {
    "a trained language model that is small": (lambda: trained(lms.llama()), 2, "auto:scratch"),
    "one without weights, to be read": (lambda: lms.llama().to("meta"), 2, "auto:scratch"),
    "a trained encoder": (lambda: trained(encoder("bert", "SequenceClassification")), 2, "auto"),
    "a trained model of images": (
        lambda: trained(encoder("vit", "ImageClassification")),
        2,
        "auto",
    ),
    "a forward of one's own": (Own, ["relu"], "auto:relu"),
    "one that is cut before its ReLU": (Own, ["one"], "auto"),
    "a hyperbolic tangent": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)),
        ["1"],
        "auto",
    ),
    "a ReLU that is normalized": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 2)),
        ["2"],
        "auto",
    ),
    "a trained net that is no language model": (
        lambda: trained(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))),
        ["1"],
        "auto",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_models(case, tmp_path):
    make, split, word = OTHERS[case]
    model = make()
    options = {}
    if next(model.parameters()).is_meta:
        lms.llama().save_pretrained(tmp_path)
        options["weights"] = tmp_path
    assert set(of_cuts(built(model, split, **options))) == {meant(AUTO[word])}


def test_each_cut_for_itself():
    """The first of these lies behind a hyperbolic tangent, the second behind a ReLU."""
    pipe = built(mlp(), MLP_SPLIT, loss_fn=F.cross_entropy)
    assert of_cuts(pipe) == [meant(AUTO["auto"]), meant(AUTO["auto:relu"])]
    assert pipe.report(show=False)["auto"] == (
        "'auto' is itself at cut 0 (not behind a ReLU, and the model is not known for a language "
        "model) and 'auto:relu' at cut 1 (behind a ReLU)"
    )


def test_one_direction_of_one_cut():
    pipe = built(mlp(), MLP_SPLIT, act_comp={1: "auto"}, grad_comp="quant:8")
    act, _ = meant(AUTO["auto:relu"])
    quant = str(mpcomp.parse("quant:8"))
    assert of_cuts(pipe) == [("none", quant), (act, quant)]
    assert [link.chosen for link in pipe.links] == ["", "", "auto:relu", ""]


@pytest.mark.parametrize("word", [word for word in AUTO if word != "auto"])
def test_a_word_that_is_named_stays(word, small_is_released):
    pipe = built(trained(lms.llama()), 2, act_comp=word, grad_comp=word)
    step_of(pipe, ids=torch.arange(4))
    assert of_cuts(pipe) == [meant(AUTO[word])]
    assert pipe.report(show=False)["auto"] == ""


def test_it_says_so_once(small_is_released):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = mpcomp.pipeline(trained(lms.llama()), 2, split=2, **BOTH)
        for seed in range(3):
            step_of(pipe, seed, ids=torch.arange(4))
    said = [str(each.message) for each in caught if "'auto' is" in str(each.message)]
    assert said == [pipe.report(show=False)["auto"]]
    assert {each.filename for each in caught if str(each.message) in said} == {__file__}


def test_the_report_prints_it(capsys):
    built(mlp(), MLP_SPLIT).report()
    assert "'auto' is itself at cut 0" in capsys.readouterr().out


def test_a_pilot_chooses_nothing(small_is_released):
    pipe = built(trained(lms.llama()), 2).train()
    data = [(lms.text(4, seed=seed), None, torch.arange(4)) for seed in range(2)]
    data = [{**batch} for batch, _, _ in data]
    pipe.compare(["step:0.5"], data=data, show=False)
    assert of_cuts(pipe) == [meant(AT_INFERENCE)]
    step_of(pipe, ids=torch.arange(4))
    assert of_cuts(pipe) == [meant(AUTO["auto:memory"])]


def test_a_step_that_fails_has_chosen_nothing(small_is_released):
    pipe = built(trained(lms.llama()), 2)
    weight = next(iter(pipe.parameters()))
    before = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError):
        pipe.forward_backward(lms.text(4), sample_ids=torch.arange(4))
    with torch.no_grad():
        weight.copy_(before)
    pipe.zero_grad()
    step_of(pipe)
    assert of_cuts(pipe) == [meant(AUTO["auto"])]


# -- runs that go on ------------------------------------------------------------------------------


def test_it_trains_as_the_word_that_it_chose(small_is_released):
    """Bit for bit, from the first step on."""
    losses, sent = [], []
    for methods in (BOTH, dict.fromkeys(BOTH, "auto:memory")):
        torch.manual_seed(0)
        pipe = built(trained(lms.llama()), 3, **methods)
        losses.append(
            torch.stack([step_of(pipe, s % 2, ids=torch.arange(4) + 4 * (s % 2)) for s in range(5)])
        )
        sent.append(pipe.wire_bytes)
    assert same_bits(*losses) and sent[0] == sent[1]


def make_of(case):
    torch.manual_seed(0)
    return trained(lms.llama()) if case == "the same evidence" else lms.llama()


@pytest.mark.parametrize("case", ["the same evidence", "another"])
def test_a_resumed_run_keeps_it(case, small_is_released, tmp_path):
    """Also where the model is made anew with random weights before they are loaded."""
    torch.manual_seed(0)
    pipe = built(trained(lms.llama()), 2)

    def batch(pipe, number):
        return step_of(pipe, number % 2, ids=torch.arange(4) + 4 * (number % 2))

    for number in range(3):
        batch(pipe, number)
    pipe.save(tmp_path / "run")
    later = torch.stack([batch(pipe, number) for number in range(3, 6)])
    resumed = built(make_of(case), 2)
    assert of_cuts(resumed) != of_cuts(pipe)
    resumed.load(tmp_path / "run")
    assert of_cuts(resumed) == of_cuts(pipe)
    assert "'auto:memory' (as in the checkpoint)" in resumed.report(show=False)["auto"]
    assert same_bits(torch.stack([batch(resumed, number) for number in range(3, 6)]), later)
    assert resumed.wire_bytes == pipe.wire_bytes


def test_a_checkpoint_from_before_the_first_step_leaves_it_open(small_is_released, tmp_path):
    built(trained(lms.llama()), 2).save(tmp_path / "run")
    pipe = built(trained(lms.llama()), 2)
    pipe.load(tmp_path / "run")
    assert of_cuts(pipe) == [meant(AT_INFERENCE)]
    step_of(pipe, ids=torch.arange(4))
    assert of_cuts(pipe) == [meant(AUTO["auto:memory"])]


def test_a_method_that_is_named_is_not_changed_by_a_checkpoint(tmp_path):
    pipe = built(lms.gpt2(), 2)
    for seed in range(2):
        step_of(pipe, seed)
    pipe.save(tmp_path / "run")
    named = built(lms.gpt2(), 2, act_comp="quant:8", grad_comp="quant:8")
    before = of_cuts(named)
    with pytest.raises(ValueError, match="use the same compressors"):
        named.load(tmp_path / "run")
    assert of_cuts(named) == before


def test_a_load_that_fails_changes_nothing(small_is_released, tmp_path):
    pipe = built(trained(lms.llama()), 2)
    step_of(pipe, ids=torch.arange(4))
    pipe.save(tmp_path / "run")
    other = built(trained(lms.llama(hidden_size=16)), 2)
    with pytest.raises(ValueError, match="is of another model"):
        other.load(tmp_path / "run")
    assert of_cuts(other) == [meant(AT_INFERENCE)]
    step_of(other)
    assert of_cuts(other) == [meant(AUTO["auto"])]


# -- a budget -----------------------------------------------------------------------------------


def mlp_with(**options):
    return built(mlp(), MLP_SPLIT[1:], loss_fn=F.cross_entropy, **options)


@pytest.mark.parametrize("word", ["auto", "auto:relu"])
def test_a_budget_moves_the_steps_of_words(word):
    found = {
        budget: of_cuts(mlp_with(act_comp=word, grad_comp=word, budget=budget))
        for budget in ("1 %", 0.01, "4 %")
    }
    assert found["1 %"] == found[0.01] == [meant(spelt("auto:relu", 1.0))]
    assert found["4 %"] == [meant(spelt("auto:relu", 4.0))] != found["1 %"]


def test_a_budget_leaves_named_methods_alone():
    pipe = mlp_with(grad_comp="quant:8", budget="1 %")
    act, _ = meant(spelt("auto:relu", 1.0))
    assert of_cuts(pipe) == [(act, str(mpcomp.parse("quant:8")))]
    said = pipe.report(show=False)["auto"]
    assert said == "'auto' is 'auto:relu' (behind a ReLU), with steps for a loss of 1 %"


@pytest.mark.parametrize("methods", [{}, {"act_comp": "quant:8"}, {"grad_comp": "step:0.5"}])
def test_a_budget_without_a_word_is_refused(methods):
    given = dict.fromkeys(BOTH) | methods
    with pytest.raises(ValueError, match="a budget moves the steps of a word"):
        mlp_with(**given, budget="1 %")


def test_a_budget_below_what_was_measured_is_refused():
    with pytest.raises(ValueError, match="the finest steps that were measured cost 2.09 %"):
        built(lms.gpt2(), 2, budget="1 %")


@pytest.fixture
def memory_has_a_curve(monkeypatch):
    """Steps that cost 1 % of half as large, and 3 % of one and a half times as large."""
    rows = [Measured(1.0, 0.2, 0.5, "some", "fine"), Measured(3.0, 0.6, 1.5, "some", "coarse")]
    monkeypatch.setattr(budget, "CURVES", {**budget.CURVES, "auto:memory": rows})


def test_a_budget_moves_the_steps_of_fine_tuning(small_is_released, memory_has_a_curve):
    """Before a head its own, too."""
    pipe = built(trained(lms.gpt2()), 2, budget="2 %")
    assert of_cuts(pipe) == [meant(spelt(INFERENCE, 2.0))] * 2
    step_of(pipe, ids=torch.arange(4))
    first, before_head = (spelt("auto:memory", 2.0, before_head=head) for head in (False, True))
    assert of_cuts(pipe) == [meant(first), meant(before_head)]
    assert first["grad_comp"].endswith("+step:0.866:scale=tensor")
    assert before_head["grad_comp"].endswith("+step:0.433:scale=tensor")
    assert pipe.report(show=False)["auto"].endswith(
        " parameters, with sample_ids), with steps for a loss of 2 %"
    )


def test_a_budget_that_no_training_can_keep_is_refused_at_once(
    small_is_released, memory_has_a_curve, monkeypatch
):
    """Weights that are frozen are for inference alone, which has a curve of its own."""
    said = "budget of 0.9 % with 'auto:memory': the finest steps that were measured cost 1 %"
    frozen = built(trained(lms.llama()).requires_grad_(False), 2, budget="0.9 %")
    assert of_cuts(frozen) == [meant(spelt(INFERENCE, 0.9))]
    with pytest.raises(ValueError, match=said + ".*for inference alone model.requires_grad_"):
        built(trained(lms.llama()), 2, budget="0.9 %")
    monkeypatch.delitem(budget.CURVES, "auto:memory")
    with pytest.raises(ValueError, match="budget of 4 % with 'auto:memory': no study has"):
        built(trained(lms.llama()), 2, budget="4 %")


def test_a_budget_that_a_first_step_cannot_keep_is_refused_by_it(
    small_is_released, memory_has_a_curve
):
    pipe = built(trained(lms.llama()), 2, budget="1 %")
    with pytest.raises(ValueError, match="budget of 1 % with 'auto': no study has"):
        pipe.forward_backward(lms.text(4))
    assert of_cuts(pipe) == [meant(spelt(INFERENCE, 1.0))] and pipe.num_steps == 0


def test_a_resumed_run_keeps_its_steps(tmp_path):
    pipe = mlp_with(budget="1 %")
    pipe.forward_backward(*rows(6))
    pipe.save(tmp_path / "run")
    resumed = mlp_with(budget="4 %")
    resumed.load(tmp_path / "run")
    assert of_cuts(resumed) == of_cuts(pipe)
    assert resumed.report(show=False)["auto"] == "'auto' is 'auto:relu' (as in the checkpoint)"


# -- where it pays --------------------------------------------------------------------------------

#: Links whose rates decide, however long steps take here.
SLOW, FAST = "1 kbit/s, 20 ms", "1000000 Gbit/s"


@pytest.fixture
def looks_early(monkeypatch):
    """Steps are timed from the second on, two at once, and looked at each time."""
    monkeypatch.setattr(paying, "FIRST", 1)
    monkeypatch.setattr(paying, "WINDOW", 2)
    monkeypatch.setattr(paying, "_CHANGED", 0.0)


def plan_with(pipe, link):
    """As if the links had become others."""
    pipe._steps._dial._paying._link = dial.link_of(link)


def memory_step(pipe, number):
    return step_of(pipe, number % 2, ids=torch.arange(4) + 4 * (number % 2))


@pytest.mark.parametrize(
    "link, word", [(SLOW, "auto:memory"), (FAST, "bf16"), (None, "auto:memory")]
)
def test_it_compresses_where_that_pays(link, word, small_is_released, looks_early):
    pipe = built(trained(lms.llama()), 3, link=link)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(6):
            memory_step(pipe, number)
    in_bf16 = [("bf16", "bf16")] * 2
    assert of_cuts(pipe) == (in_bf16 if word == "bf16" else [meant(AUTO[word])] * 2)
    said = [str(each.message) for each in caught if "'auto' is" in str(each.message)]
    assert said[-1] == pipe.report(show=False)["auto"]
    assert len(said) == 1 + (word == "bf16")
    if word == "bf16":
        assert said[-1].startswith("'auto' is bf16 (compression does not pay at 1000000.0 Gbit/s: ")
        assert {each.filename for each in caught if str(each.message) in said} == {__file__}


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, ("bf16", "bf16")),
        ({"grad_comp": "quant:8"}, ("bf16", "quant:bits=8")),
        ({"act_comp": None}, ("none", "bf16")),
        ({"act_comp": "auto:scratch", "grad_comp": "auto"}, ("klt+step:0.1:centre=true", "bf16")),
    ],
    ids=str,
)
def test_only_what_is_left_to_it_becomes_bf16(given, expected, looks_early):
    pipe = built(lms.gpt2(), 2, ties="apart", link=FAST, **given)
    for number in range(6):
        step_of(pipe, number)
    wanted = tuple(str(mpcomp.parse(spec)) for spec in expected)
    assert of_cuts(pipe) == [wanted]


def go_on_from(pipe, methods):
    """A pipeline of these methods with the weights of another, at its step."""
    other = built(trained(lms.llama()), 3, **methods)
    other.load_state_dict(pipe.state_dict())
    other.num_steps = pipe.num_steps
    return other.train()


def test_changed_cuts_train_as_the_method_that_they_changed_to(small_is_released, looks_early):
    """Bit for bit: there to bf16, and back to memories that are empty."""
    pipe = built(trained(lms.llama()), 3, link=FAST)
    number = 0
    for link, word in ((FAST, "bf16"), (SLOW, "auto:memory"), (FAST, "bf16")):
        plan_with(pipe, link)
        methods = dict.fromkeys(BOTH, word)
        wanted = [meant(AUTO.get(word, methods))] * 2
        while of_cuts(pipe) != wanted or not number:
            memory_step(pipe, number)
            number += 1
            assert number < 30
        other, sent = go_on_from(pipe, methods), pipe.wire_bytes
        losses = [
            torch.stack([memory_step(each, number + k) for k in range(3)]) for each in (pipe, other)
        ]
        assert same_bits(*losses) and pipe.wire_bytes - sent == other.wire_bytes
        number += 3


@pytest.mark.parametrize("link, word", [(SLOW, "auto:memory"), (FAST, "bf16")])
def test_a_resumed_run_knows_where_it_pays(link, word, small_is_released, looks_early, tmp_path):
    """It goes on bit for bit, keeps that where nobody looks, and looks again where links change."""
    pipe = built(trained(lms.llama()), 3, link=link)
    for number in range(6):
        memory_step(pipe, number)
    pipe.save(tmp_path / "run")
    resumed = built(trained(lms.llama()), 3)
    resumed.load(tmp_path / "run")
    assert of_cuts(resumed) == of_cuts(pipe)
    again = [torch.stack([memory_step(each, k) for k in range(6, 12)]) for each in (pipe, resumed)]
    assert same_bits(*again) and of_cuts(resumed) == of_cuts(pipe)
    assert ("bf16 (as in the checkpoint)" in resumed.report(show=False)["auto"]) == (word == "bf16")
    other = built(trained(lms.llama()), 3, link=FAST if link is SLOW else SLOW)
    other.load(tmp_path / "run")
    for number in range(6, 16):
        memory_step(other, number)
    assert of_cuts(other) != of_cuts(pipe)


@pytest.mark.parametrize(
    "link",
    [
        "100",
        "100 MB/s",
        "100 Mbit/s 20 ms",
        "0 Mbit/s",
        "1.2.3 Mbit/s",
        "-5 Mbit/s",
        "1 Mbit/s, 3",
        "",
    ],
)
def test_a_link_that_is_none_is_refused(link):
    with pytest.raises(ValueError, match=r"expected a rate and a latency one way.*8 Mbit/s"):
        mlp_with(link=link)


@pytest.mark.parametrize(
    "link, expected",
    [
        ("100 Mbit/s, 20 ms", (100.0, 0.02)),
        ("1.5 Gbit/s", (1500.0, 0.0)),
        ("64kbit/s,1s", (0.064, 1.0)),
        ("9600 bit/s, 150 us", (0.0096, 0.00015)),
    ],
)
def test_links_are_read(link, expected):
    assert dial.link_of(link) == pytest.approx(expected)


def test_a_link_without_auto_is_refused():
    with pytest.raises(
        ValueError, match="link='1 Gbit/s' with act_comp='auto:relu'.*leave link out"
    ):
        mlp_with(**dict.fromkeys(BOTH, "auto:relu"), link="1 Gbit/s")
    with pytest.raises(TypeError, match="link=100: expected a string"):
        mlp_with(link=100)
