"""All adaptive links of a pipeline: what they measure in a step, and what is decided at its end.

Decisions follow from sums over all ranks, which travel in the one sum at the end of a step
(`mpcomp.api.training_steps`)::

    [seconds, then of each adaptive link: base, rests, and its traffic or its bytes at each CF]

so both ends of a link, all ranks and all replicas decide alike, for the next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from mpcomp.adaptive.budget import Budgeted, bytes_at, share_out
from mpcomp.adaptive.link_policy import LinkState
from mpcomp.adaptive.method import Adaptive
from mpcomp.core.context import HISTORY_STEPS, Step, TensorMeta
from mpcomp.links.endpoints.adaptive import AdaptiveEndpoint
from mpcomp.links.link import Link

__all__ = ["Adaptation", "policy_of"]

#: Of each microbatch what crosses each cut.
Metas = Sequence[Sequence[TensorMeta]]


def policy_of(link: Link) -> LinkState | None:
    """The chooser of a link's ratio; None where that is fixed."""
    endpoint = link.endpoint
    return endpoint.policy if isinstance(endpoint, AdaptiveEndpoint) else None


class Adaptation:
    """The adaptive links of a pipeline; without any it does nothing.

    Args:
        links: all links of the pipeline.
        num_ranks: of all replicas.
        num_replicas: number of pipelines.

    Attributes:
        history: of each of the last `HISTORY_STEPS` steps its number, and of each adaptive link
            ("0.act") what it sent with: ``cf`` (1 if dense), ``branch`` ("dense", "minimum",
            "candidate", "budget", or "off" where compression was off), ``gain`` of that (None if
            not known); under GraVAC's rule also the average gains ``gain_min`` and
            ``gain_candidate``.
    """

    def __init__(self, links: Sequence[Link], *, num_ranks: int, num_replicas: int) -> None:
        self.links = [link for link in links if policy_of(link) is not None]
        self.history: deque[dict[str, Any]] = deque(maxlen=HISTORY_STEPS)
        self._num_ranks = num_ranks
        self._num_replicas = num_replicas

    @property
    def states(self) -> list[LinkState]:
        """Of `links`."""
        return [policy for link in self.links if (policy := policy_of(link)) is not None]

    def _groups(self) -> dict[Adaptive, list[tuple[Link, Budgeted]]]:
        """Links that share a budget."""
        groups: dict[Adaptive, list[tuple[Link, Budgeted]]] = {}
        for link, state in zip(self.links, self.states, strict=True):
            if isinstance(state, Budgeted):
                groups.setdefault(state.method, []).append((link, state))
        return groups

    def acts_before(self) -> bool:
        """Whether ranks do something together, before the next step, for its links' sake."""
        return any(state.dense for group in self._groups().values() for _, state in group)

    def begin(
        self,
        metas: Callable[[], Metas],
        agree: Callable[[Sequence[float]], list[float]],
    ) -> None:
        """Before a step: gives links with a budget the CF that they begin with.

        Args:
            metas: tells what the step's microbatches will be at each cut.
            agree: sums over all ranks; called by all of them if by one.

        Raises:
            ValueError: the largest CF everywhere is above the budget; on all ranks.
        """
        new = {
            method: group
            for method, group in self._groups().items()
            if any(state.dense for _, state in group)
        }
        if not new:
            return
        crossing = metas()
        for method, group in new.items():
            sizes = [
                bytes_at(method, microbatch[link.boundary])
                for link, _ in group
                for microbatch in crossing
            ]
            dense, *at = agree([sum(column) for column in zip(*sizes, strict=True)])
            assert method.budget is not None
            fitting = [i for i, num_bytes in enumerate(at) if num_bytes <= method.budget * dense]
            if not fitting:
                raise ValueError(
                    f"budget={method.budget} of {method}: cf={method.cf[1]:g} everywhere takes "
                    f"{at[-1] / dense:.4f} of the dense bytes of a step already; allow more bytes, "
                    "a larger CF, or larger microbatches (a message has a header)"
                )
            for _, state in group:
                state.begin(fitting[0])

    def figures(self, seconds: float) -> list[float]:
        """This rank's part of the sum at the end of a step; forgets what was noted.

        Args:
            seconds: that the step took here.
        """
        if not self.links:
            return []
        return [seconds, *(figure for state in self.states for figure in state.figures())]

    def finish_step(self, step: Step, sums: Sequence[float], *, finite: bool) -> None:
        """Ends a step, and decides for the next.

        Args:
            step: the step.
            sums: of `figures`, over all ranks.
            finite: whether its updates were stored.
        """
        if not self.links:
            return
        seconds, *rest = sums
        entries = {}
        for link, state in zip(self.links, self.states, strict=True):
            own, rest = rest[: state.num_figures], rest[state.num_figures :]
            entries[f"{link.boundary}.{link.direction}"] = state.finish_step(
                own,
                finite=finite,
                on=link.enabled(step),
                seconds=seconds / self._num_ranks,
                replicas=self._num_replicas,
            )
        assert not rest
        self.history.append({"step": step.index, "links": entries})
        for method, group in self._groups().items():
            self._share_out(method, [state for _, state in group])

    def _share_out(self, method: Adaptive, states: Sequence[Budgeted]) -> None:
        """Decides for a group, if all of it was measured in this step."""
        assert method.budget is not None
        ladders = [state.ladder for state in states if state.ladder is not None]
        if len(ladders) < len(states):
            return
        # A link that sends nothing (before a frozen stage) has no bytes, and no use for any.
        for state, rung in zip(states, share_out(ladders, method.budget), strict=True):
            state.choose(rung)

    def discard(self) -> None:
        """Forgets what was noted in a step that failed."""
        for state in self.states:
            state.discard()

    def report(self, link: Link) -> dict[str, Any] | None:
        """State of an adaptive link in plain numbers; None of another."""
        state = policy_of(link)
        if state is None:
            return None
        gains = [[cf, gain] for cf, gain in state.gains().items()]
        return {"cf": state.cf, "dense": state.dense, "gains": gains, "changes": state.changes}
