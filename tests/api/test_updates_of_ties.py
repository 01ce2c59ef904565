"""Updates within a step where both uses of a tied weight are on one rank: which versions they see.

The weight moves by the gradient of either use as soon as that is complete. A plain model, by hand
and in one process, is given weights as old as the stages' are, and gradients as late; it has to
come to the same bits.
"""

import copy
import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lms import language_model
from methods import same_bits
from torch import Tensor, nn
from torch.func import functional_call

import mpcomp

VOCABULARY, WIDTH = 23, 8
#: Updates that the weights of each stage lack, by the number of ranks: the last is on the first.
LAGS = {2: (1, 1, 0), 3: (1, 2, 1, 0), 4: (2, 3, 2, 1, 0), 5: (2, 4, 3, 2, 1, 0)}
#: Updates that do not wait for the first stage's gradients of their microbatches.
LATE = {2: 1, 3: 2, 4: 2, 5: 3}


def chain(blocks: int = 5, *, bias: bool = True) -> nn.Sequential:
    """Tokens to logits of the next one; embedding and head are one weight."""
    parts: OrderedDict[str, nn.Module] = OrderedDict(embedding=nn.Embedding(VOCABULARY, WIDTH))
    for i in range(blocks):
        parts[f"block{i}"] = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11), nn.GELU(), nn.Linear(11, WIDTH)
        )
    parts["head"] = nn.Linear(WIDTH, VOCABULARY, bias=bias)
    model = nn.Sequential(parts)
    model.head.weight = model.embedding.weight
    return model


def frozen_norms() -> nn.Sequential:
    model = chain()
    for block in list(model)[1:-1]:
        block[0].requires_grad_(False)
    return model


def frozen_tie() -> nn.Sequential:
    """A tied weight that rests; the head's bias trains."""
    model = chain()
    model.embedding.weight.requires_grad_(False)
    return model


class Temperature(nn.Module):
    """A loss with a parameter of its own, which is in the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.t = nn.Parameter(torch.tensor(0.5))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return token_loss(output * self.t.exp(), target)


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def tokens(count: int, seed: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCABULARY, (count, 7), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def text(count: int, seed: int) -> tuple[Any, Tensor]:
    ids = torch.randint(3, 53, (count, 7), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids}, ids


@dataclass
class Case:
    """A model, how it is cut, and how it is trained."""

    make: Any
    ranks: int
    of_each: int = 1
    updates: int = 9
    split: Any = None
    loss: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    clip: float | None = None
    nadam: bool = False

    @property
    def chunks(self) -> int:
        return self.updates * self.of_each

    def batch(self, seed: int) -> tuple[Any, Tensor]:
        return (tokens if self.loss is not None else text)(2 * self.chunks, seed)

    def pipe(self, model: nn.Module) -> mpcomp.Pipeline:
        options = {"split": self.split or self.ranks, **self.options}
        return mpcomp.pipeline(model, self.chunks, loss_fn=self.loss, **options)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        if self.nadam:
            return torch.optim.NAdam(parameters, lr=1e-2, betas=(0.9, 0.999))
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


CASES = {
    "chain": Case(chain, 2, loss=token_loss),
    "several microbatches": Case(chain, 3, of_each=2, loss=token_loss),
    "four ranks": Case(chain, 4, loss=token_loss, nadam=True),
    "five ranks": Case(chain, 5, of_each=2, updates=14, loss=token_loss),
    "fewer updates than the lag": Case(chain, 5, updates=3, loss=token_loss),
    "clipped by stage": Case(chain, 3, loss=token_loss, clip=0.3, nadam=True),
    "recomputed": Case(chain, 3, of_each=2, loss=token_loss, options={"recompute": True}),
    "some frozen": Case(frozen_norms, 2, loss=token_loss),
    "weight frozen": Case(frozen_tie, 3, loss=token_loss),
    "gpt2": Case(lambda: language_model("gpt2"), 2, of_each=2),
    "llama": Case(lambda: language_model("llama", tie_word_embeddings=True), 3, nadam=True),
}


def train(pipe: mpcomp.Pipeline, case: Case, seeds: Any, **options: Any) -> list[Tensor]:
    """Losses of calls, each with all of its updates."""
    optimizer = options.get("optimizer") or case.optimizer([*pipe.parameters()])

    def update() -> None:
        for stage in pipe.stages if case.clip is not None else ():
            nn.utils.clip_grad_norm_(stage.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()

    return [
        pipe.forward_backward(*case.batch(seed), update=update, updates=case.updates)
        for seed in seeds
    ]


def by_hand(
    model: nn.Module,
    case: Case,
    stages: list[list[str]],
    seeds: Any,
    lags: tuple[int, ...],
    late: int,
) -> list[Tensor]:
    """The same in plain torch: a whole model, of which each name has the weights of its stage.

    The first stage's gradients go to the update that is ``late`` ones behind their own, or to the
    last one, the others' to their own.
    """
    lag_of = {name: lag for names, lag in zip(stages, lags, strict=True) for name in names}
    optimizer = case.optimizer(p for p in model.parameters() if p.requires_grad)
    loss_fn = case.loss or mpcomp.CausalLMLoss()
    found = []
    for seed in seeds:
        batch, target = case.batch(seed)
        split = [
            {"input_ids": part} if isinstance(batch, dict) else part
            for part in (batch["input_ids"] if isinstance(batch, dict) else batch).chunk(
                case.chunks
            )
        ]
        parts = list(zip(split, target.chunk(case.chunks), strict=True))
        versions, total = [copies(model)], None
        gathered: list[dict[str, Tensor]] = [{} for _ in range(case.updates)]
        for t in range(case.updates):
            old = {
                name: versions[max(0, t - lag_of[name])][name].clone().requires_grad_()
                for name in versions[0]
            }
            for part, wanted in parts[t * case.of_each : (t + 1) * case.of_each]:
                args, kwargs = ((), part) if isinstance(part, dict) else ((part,), {})
                output = functional_call(model, old, args, kwargs, tie_weights=False)
                output = getattr(output, "logits", output)
                loss = loss_fn(output, wanted) * (1 / case.of_each)
                loss.backward()
                own = loss.detach() * (1 / case.updates)
                total = own if total is None else total + own
                for name, weight in old.items():
                    taken = min(t + late, case.updates - 1) if name in stages[0] else t
                    add(gathered[taken], name, weight.grad)
                    weight.grad = None
            for name, parameter in named(model):
                if (grad := gathered[t].get(name)) is not None:
                    parameter.grad = grad if parameter.grad is None else parameter.grad + grad
            for names in stages if case.clip is not None else ():
                parameters = dict(model.named_parameters())  # the tied one with the first stage
                nn.utils.clip_grad_norm_(
                    [parameters[name] for name in names if name in parameters], case.clip
                )
            optimizer.step()
            optimizer.zero_grad()
            versions.append(copies(model))
        found.append(total)
    return found


def add(sums: dict[str, Tensor], name: str, grad: Tensor) -> None:
    sums[name] = sums[name] + grad if name in sums else grad


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Trained parameters, the tied one under both names."""
    every = model.named_parameters(remove_duplicate=False)
    return [(name, parameter) for name, parameter in every if parameter.requires_grad]


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in named(model)}


@pytest.mark.parametrize("name", CASES)
def test_a_plain_model_with_weights_as_old_has_the_same_bits(name):
    """Losses of two calls and all weights; not those of the newest weights, or of another lag."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make()
    plain = copy.deepcopy(model)
    pipe = case.pipe(model)
    assert not pipe.ties and len(pipe.shared_weights) == 1 and len(pipe.stages) == case.ranks + 1
    stages = [
        [n for n, _ in stage.named_parameters(remove_duplicate=False)] for stage in pipe.stages
    ]
    lags, late = LAGS[case.ranks], LATE[case.ranks]
    losses, seeds = train(pipe, case, (0, 1)), (0, 1)
    expected = by_hand(copied := copy.deepcopy(plain), case, stages, seeds, lags, late)
    assert all(map(same_bits, losses, expected))
    state = pipe.state_dict()
    for key, value in copied.state_dict().items():
        assert same_bits(state[key], value), key
    others = [(tuple(0 for _ in lags), late), ((*lags[:-1], 1), late), (lags, 0)]
    for old, later in others:
        losses = by_hand(copy.deepcopy(plain), case, stages, seeds, old, later)
        assert not all(map(same_bits, losses, expected))


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("name", ["chain", "four ranks", "recomputed", "some frozen", "gpt2"])
def test_one_update_is_a_step(name, chunks):
    """Bit for bit, and of one microbatch the plain model's."""
    of = CASES[name]
    case = Case(of.make, of.ranks, chunks, 1, loss=of.loss, options=of.options, nadam=of.nadam)
    ends = []
    for within in (True, False):
        torch.manual_seed(0)
        model = case.make()
        plain = copy.deepcopy(model)
        pipe = case.pipe(model)
        optimizer = case.optimizer([*pipe.parameters()])
        if within:
            losses = train(pipe, case, range(3), optimizer=optimizer)
        else:
            losses = []
            for seed in range(3):
                losses.append(pipe.forward_backward(*case.batch(seed)))
                optimizer.step()
                optimizer.zero_grad()
        ends.append((losses, pipe.state_dict()))
    if chunks == 1:
        optimizer, losses = case.optimizer(p for p in plain.parameters() if p.requires_grad), []
        loss_fn = case.loss or mpcomp.CausalLMLoss()
        for seed in range(3):
            batch, target = case.batch(seed)
            output = plain(**batch).logits if isinstance(batch, dict) else plain(batch)
            losses.append(loss_fn(output, target))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append((losses, plain.state_dict()))
    (losses, state), *others = ends
    for found, weights in others:
        assert all(map(same_bits, losses, found))
        assert all(same_bits(state[key], value) for key, value in weights.items())


def test_a_checkpoint_between_calls_goes_on_bit_for_bit(tmp_path):
    for i, name in enumerate(("several microbatches", "four ranks", "weight frozen", "gpt2")):
        case = CASES[name]
        case = Case(
            case.make, case.ranks, case.of_each, case.updates, loss=case.loss, nadam=True,
            options={"act_comp": "ef21+topk:0.3", "grad_comp": "ef+topk:0.3"},
        )  # fmt: skip
        torch.manual_seed(0)
        pipe = case.pipe(case.make())
        optimizer = case.optimizer([*pipe.parameters()])
        train(pipe, case, (0,), optimizer=optimizer)
        pipe.save(tmp_path / str(i), optimizer=optimizer)
        losses = train(pipe, case, (1, 2), optimizer=optimizer)
        again = case.pipe(case.make())
        other = case.optimizer([*again.parameters()])
        again.load(tmp_path / str(i), optimizer=other)
        assert all(map(same_bits, losses, train(again, case, (1, 2), optimizer=other)))
        state = again.state_dict()
        assert all(same_bits(state[key], value) for key, value in pipe.state_dict().items())


def test_a_loss_of_its_own_parameters_is_as_old_as_the_last_stage():
    """Its gradients and its weights; two ranks are asked in `test_ranks_updates`."""
    torch.manual_seed(0)
    case = Case(chain, 2, loss=Temperature(), updates=6)
    model = chain()
    plain, own = copy.deepcopy(model), copy.deepcopy(case.loss)
    pipe = case.pipe(model)
    optimizer = torch.optim.SGD([*pipe.parameters(), *case.loss.parameters()], lr=0.1)
    (loss,) = train(pipe, case, (0,), optimizer=optimizer)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.loss_fn = plain, own

        def forward(self, batch: Any) -> Tensor:
            return self.loss_fn(self.model(batch[0]), batch[1])

    whole = Whole()
    lag_of = {}
    for stage, lag in zip(pipe.stages, LAGS[2], strict=True):
        for name, _ in stage.named_parameters(remove_duplicate=False):
            lag_of[name if name.startswith("loss_fn.") else f"model.{name}"] = lag
    batch, target = case.batch(0)
    versions, optimizer, total = [copies(whole)], torch.optim.SGD(whole.parameters(), lr=0.1), 0.0
    first = {f"model.{name}" for name, _ in pipe.stages[0].named_parameters()}
    gathered: list[dict[str, Tensor]] = [{} for _ in range(6)]
    for t, part in enumerate(zip(batch.chunk(6), target.chunk(6), strict=True)):
        old = {n: versions[max(0, t - lag_of[n])][n].clone().requires_grad_() for n in versions[0]}
        of_part = functional_call(whole, old, (part,), tie_weights=False)
        of_part.backward()
        total = total + of_part.detach() * (1 / 6)
        for name, weight in old.items():
            add(gathered[min(t + LATE[2], 5) if name in first else t], name, weight.grad)
        for name, parameter in named(whole):
            if (grad := gathered[t].get(name)) is not None:
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        optimizer.step()
        optimizer.zero_grad()
        versions.append(copies(whole))
    assert same_bits(loss, total) and same_bits(case.loss.t, own.t)
    assert same_bits(pipe.state_dict()["head.weight"], plain.head.weight)


def gradients_of(pipe: mpcomp.Pipeline) -> dict[str, Tensor]:
    """Copies of the gradients that there are."""
    named = pipe.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def test_gradients_that_an_update_leaves_go_to_the_next_one():
    """An update that steps every second time, and zeros that stay, are by sums of both."""
    ends = []
    for every in (1, 2):
        torch.manual_seed(0)
        pipe = mpcomp.pipeline(chain(), 8, split=2, loss_fn=token_loss)
        found, number = [], 0

        def update(pipe=pipe, found=found, every=every) -> None:
            nonlocal number
            number += 1
            if number % every == 0:
                found.append(gradients_of(pipe))
                pipe.zero_grad(set_to_none=False)

        pipe.forward_backward(*tokens(16, 0), update=update, updates=8)
        ends.append(found)
    each, pairs = ends
    assert len(each) == 8 and len(pairs) == 4
    for i, pair in enumerate(pairs):
        for name, value in pair.items():
            torch.testing.assert_close(value, each[2 * i].get(name, 0) + each[2 * i + 1][name])
    assert each[0].keys() >= {"embedding.weight", "head.bias"}
    assert each[0].keys() < each[1].keys()  # the first stage's own ones come an update later


def test_what_was_gathered_before_the_call_goes_to_the_first_update():
    torch.manual_seed(0)
    pipe = mpcomp.pipeline(chain(), 4, split=2, loss_fn=token_loss)
    pipe.forward_backward(*tokens(8, 1))
    before = gradients_of(pipe)
    found = []

    def update() -> None:
        found.append(gradients_of(pipe))
        pipe.zero_grad()

    pipe.forward_backward(*tokens(8, 0), update=update, updates=4)
    with_none = found[0]
    found.clear()
    pipe.forward_backward(*tokens(8, 0), update=update, updates=4)
    for name, value in with_none.items():
        torch.testing.assert_close(value, before[name] + found[0].get(name, 0))
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_an_update_that_fails_gives_back_what_there_was():
    pipe = mpcomp.pipeline(chain(), 4, split=2, loss_fn=token_loss)
    x, y = tokens(8, 0)

    def update() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        pipe.forward_backward(x, y, update=update, updates=4)
    pipe.zero_grad()
    loss = pipe.forward_backward(x, y)
    torch.testing.assert_close(loss, token_loss(pipe.merge()(x), y))
    assert math.isfinite(float(loss))


def test_copies_on_two_ranks_are_refused():
    pipe = mpcomp.pipeline(chain(), 4, split=2, loss_fn=token_loss, ties="apart")
    with pytest.raises(ValueError, match=r"copies of embedding.weight.*ties='together'"):
        pipe.forward_backward(*tokens(8, 0), update=lambda: None, updates=2)
