"""Means of tokens that links learn: what is left is sent, and both ends have the same ones."""

import copy

import pytest
import torch
from laws import module_of
from methods import same_bits
from models import adamw, assert_same_state, links_state
from torch import Tensor

import mpcomp
from mpcomp import ECSQ, KLT, Identity, Link, Quantize, TensorMeta, TokenMean, parse
from mpcomp.core.step import Step
from mpcomp.links.build import method_of

WIDTH, ROWS, POSITIONS, VOCABULARY = 16, 4, 50, 20
INNER = ECSQ(0.1)
METHOD = TokenMean(INNER)
WITH_BASIS = TokenMean(KLT(ECSQ(0.1, centre=True)))


def text(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (ROWS, POSITIONS), generator=generator)


def activations(seed: int, noise: float = 0.1) -> Tensor:
    """A vector for each token, and noise."""
    table = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(77))
    generator = torch.Generator().manual_seed(1000 + seed)
    return table[text(seed)] + noise * torch.randn(ROWS, POSITIONS, WIDTH, generator=generator)


def step_of(seed: int, train: bool = True, **kwargs) -> Step:
    return Step(seed, train, tokens=(text(seed),), **kwargs)


def link_of(method=METHOD) -> Link:
    return Link(method, boundary=0, direction="act")


def carry(link: Link, x: Tensor, step: Step, *, keep: bool = True) -> tuple[int, Tensor]:
    """Sends a tensor; the bytes that took, and what arrives."""
    message = link.encode(x, step, 0)
    arrived = link.decode(message, TensorMeta.of(x), step, 0)
    if step.train:
        link.commit() if keep else link.discard()
    return message.numel(), arrived


def means(link: Link) -> dict[str, dict[int, Tensor]]:
    """The mean of each token, by role."""
    state = link.state_dict()
    found = {}
    for role in ("sender", "receiver"):
        part = f"{role}.{WIDTH}.means"
        rows = zip(state[f"{part}.tokens"].tolist(), state[f"{part}.means"], strict=True)
        found[role] = dict(rows)
    return found


@pytest.mark.parametrize("method", [METHOD, WITH_BASIS], ids=str)
def test_less_is_sent_at_the_same_error(method):
    """A tenth of the energy is left, so a third of the step is as fine."""
    link, plain = link_of(method), link_of(ECSQ(0.01))
    for i in range(12):
        x = activations(i)
        sent, arrived = carry(link, x, step_of(i))
        without, as_it_is = carry(plain, x, step_of(i))
    assert sent < 0.75 * without
    assert (arrived - x).norm() < 1.1 * (as_it_is - x).norm()
    held = means(link)
    assert held["sender"].keys() == held["receiver"].keys() == set(range(VOCABULARY))
    assert all(same_bits(held["sender"][i], held["receiver"][i]) for i in range(VOCABULARY))


def test_however_little_is_left_it_arrives():
    """An error relative to the tensor would leave nothing of it: see `TokenMean`."""
    link = link_of(WITH_BASIS)
    for i in range(30):
        carry(link, activations(i, noise=0.0), step_of(i))
    means_alone = activations(30, noise=0.0)
    x = activations(30, noise=1e-3)
    _, arrived = carry(link, x, step_of(30, train=False))
    little = x - means_alone
    assert ((arrived - means_alone) - little).norm() < 0.2 * little.norm()


def test_means_are_of_what_arrived():
    """Against the formula, token by token: all occurrences of a step weigh alike."""
    link, expected, occurrences = link_of(), {}, dict.fromkeys(range(VOCABULARY), 0)
    for i in range(10):
        x, step = activations(i), step_of(i)
        before = means(link) if i else {"sender": {}}
        _, arrived = carry(link, x, step)
        for token in text(i).unique().tolist():
            of_token = arrived[text(i) == token]
            occurrences[token] += len(of_token)
            weight = min(1.0, len(of_token) / min(occurrences[token], 64))
            former = expected.get(token, torch.zeros(WIDTH))
            expected[token] = former + weight * (of_token.mean(0) - former)
        assert before["sender"].keys() <= means(link)["sender"].keys()
    assert max(occurrences.values()) > 64
    for token, mean in means(link)["receiver"].items():
        assert torch.allclose(mean, expected[token], atol=1e-5)


def test_microbatches_of_a_step_know_nothing_of_each_other():
    """And count alike, in whatever order they come."""
    orders = ((0, 1), (1, 0))
    links = [link_of(), link_of()]
    step = Step(0, True, tokens=(text(0), text(1)), num_microbatches=2)
    for link, order in zip(links, orders, strict=True):
        fresh = {m: link_of().encode(activations(m), step, m) for m in order}
        for m in order:
            message = link.encode(activations(m), step, m)
            assert same_bits(message, fresh[m])
            link.decode(message, TensorMeta.of(activations(m)), step, m)
        link.commit()
    for role in ("sender", "receiver"):
        assert all(
            same_bits(mean, means(links[1])[role][token])
            for token, mean in means(links[0])[role].items()
        )


@pytest.mark.parametrize("method", [METHOD, WITH_BASIS], ids=str)
def test_discarded_steps_leave_no_trace(method):
    link, straight = link_of(method), link_of(method)
    for i in range(5):
        carry(link, 3 * activations(50 + i), step_of(50 + i), keep=False)
        assert (
            carry(link, activations(i), step_of(i))[0]
            == carry(straight, activations(i), step_of(i))[0]
        )
        assert_same_state({"": link.state_dict()}, {"": straight.state_dict()})


@pytest.mark.parametrize("method", [METHOD, WITH_BASIS], ids=str)
def test_evaluation_uses_them_and_learns_nothing(method):
    link = link_of(method)
    x = activations(30)
    _, before = carry(link, x, step_of(30, train=False))
    assert not link.state_dict()
    for i in range(8):
        carry(link, activations(i), step_of(i))
    state = copy.deepcopy(link.state_dict())
    _, after = carry(link, x, step_of(30, train=False))
    assert (after - x).norm() < 0.3 * (before - x).norm()
    assert_same_state({"": link.state_dict()}, {"": state})


@pytest.mark.parametrize("method", [METHOD, WITH_BASIS], ids=str)
def test_what_is_padded_is_not_learned_from(method):
    links = [link_of(method), link_of(method)]
    valid = torch.ones(ROWS, POSITIONS, dtype=torch.bool)
    valid[1, 5:] = valid[2, 10:] = False
    for i in range(6):
        x = activations(i)
        other = torch.where(valid[:, :, None], x, 50.0)
        unpadded = copy.deepcopy(links[0]).encode(x, step_of(i), 0).numel()
        sent = [
            carry(link, each, step_of(i, valid=(valid,)))
            for link, each in zip(links, (x, other), strict=True)
        ]
        assert sent[0][0] == sent[1][0] and same_bits(sent[0][1], sent[1][1])
        assert not sent[0][1][~valid].any()
        # Nor does it take bytes, whatever the mean of the token that pads it.
        assert sent[0][0] < 0.92 * unpadded
    assert_same_state({"": links[0].state_dict()}, {"": links[1].state_dict()})


def test_state_goes_to_a_fresh_link_and_on_bit_for_bit():
    link, other = link_of(WITH_BASIS), link_of(WITH_BASIS)
    for i in range(6):
        carry(link, activations(i), step_of(i))
    devices = dict.fromkeys(("sender", "receiver"), torch.device("cpu"))
    other.load_state_dict(copy.deepcopy(link.state_dict()), devices)
    for i in range(6, 10):
        (sent, arrived), (again, also) = (
            carry(each, activations(i), step_of(i)) for each in (link, other)
        )
        assert sent == again and same_bits(arrived, also)
    assert_same_state({"": link.state_dict()}, {"": other.state_dict()})


def test_ends_with_different_means_are_an_error():
    link, other = link_of(), link_of()
    carry(link, activations(0), step_of(0))
    state = {name: value for name, value in link.state_dict().items() if name.startswith("sender")}
    other.load_state_dict(state, {"sender": torch.device("cpu")})
    with pytest.raises(RuntimeError, match="the two ends disagree"):
        carry(other, activations(1), step_of(1))


def test_what_would_not_shrink_goes_as_it_is():
    """And nothing is learned from it."""
    link = link_of(TokenMean(Quantize(8, scale=1)))
    with pytest.warns(UserWarning, match="would not shrink"):
        _, arrived = carry(link, activations(0).bfloat16(), step_of(0))
    assert same_bits(arrived, activations(0).bfloat16()) and not link.state_dict()


def test_settings():
    assert parse("tokenmean+klt+step:0.1:centre=true") == WITH_BASIS
    assert str(METHOD) == "tokenmean+step:0.1"
    with pytest.raises(ValueError, match="gains nothing"):
        TokenMean(Identity())
    with pytest.raises(TypeError, match="neither round nor inside feedback"):
        TokenMean(parse("ef+topk:0.1"))
    with pytest.raises(ValueError, match="such methods are for cuts"):
        method_of("tie_comp", "tokenmean+step:0.5")
    with pytest.raises(ValueError, match="no dict with input_ids"):
        link_of().check_step(Step(0, True), [4])
    with pytest.raises(ValueError, match=r"shape \[4, 16\] for tokens of shape \[4, 50\]"):
        link_of().encode(torch.randn(4, WIDTH), step_of(0), 0)


# -- pipelines ------------------------------------------------------------------------------------


lm_runs = module_of("distributed/lm_runs.py")

RUNS = [
    lm_runs.lm_run("gpt2", act=WITH_BASIS, grad=METHOD, steps=4),
    lm_runs.lm_run("gpt2 left", 4, "ZBVZeroBubble", act=METHOD, grad="topk:0.3", steps=3),
]


def test_two_ranks_are_one(ranks):
    """Padded on either side, with a short batch, and two cuts of one rank."""
    pytest.importorskip("transformers")
    lm_runs.check(ranks, 2, RUNS)


def pipe_of(**kwargs) -> mpcomp.Pipeline:
    torch.manual_seed(0)
    return mpcomp.pipeline(
        lm_runs.gpt2(), 2, split=3, act_comp=WITH_BASIS, grad_comp="step:0.5", **kwargs
    )


def batch_of(seed: int) -> dict[str, Tensor]:
    batch, labels = lm_runs.text(6, seed)
    return {**batch, "labels": labels}


def train(pipe: mpcomp.Pipeline, optimizer: torch.optim.Optimizer, first: int, last: int) -> Tensor:
    losses = []
    for seed in range(first, last):
        losses.append(pipe.forward_backward(batch_of(seed)))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


def test_going_on_is_as_if_never_stopped(tmp_path):
    """And generation goes by the means too, at each token."""
    pytest.importorskip("transformers")
    pipe, other = pipe_of(), pipe_of()
    optimizer, again = adamw(pipe), adamw(other)
    train(pipe, optimizer, 0, 3)
    pipe.save(tmp_path / "saved", optimizer=optimizer)
    losses = train(pipe, optimizer, 3, 6)
    train(other, again, 6, 8)
    other.load(tmp_path / "saved", optimizer=again)
    assert same_bits(train(other, again, 3, 6), losses)
    assert_same_state(links_state(other), links_state(pipe))
    prompt = lm_runs.text(2, 9, "")[0]["input_ids"][:, :5]
    assert same_bits(*(each.generate(prompt, max_new_tokens=4) for each in (pipe, other)))


def test_state_bytes_say_what_is_kept():
    pytest.importorskip("transformers")
    pipe = pipe_of()
    said = pipe.state_bytes(batch_of(0))
    entries = [entry for entry in said["per_link"] if entry["location"] == "cpu"]
    assert {entry["rows"] for entry in entries} == {lm_runs.VOCABULARY}
    assert {entry["direction"] for entry in entries} == {"act"} and len(entries) == 4
    train(pipe, adamw(pipe), 0, 40)
    held = [
        value.nbytes
        for link in links_state(pipe).values()
        for name, value in link.items()
        if ".means." in name
    ]
    assert sum(held) == sum(entry["bytes"] for entry in entries)


def test_a_batch_without_tokens_is_refused():
    pipe = mpcomp.pipeline(
        torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)), 1, split=2,
        act_comp="tokenmean+step:0.3", loss_fn=torch.nn.functional.cross_entropy,
    )  # fmt: skip
    with pytest.raises(ValueError, match="boundary 0 act.*no dict with input_ids"):
        pipe.forward_backward(torch.randn(2, 3), torch.tensor([0, 1]))
