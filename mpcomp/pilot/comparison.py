"""The outcome of a pilot: a row for each method, what it recommends, and why."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from tabulate import tabulate

from mpcomp.core.account import Account
from mpcomp.core.sent import below_bf16_text
from mpcomp.plan.curve import rate_text, time_text
from mpcomp.plan.outcome import RECOMMENDED
from mpcomp.plan.planner import BASELINE, DENSE, Pair

__all__ = ["MOST_WRONG", "Comparison", "Trial"]

#: Of the norm of activations at the cuts, and of the weights' gradient over all batches, the most
#: that what is recommended may miss them by. A rule of thumb: within it a gradient still has a
#: cosine of 0.86 or more with the right one. Single gradients at cuts may miss by more, as
#: residuals are sent later, and unbiased codes are right on average.
MOST_WRONG: Final = 0.5


@dataclass(frozen=True)
class Trial:
    """A method's run over the batches of a pilot.

    Attributes:
        pair: methods of activations and gradients.
        act_error: of all cuts together, what arrived to what was meant: ||x - y|| / ||x||.
        grad_error: likewise of gradients at cuts.
        losses: of each batch, in order; fewer than of others where it diverged.
        gradient_error: of the parameters' gradients of all batches, against those without
            compression, as a share of their norm; None where an optimizer has moved the weights.
        account: of a step; ties go by the pipeline's own method in all trials.
        coding_s: of a step, all that encodes and decodes.
        step_s: of a step on links as asked for, predicted; None if none were.
        failure: in words, if it was not finite.
    """

    pair: Pair
    act_error: float
    grad_error: float
    losses: tuple[float, ...]
    gradient_error: float | None
    account: Account
    coding_s: float
    step_s: float | None
    failure: str = ""

    @property
    def wire_bytes(self) -> float:
        """Bytes of a step at all cuts, both ways."""
        return self.account.cuts.wire_bytes

    @property
    def name(self) -> str:
        """Both methods in words."""
        return self.pair[0] if self.pair[0] == self.pair[1] else " / ".join(self.pair)


@dataclass(frozen=True)
class Comparison:
    """A pilot that has been run.

    Attributes:
        trials: of every method, "none" first, then "bf16".
        num_batches: that each ran over.
        trained: whether an optimizer took a step after each of them.
        floor: the most that what is recommended may raise the loss by, in %.
        mbps: of the links that steps are predicted on; None if none were given.
        latency_ms: likewise.
    """

    trials: tuple[Trial, ...]
    num_batches: int
    trained: bool
    floor: float
    mbps: float | None
    latency_ms: float

    def trial(self, pair: Pair) -> Trial:
        """The trial of a pair of methods."""
        return next(trial for trial in self.trials if trial.pair == pair)

    def loss_change(self, trial: Trial) -> tuple[float, float]:
        """The change of the mean loss, in % of that without compression, and of 95 % of its range.

        Batch by batch: what differs between batches is in both. NaN of a trial that failed.
        """
        dense = self.trial(DENSE).losses
        if len(trial.losses) < len(dense):
            return math.nan, math.nan
        mean = statistics.fmean(dense)
        scale = 100 / abs(mean) if mean else math.nan
        changes = [own - other for own, other in zip(trial.losses, dense, strict=True)]
        spread = statistics.stdev(changes) if len(changes) > 1 else math.nan
        half = statistics.NormalDist().inv_cdf(0.975) * spread / math.sqrt(len(changes))
        return scale * statistics.fmean(changes), scale * half

    def is_good(self, trial: Trial) -> bool:
        """Whether it stays within the floor, and its errors within `MOST_WRONG`."""
        right = max(trial.act_error, trial.gradient_error or 0.0) <= MOST_WRONG
        return not trial.failure and right and self.loss_change(trial)[0] <= self.floor

    @property
    def best(self) -> Trial:
        """The trial that is recommended: of the good ones the fastest step, or the fewest bytes."""
        plain = min((self.trial(BASELINE), self.trial(DENSE)), key=self._cost)
        good = [trial for trial in self.trials if self.is_good(trial)]
        best = min(good, key=self._cost)
        return best if self._cost(plain) > RECOMMENDED * self._cost(best) else plain

    def _cost(self, trial: Trial) -> float:
        return trial.wire_bytes if trial.step_s is None else trial.step_s

    def to_dict(self) -> dict[str, Any]:
        """All figures under their names, as JSON can hold them: what is not known is None."""
        rows = []
        for trial in self.trials:
            change, half = self.loss_change(trial)
            of_step = trial.account.to_dict()
            figures = {k: v for k, v in asdict(trial).items() if k != "account"}
            row = {
                **figures,
                "wire_bytes": trial.wire_bytes,
                "num_elements": trial.account.cuts.num_elements,
                "step_bytes": of_step["wire_bytes"],
                "pair": list(trial.pair),
                "loss_change_percent": change,
                "loss_change_half_width": half,
                **{k: of_step[k] for k in ("below_bf16", "cuts_below_bf16", "parts", "largest")},
                "good": self.is_good(trial),
            }
            rows.append({name: _json(value) for name, value in row.items()})
        return {
            "batches": self.num_batches,
            "trained": self.trained,
            "floor": self.floor,
            "mbps": self.mbps,
            "latency_ms": self.latency_ms,
            "trials": rows,
            "recommended": {"act": self.best.pair[0], "grad": self.best.pair[1]},
            "says": self.summary(),
        }

    def table(self) -> str:
        """The table of all methods."""
        headers = ["activations / gradients", "error act", "error grad"]
        headers += [] if self.trained else ["error of weights' gradient"]
        headers += ["loss, change in %", "MB a step", "below bf16", "cuts alone", "coding a step"]
        headers += [] if self.mbps is None else [f"a step at {rate_text(self.mbps)}"]
        best, rows = self.best, []
        for trial in self.trials:
            change, half = self.loss_change(trial)
            row = [
                f"{'* ' if trial is best else ''}{trial.name}",
                *(f"{error:.3g}" for error in (trial.act_error, trial.grad_error)),
            ]
            if trial.gradient_error is not None:
                row.append(f"{trial.gradient_error:.3g}")
            elif not self.trained:
                row.append("")
            row.append(trial.failure or f"{change:+.2f} ± {half:.2f}")
            account = trial.account
            row += [f"{account.whole.wire_bytes / 1e6:.3f}"]
            row += [below_bf16_text(each.below_bf16) for each in (account, account.cuts)]
            row.append(time_text(trial.coding_s))
            if self.mbps is not None:
                row.append("" if trial.step_s is None else time_text(trial.step_s))
            rows.append(row)
        return tabulate(rows, headers, disable_numparse=True)

    def summary(self) -> list[str]:
        """Sentences for a reader: what to do, and what a pilot cannot say."""
        best, baseline = self.best, self.trial(BASELINE)
        batches = f"{self.num_batches} batches"
        if best.pair in (DENSE, BASELINE):
            name = "as it is" if best.pair == DENSE else "in bf16"
            what = "sends 5 % less" if self.mbps is None else "is 5 % faster"
            return [
                f"do not compress: of what keeps the loss of {batches} within {self.floor:g} % and "
                f"errors within {MOST_WRONG:g} of their norm, nothing {what} than to send {name}"
            ]
        change, half = self.loss_change(best)
        cuts = below_bf16_text(best.account.cuts.below_bf16)
        whole = below_bf16_text(best.account.below_bf16)
        gain = f"{whole} times fewer bytes than bf16 in a step, {cuts} at the cuts alone"
        if best.step_s is not None and baseline.step_s is not None and self.mbps is not None:
            gain += (
                f"; at {rate_text(self.mbps)} a step takes {time_text(best.step_s)}, "
                f"with bf16 {time_text(baseline.step_s)}"
            )
        wrong = ""
        if best.gradient_error is not None:
            wrong = f", the weights' gradient by {best.gradient_error:.3g} of its norm"
        return [
            f"start with act_comp={best.pair[0]!r}, grad_comp={best.pair[1]!r}: {gain}",
            f"over {batches} it changed the loss by {change:+.2f} ± {half:.2f} %{wrong}; a pilot "
            "is no long run: look at both evaluations of your own, compressed and uncompressed",
            *best.account.summary()[1:],
        ]


def _json(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def pairs_in_order(pairs: Sequence[Pair]) -> list[Pair]:
    """Pairs once each, those that others are compared with first."""
    return list(dict.fromkeys([DENSE, BASELINE, *pairs]))
