"""The dial: what ``auto`` becomes at each cut, and why.

Ranks must come to the same without a word between them, so only what all of them hold counts: the
modules before a cut, the model's weights, and whether a step's batch has sample ids.

* Behind a ReLU: ``auto:relu``. The modules say so (`stages.is_behind_relu`).
* A language model from random weights: ``auto:scratch``. Initialization gives every norm one number
  for all of its scales, and the first step of an optimizer moves them apart. A name, as models of
  `from_pretrained` have, shows less: `from_config` gives the same one to random weights. Without
  any such scales nothing shows that the model was trained, and ``auto:scratch`` has finer steps.
* A trained one below `RELEASED` parameters: ``auto:scratch`` too.
* A trained one from there on: ``auto:memory`` if its first batch has sample ids, else plain
  ``auto``. Until it is trained it sends what was measured at inference. A budget that
  ``auto:memory`` cannot keep is refused at once, unless all weights are frozen.
* Anything else: plain ``auto``.

Once steps have been timed, cuts at which that does not pay send bf16 (`mpcomp.pilot.paying`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import nn

import stages as staging
from mpcomp.comm.handshake import step_name
from mpcomp.comm.mesh import Mesh
from mpcomp.core.context import Step
from mpcomp.engines.base import Engine
from mpcomp.links.auto import AUTO, INFERENCE, Words
from mpcomp.links.boundary import Boundary
from mpcomp.links.budget import percent_of, spelt
from mpcomp.links.build import Methods, given_at, method_of
from mpcomp.pilot.paying import Paying, sends_bf16
from mpcomp.plan.network import link_of

__all__ = ["RELEASED", "Dial"]

#: Parameters from which on a trained language model is taken for a released one. `auto:memory` was
#: measured with 135 million (docs/results/smollm2_finetune.md), and costs a small model of one's
#: own 18 % of perplexity (docs/results/wikitext.md). What lies between was not measured.
RELEASED: Final = 100_000_000

#: In place of a word, where that does not pay.
_BF16: Final = "bf16"
_ARGUMENTS: Final = ("act_comp", "grad_comp")


class Dial:
    """The choices of ``auto`` at the cuts of one pipeline.

    Args:
        cut: all stages, on every rank, with their weights if the model has them.
        act_comp, grad_comp, budget, link: arguments of `mpcomp.pipeline`.
        reads_weights: whether weights on "meta" are read from files afterwards.

    Attributes:
        words: what each word stands for, at each cut.
        is_open: whether the first training step has still to show something.

    Raises:
        ValueError: a budget without a word, or one that was not measured; a link without ``auto``.
    """

    def __init__(
        self,
        cut: Sequence[staging.Stage],
        *,
        act_comp: Methods,
        grad_comp: Methods,
        budget: str | float | None,
        link: str | None,
        reads_weights: bool,
    ) -> None:
        names = [stage.block_names[-1] for stage in cut[:-1]]
        given = {"act_comp": act_comp, "grad_comp": grad_comp}
        at_cuts = zip(*(given_at(name, each, names) for name, each in given.items()), strict=True)
        self._given = [tuple(each) for each in at_cuts]
        self._budget = None if budget is None else percent_of(budget)
        self._link = None if link is None else link_of(link)
        self._paying: Paying | None = None
        self._reasons: dict[str, str] = {}
        #: The cut before a head with a stage of its own; None where there is none.
        self._before_head = len(names) - 1 if cut[0].together else None
        self._choices = self._chosen(cut, reads_weights)
        self.is_open = INFERENCE in self._choices
        self.words = [self._words(i) for i in range(len(names))]
        if self.is_open and any(each.requires_grad for each in cut[0].original.parameters()):
            self._check_training()
        if self._budget is not None and not any(self.words):
            raise ValueError(
                f"budget={budget!r} with act_comp={act_comp!r} and grad_comp={grad_comp!r}: "
                "a budget moves the steps of a word; pass 'auto' for both, or leave budget out"
            )
        if self._link is not None and not any(self._choices):
            raise ValueError(
                f"link={link!r} with act_comp={act_comp!r} and grad_comp={grad_comp!r}: "
                "it is for 'auto', which compresses where that pays; pass 'auto' for both, or "
                "leave link out"
            )

    def _chosen(self, cut: Sequence[staging.Stage], reads_weights: bool) -> list[str]:
        """The word of each cut; empty where nothing was asked."""
        asked = ["auto" in each for each in self._given]
        if not any(asked):
            return [""] * len(asked)
        otherwise = _word_of_model(cut, reads_weights)
        found = []
        for stage, wanted in zip(cut, asked, strict=False):
            word = ""
            if wanted:
                behind = staging.is_behind_relu(stage)
                word, why = ("auto:relu", "behind a ReLU") if behind else otherwise
                self._reasons[word] = why
            found.append(word)
        return found

    def _words(self, cut: int) -> Words:
        """The methods of all words that are used at a cut."""
        words = {each for each in self._given[cut] if isinstance(each, str) and each in AUTO}
        return {
            each: self._spelt(self._choices[cut] if each == "auto" else each, cut) for each in words
        }

    def _spelt(self, word: str, cut: int) -> Mapping[str, str]:
        """The methods that a word stands for at a cut."""
        return spelt(word, self._budget, before_head=cut == self._before_head)

    def _check_training(self) -> None:
        """Refuses at once a budget that no first training step could keep."""
        try:
            self._spelt("auto:memory", 0)
        except ValueError as error:
            raise ValueError(f"{error}; for inference alone model.requires_grad_(False)") from None

    def mark(self, boundaries: Sequence[Boundary]) -> None:
        """Notes in the links what was chosen for them."""
        for boundary, given, word in zip(boundaries, self._given, self._choices, strict=True):
            for link, each in zip(boundary.links, given, strict=True):
                link.chosen = word if each == "auto" else ""

    def settle(self, boundaries: Sequence[Boundary], step: Step) -> None:
        """Before a training step, chooses what is open by whether its batch has sample ids.

        Raises:
            ValueError: the budget was not measured for that.
        """
        if not (self.is_open and step.train):
            return
        again = bool(step.sample_ids)
        word, ids = ("auto:memory", "with") if again else ("auto", "without")
        self._reasons[word] = f"{self._reasons[INFERENCE]}, {ids} sample_ids"
        for i, (boundary, given) in enumerate(zip(boundaries, self._given, strict=True)):
            if self._choices[i] != INFERENCE:
                continue
            words = {"auto": self._spelt(word, i)}
            for argument, link, each in zip(_ARGUMENTS, boundary.links, given, strict=True):
                if each == "auto" and link.chosen != word:
                    link.become(method_of(argument, each, words), word)
            for link, other in (boundary.links, boundary.links[::-1]):
                link.method.check_beside(other.method, i)

    def agree(self, mesh: Mesh, step: Step) -> None:
        """Before a training step, finds out whether all replicas have come to the same.

        Raises:
            ValueError: some ranks' batches have sample ids and others' have none; on all ranks.
        """
        if not self.asks(mesh):
            return
        found = mesh.all_gather([bool(step.sample_ids)], "whether batches have sample_ids")
        have = [rank for rank, (given,) in enumerate(found) if given]
        if 0 < len(have) < len(found):
            raise ValueError(
                f"ranks {', '.join(map(str, have))} were given sample_ids in {step_name(step)} and "
                "the others were not, so 'auto' is not the same for all: give them on every rank "
                "or on none, or name methods"
            )

    def asks(self, mesh: Mesh) -> bool:
        """Whether replicas must tell each other before the next training step."""
        return self.is_open and mesh.num_replicas > 1

    def watch(self, engine: Engine, boundaries: Sequence[Boundary], warmup_steps: int) -> None:
        """Looks at the steps to come, to see where compression pays."""
        self._paying = Paying(engine, boundaries, self._link, warmup_steps)

    def look(
        self,
        boundaries: Sequence[Boundary],
        step: Step,
        times: Sequence[tuple[float, float]],
        *,
        tells: bool,
    ) -> None:
        """After a training step, changes methods where it is time, and says so.

        Args:
            boundaries: the cuts.
            step: that has ended.
            times: of the last steps on this rank: seconds, and of these waiting for messages.
            tells: whether this rank tells the user.
        """
        if self._paying is not None and self._paying.after_step(step, times):
            self.tell(boundaries, tells=tells, stacklevel=7)  # up to who calls forward_backward

    def state_dict(self) -> dict[str, Any]:
        """Measurements that say where compression pays."""
        return {} if self._paying is None else self._paying.state_dict()

    def close(self, boundaries: Sequence[Boundary], *, tells: bool) -> None:
        """Ends the choice, once a step has been trained by it.

        Args:
            boundaries: the cuts.
            tells: whether this rank tells the user.
        """
        if self.is_open:
            self.is_open = False
            self.tell(boundaries, tells=tells, stacklevel=8)  # up to who calls forward_backward

    def go_on(
        self,
        boundaries: Sequence[Boundary],
        before: Sequence[str],
        state: Mapping[str, Any],
    ) -> None:
        """Takes note of what a checkpoint's run had chosen.

        Args:
            boundaries: the cuts.
            before: of each link, its method before the checkpoint was loaded.
            state: as of `state_dict`; empty of runs that had measured nothing.
        """
        if self._paying is not None:
            self._paying.load_state_dict(state)
        links = [link for boundary in boundaries for link in boundary.links]
        for link, old in zip(links, before, strict=True):
            if str(link.method) != old:
                self._reasons[link.chosen] = "as in the checkpoint"
                self._budget = None  # whatever it was there
        self.is_open = any(link.chosen == INFERENCE for link in links)

    def tell(self, boundaries: Sequence[Boundary], *, tells: bool, stacklevel: int = 4) -> None:
        """Says once what was chosen."""
        if tells and (said := self.sentence(boundaries)):
            warnings.warn(said, stacklevel=stacklevel)

    def sentence(self, boundaries: Sequence[Boundary]) -> str:
        """A sentence on what was chosen, where and why; empty where nothing was asked."""
        cuts: dict[str, dict[int, None]] = {}
        for i, boundary in enumerate(boundaries):
            for link in boundary.links:
                if link.chosen:
                    name = _BF16 if sends_bf16(link) else link.chosen
                    cuts.setdefault(name, {})[i] = None
        if not cuts:
            return ""
        parts = [
            f"{_name(word)}{_at(list(where), len(boundaries))} ({self._reason(word)})"
            for word, where in cuts.items()
        ]
        budget = "" if self._budget is None else f", with steps for a loss of {self._budget:g} %"
        return f"'auto' is {' and '.join(parts)}{budget}"

    def _reason(self, word: str) -> str:
        if word == _BF16:
            assert self._paying is not None
            return self._paying.reason
        return self._reasons[word]


def _word_of_model(cut: Sequence[staging.Stage], reads_weights: bool) -> tuple[str, str]:
    """The word that goes with a model at cuts that are not behind a ReLU, and the reason."""
    has_own_loss = cut[0].own_loss is not None and not cut[0].of_transformers
    if not (cut[0].is_causal_lm or has_own_loss):
        return "auto", "not behind a ReLU, and the model is not known for a language model"
    model = cut[0].original
    if not _is_trained(model, reads_weights):
        return "auto:scratch", "a language model, and no norm's scales show that it was trained"
    count = sum(parameter.numel() for parameter in model.parameters())
    what = f"a trained language model of {count / 1e6:.3g} million parameters"
    if count < RELEASED:
        limit = f"{RELEASED / 1e6:g} million"
        return "auto:scratch", f"{what}, and coarser methods were measured above {limit} alone"
    return INFERENCE, what


def _is_trained(model: nn.Module, reads_weights: bool) -> bool:
    """Whether the scales of a norm differ from each other, as training leaves them."""
    scales = [
        weight.detach()
        for module in model.modules()
        if "norm" in type(module).__name__.lower()
        and isinstance(weight := getattr(module, "weight", None), nn.Parameter)
        and weight.dim() == 1
    ]
    if any(weight.is_meta for weight in scales):
        return reads_weights
    return any(bool((weight != weight[0]).any()) for weight in scales)


def _name(word: str) -> str:
    if word == "auto":
        return "itself"
    if word == INFERENCE:
        return f"{spelt(INFERENCE, None)['act_comp']} until it is trained"
    return word if word == _BF16 else repr(word)


def _at(cuts: Sequence[int], count: int) -> str:
    if len(cuts) == count:
        return ""
    return f" at cut{'s' * (len(cuts) > 1)} {', '.join(map(str, cuts))}"
