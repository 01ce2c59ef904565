"""GraVAC's search for a compression factor: Algorithm 1 of Tyagi & Swany (CLOUD 2023), as numbers.

A compression factor (CF) is elements of the gradient per element sent. The search knows a ladder
of them, from the smallest that is allowed to the largest. In each step two rungs are looked at:
the *minimum* (theta_min) and the *candidate* (theta_s * theta_min). The gain of a rung is how much
of the gradient's energy it keeps, ||C(g)||^2 / ||g||^2 with the residual in g (of a method that
does not select, 1 - ||g - C(g)||^2 / ||g||^2, which for a selection is the same). A step sends the
candidate if its gain is at least ``eps``, else the minimum if its gain is, else the gradient as it
is. At the end of every ``window`` steps the two may change::

    rungs      10   20   40   160   1000          exponential: 10 times 2^1, 2^2, 2^4, 2^8 ...
    window 1    m    c                            geometric:   10 times 2, 4, 8, 16 ...
    window 2    m         c                       gain(20) was far below gain(10): m stays
    window 3              m    c                  gain(40) was within omega of gain(10): m moves

What the paper leaves open, or says twice, is decided here:

1.  All replicas have to take the same branch. The search is given numbers that all of them share
    (gains and seconds averaged over the replicas), and has no other source.
2.  The minimum moves to the candidate that was evaluated in the window that ends, although
    Algorithm 1 changes the candidate in the line before; the prose says so too.
3.  Saturation: where the two largest throughputs are within ``omega``, the smaller of their two
    CFs is taken. Algorithm 1 takes that of the second largest throughput, which is the same as
    long as throughput grows with the CF.
4.  Averages are exponential ones of the ratio of energies (Algorithm 1), not ratios of averages.
    The average of a CF starts with its first measurement, and goes with it when the CF changes
    its part (a candidate that becomes the minimum). A new candidate has none: until it is
    measured, the minimum is sent. It must not be judged by the gain of another CF.
5.  The throughput of a CF, gain / seconds, is the median over the steps of the last window in
    which it was sent, so that a step that an evaluation fell into does not count for much. It is
    forgotten after as many windows as there are rungs: long enough for a whole ascent to be
    compared, and not for what was measured in another phase of training.
6.  Steps that sent the gradient as it is have a throughput too, but not in that comparison.
7.  The first window already looks at the second rung, as in Algorithm 1.
8.  Nothing is ever compressed to no elements; see `mpcomp.compressors.base.num_kept`.
9.  Saturation ends the ascent. The candidate stays at that CF, though never below the minimum,
    until its gain is below ``eps`` at the end of a window. Then it steps down a rung, the
    throughputs are forgotten, as they are from before, and the ascent begins anew.
10. Where even the minimum's gain is below ``eps`` at the end of a window, the minimum goes back to
    the first rung. Otherwise a minimum that had moved up would leave nothing but dense steps.
    A candidate that is rejected while the search first ascends makes room for the next higher
    one, as in Algorithm 1, and the minimum is sent meanwhile.
11. Where the largest CF is rejected, Algorithm 1 would test it, and send the minimum, for ever.
    "Scale-down only through epsilon" is taken at its word here: the candidate goes down a rung at
    the end of each window until it is accepted. There it stays for as many windows as there are
    rungs; then the next higher one is tested again, as gains grow in the course of training.

Every step counts towards a window, those too that a loss scaler skips: all replicas count them.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any, Final, Literal, TypeAlias

__all__ = ["POLICIES", "Branch", "Search", "between", "check_search", "checked_cfs", "ladder"]

#: Windows that `Search.history` goes back.
_DECISIONS = 200

Branch: TypeAlias = Literal["dense", "minimum", "candidate"]

POLICIES: Final = ("exponential", "geometric")


def ladder(cf: tuple[float, float], policy: str) -> tuple[float, ...]:
    """The CFs from the smallest to the largest: by 2^1, 2^2, 2^4 ... or by 2^1, 2^2, 2^3 ..."""
    lowest, highest = cf
    rungs = [float(lowest)]
    factor = 2.0
    while rungs[-1] < highest:
        rungs.append(float(min(highest, lowest * factor)))
        factor *= factor if policy == "exponential" else 2
    return tuple(rungs)


def checked_cfs(cf: Any, *, like: tuple[int, int]) -> tuple[float, float]:
    """The smallest and the largest CF that a user gave.

    Args:
        cf: what was given.
        like: an example for messages.

    Raises:
        ValueError: they are no two CFs, or in the other order.
    """
    if not isinstance(cf, tuple | list) or len(cf) != 2:
        raise ValueError(f"cf={cf!r}: expected the smallest and the largest, {like}")
    lowest, highest = cf
    if not (1 <= lowest < math.inf and 1 <= highest < math.inf):
        keeps = " % down to ".join(f"{100 / factor:g}" for factor in like)
        raise ValueError(
            f"cf={cf}: a compression factor is elements per element sent, 1 or more; for keeping "
            f"{keeps} % write cf={like}"
        )
    if lowest > highest:
        raise ValueError(f"cf={cf}: the smallest comes first; write cf=({highest}, {lowest})")
    return float(lowest), float(highest)


def check_search(method: Any, *, smoothing: str) -> None:
    """Checks the settings of a search that a method has, but for its CFs.

    Args:
        method: with the settings of `Search`; its ``smoothing`` may be None.
        smoothing: what None stands for, for messages.

    Raises:
        ValueError: a setting outside those.
    """
    for name in ("eps", "omega"):
        if not between(getattr(method, name), 0, 1):
            raise ValueError(f"{name}={getattr(method, name)!r}: expected a number in (0, 1)")
    window, weight = method.window, method.smoothing
    if not (isinstance(window, int) and not isinstance(window, bool) and window >= 1):
        raise ValueError(f"window={window!r}: expected a number of steps, 1 or more")
    if method.policy not in POLICIES:
        raise ValueError(f"policy={method.policy!r}: expected {' or '.join(POLICIES)}")
    if weight is not None and not (weight == 1 or between(weight, 0, 1)):
        raise ValueError(f"smoothing={weight!r}: expected a weight in (0, 1], or None {smoothing}")


def between(value: Any, low: float, high: float) -> bool:
    """Whether it is a number between the two."""
    return isinstance(value, int | float) and low < value < high


@dataclass
class _Throughput:
    """One CF's measurements in this window, and when they were made."""

    values: list[float]
    window: int
    step: int

    @property
    def median(self) -> float:
        return statistics.median(self.values)


class Search:
    """The state of a search. The calls of a step, in this order::

        branch = search.branch()                          # or after `average`, if the gradient is
        search.average(gain_min, gain_candidate)          # looked at before it is sent
        search.record(branch, seconds)
        search.end_step()

    A skipped step calls `end_step` alone.

    Args:
        cf: smallest and largest CF.
        eps: least gain that is sent.
        window: steps between decisions.
        omega: relative difference within which two gains, or two throughputs, are the same.
        policy: "exponential" or "geometric".
        smoothing: weight of a new gain in its average, in (0, 1].

    Attributes:
        rungs: the CFs, ascending.
        steps: number of steps so far.
        saturated: whether the candidate is the CF beyond which throughput did not grow.
    """

    def __init__(
        self,
        cf: tuple[float, float],
        *,
        eps: float = 0.7,
        window: int = 500,
        omega: float = 0.01,
        policy: str = "exponential",
        smoothing: float = 0.01,
    ) -> None:
        assert 1 <= cf[0] <= cf[1] < math.inf and policy in POLICIES
        assert window >= 1 and 0 < smoothing <= 1
        self.rungs = ladder(cf, policy)
        self.eps = eps
        self.window = window
        self.omega = omega
        self.smoothing = smoothing
        self.steps = 0
        self.saturated = False
        self._history: deque[dict[str, Any]] = deque(maxlen=_DECISIONS)
        self._min = 0
        self._candidate = min(1, self._top)
        self._gain_min: float | None = None
        self._gain_candidate: float | None = None
        self._throughputs: dict[int, _Throughput] = {}  # by rung
        self._dense: _Throughput | None = None
        self._turned = False  # whether the largest CF has been rejected
        self._stay = 0  # windows before the next higher rung is tested

    @property
    def history(self) -> list[dict[str, Any]]:
        """Decisions at the end of each of the last 200 windows, in plain numbers and words.

        Older decisions are forgotten, as this is a part of every checkpoint.
        """
        return list(self._history)

    @property
    def _top(self) -> int:
        return len(self.rungs) - 1

    @property
    def cf_min(self) -> float:
        """The minimum, theta_min."""
        return self.rungs[self._min]

    @property
    def cf_candidate(self) -> float:
        """The candidate, theta_s * theta_min; the minimum itself where there is none above it."""
        return self.rungs[self._candidate]

    @property
    def gain_min(self) -> float | None:
        """The minimum's average gain; None before it is measured."""
        return self._gain_min

    @property
    def gain_candidate(self) -> float | None:
        """The candidate's average gain; None before it is measured."""
        return self._gain_candidate

    @property
    def throughputs(self) -> dict[float, float]:
        """Gain per second by CF, as far as it is remembered; dense steps not among them."""
        held = self._throughputs
        return {self.rungs[rung]: held[rung].median for rung in sorted(held)}

    @property
    def dense_throughput(self) -> float | None:
        """Gain per second, the gain being 1, of steps that sent the gradient as it is."""
        return None if self._dense is None else self._dense.median

    def branch(self) -> Branch:
        """The branch to send by, from the averages so far; dense while there are none.

        "candidate" only where it is another CF than the minimum.
        """
        if self._candidate > self._min and self._enough(self._gain_candidate):
            return "candidate"
        return "minimum" if self._enough(self._gain_min) else "dense"

    def cf_of(self, branch: Branch) -> float:
        """The CF that a branch sends with; 1 for dense."""
        return {"dense": 1.0, "minimum": self.cf_min, "candidate": self.cf_candidate}[branch]

    def _enough(self, gain: float | None) -> bool:
        return gain is not None and gain >= self.eps

    def average(self, gain_min: float, gain_candidate: float) -> None:
        """Takes this step's gains into the averages.

        Args:
            gain_min: of `cf_min`; 1 where the gradient is zero.
            gain_candidate: of `cf_candidate`; not read where that is `cf_min`.

        Raises:
            ValueError: a gain that is no number of at least 0.
        """
        if self._candidate == self._min:
            gain_candidate = gain_min
        for name, gain in (("gain_min", gain_min), ("gain_candidate", gain_candidate)):
            if not (gain >= 0 and math.isfinite(gain)):
                raise ValueError(
                    f"{name}={gain}: expected the part of the gradient's energy that is kept, 0 or "
                    "more and finite; leave out steps whose gradient is not finite"
                )
        self._gain_min = self._averaged(self._gain_min, gain_min)
        self._gain_candidate = self._averaged(self._gain_candidate, gain_candidate)

    def _averaged(self, average: float | None, value: float) -> float:
        weight = self.smoothing
        return value if average is None else (1 - weight) * average + weight * value

    def record(self, branch: Branch, seconds: float) -> None:
        """Takes note of what the step that sent ``branch`` took.

        Args:
            branch: what was sent.
            seconds: of the whole step; NaN or 0 where that is not known, which records nothing.

        Raises:
            ValueError: seconds below 0 or infinite.
        """
        if math.isnan(seconds) or seconds == 0:
            return
        if not 0 < seconds < math.inf:
            raise ValueError(f"seconds={seconds}: a step takes a finite time, 0 or more")
        if branch == "dense":
            self._dense = self._noted(self._dense, 1 / seconds)
            return
        minimum = branch == "minimum"
        gain = self._gain_min if minimum else self._gain_candidate
        assert gain is not None, "a CF is sent, and recorded, only after its gain is known"
        rung = self._min if minimum else self._candidate
        self._throughputs[rung] = self._noted(self._throughputs.get(rung), gain / seconds)

    def _noted(self, held: _Throughput | None, value: float) -> _Throughput:
        window = self.steps // self.window
        if held is None or held.window != window:
            held = _Throughput([], window, self.steps)
        return _Throughput([*held.values, value], window, self.steps)

    def end_step(self) -> dict[str, Any] | None:
        """Counts a step, skipped or not; decides at the end of a window.

        Returns:
            At the end of a window what was decided, as it is added to `history`; else None.
        """
        self.steps += 1
        if self.steps % self.window:
            return None
        decision: dict[str, Any] = {
            "step": self.steps,
            "tested": self.cf_candidate,
            "gain_min": self._gain_min,
            "gain_candidate": self._gain_candidate,
        }
        self._forget()
        decision["throughputs"] = [list(pair) for pair in self.throughputs.items()]
        actions = self._decide()
        decision.update(
            actions=actions,
            cf_min=self.cf_min,
            cf_candidate=self.cf_candidate,
            saturated=self.saturated,
        )
        self._history.append(decision)
        return decision

    def _forget(self) -> None:
        """Drops the throughputs that are too old to be compared (5)."""
        now = self.steps // self.window
        old = [r for r, seen in self._throughputs.items() if now - seen.window > len(self.rungs)]
        for rung in old:
            del self._throughputs[rung]

    def _decide(self) -> list[str]:
        """Moves the minimum and the candidate; says how, in words for a log."""
        tested, gain_min, gain_tested = self._candidate, self._gain_min, self._gain_candidate
        if gain_min is None or gain_tested is None:
            return ["not measured"]  # every step of the window was skipped
        actions = []

        minimum = self._min
        if gain_min < self.eps:
            if minimum > 0:
                minimum = 0
                actions.append("minimum down")
        elif tested > minimum and abs(gain_min - gain_tested) <= self.omega * gain_min:
            minimum = tested
            actions.append("minimum up")

        candidate = tested
        if self.saturated:
            if gain_tested < self.eps and tested > minimum:
                self.saturated = False
                self._throughputs.clear()
                candidate = tested - 1
                actions.append("candidate down")
        else:
            ideal = self._ideal()
            if ideal is not None:
                self.saturated = True
                candidate = max(ideal, minimum)
                actions.append("saturated")
            elif (
                tested > minimum
                and gain_tested < self.eps
                and (self._turned or tested == self._top)
            ):
                self._turned, self._stay = True, len(self.rungs)
                candidate = tested - 1
                actions.append("candidate down")
            elif self._stay:
                self._stay -= 1
            elif tested < self._top:
                candidate = tested + 1
                actions.append("candidate up")

        # A CF that was measured in one part keeps its average in the other.
        known = {self._min: gain_min, tested: gain_tested}
        self._min, self._candidate = minimum, candidate
        self._gain_min, self._gain_candidate = known.get(minimum), known.get(candidate)
        return actions

    def _ideal(self) -> int | None:
        """The smaller of the two rungs of largest throughput, where these hardly differ."""
        ranked = sorted((seen.median, rung) for rung, seen in self._throughputs.items())
        if len(ranked) < 2:
            return None
        (second, a), (best, b) = ranked[-2:]
        return min(a, b) if best - second <= self.omega * second else None

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON can hold it: enough to go on exactly."""
        return {
            "rungs": list(self.rungs),
            "window": self.window,
            "steps": self.steps,
            "saturated": self.saturated,
            "minimum": self._min,
            "candidate": self._candidate,
            "gain_min": self._gain_min,
            "gain_candidate": self._gain_candidate,
            "throughputs": [[rung, *astuple(seen)] for rung, seen in self._throughputs.items()],
            "turned": self._turned,
            "stay": self._stay,
            "dense": None if self._dense is None else list(astuple(self._dense)),
            "history": [dict(decision) for decision in self._history],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave.

        Raises:
            ValueError: the state is of a search over other CFs, or with another window.
        """
        for name, here in (("rungs", list(self.rungs)), ("window", self.window)):
            if state[name] != here:
                raise ValueError(
                    f"the state is of a search with {name}={state[name]}, and this one has "
                    f"{here}: resume with the same cf, policy and window"
                )
        self.steps = state["steps"]
        self.saturated = state["saturated"]
        self._min = state["minimum"]
        self._candidate = state["candidate"]
        self._turned = state["turned"]
        self._stay = state["stay"]
        self._gain_min = state["gain_min"]
        self._gain_candidate = state["gain_candidate"]
        self._throughputs = {rung: _Throughput(*seen) for rung, *seen in state["throughputs"]}
        self._dense = None if state["dense"] is None else _Throughput(*state["dense"])
        self._history = deque(map(dict, state["history"]), maxlen=_DECISIONS)
