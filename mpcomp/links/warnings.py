"""Warnings of a link whose messages are no use, once each."""

from __future__ import annotations

import warnings

from mpcomp.core.spec import SpecValue
from mpcomp.core.traffic import Traffic

__all__ = ["LinkWarnings"]

#: Lag of a memory over the error of first messages, above which it is spoken of. Where elements
#: move slowly their error is even over a step, from -1/2 to 1/2 without a dead zone, as at first:
#: 1. With one of 0.7 it is so from -0.3 to 0.7: 1.2.
_MOST_LAG = 1.1
#: Elements that must have come again before it is: of few, chance decides.
_ENOUGH_ELEMENTS = 100_000


class LinkWarnings:
    """The warnings of one link.

    Args:
        name: of the link.
        method: likewise.
        makes_good: whether what a message leaves out may come later, or is right on average. So
            gradients may well arrive; an activation is used as it arrives.
    """

    def __init__(self, name: str, method: SpecValue, *, makes_good: bool) -> None:
        self._name = name
        self._method = method
        self._makes_good = makes_good
        self._said_of_error = self._said_of_lag = False

    def of_error(self, traffic: Traffic) -> None:
        """Warns, once, if what arrives is further from what was meant than nothing would be.

        Args:
            traffic: of training or evaluation, as metered here so far.
        """
        if self._said_of_error or self._makes_good:
            return
        error = traffic.relative_error
        if not error > 1.01:  # not for rounding's sake
            return
        self._said_of_error = True
        warnings.warn(
            f"{self._name}: with {self._method} what arrives is wrong by {error:.3g} of its norm "
            "(zeros would be wrong by 1): the model gets noise here. "
            "Outliers take a scale that all elements share: give each token or group one "
            "(quant:8:scale=token, step:0.3), use more bits or a larger share, or send this "
            "link uncompressed (None)",
            stacklevel=2,
        )

    def of_lag(self, traffic: Traffic) -> None:
        """Warns, once, if a memory lags further behind its samples than their first messages did.

        A message of a sample that comes again may leave out half a step of an element, as its first
        one did: then both are as near. With a dead zone more is left out, and the same each time.

        Args:
            traffic: of training, as metered here so far.
        """
        if self._said_of_lag or traffic.lags is None or traffic.lags[-1] < _ENOUGH_ELEMENTS:
            return
        lag, first = traffic.lag, traffic.first_error
        if not lag or not first or lag <= _MOST_LAG * first:
            return
        self._said_of_lag = True
        assert traffic.stayed is not None
        warnings.warn(
            f"{self._name}: with {self._method} what is remembered lags {lag:.3g} of its norm "
            f"behind samples that come again, and their first messages were wrong by {first:.3g}: "
            f"messages left {traffic.stayed:.2%} of it as it was, so stages are trained on what "
            "samples were, which validation never sees. Leave the dead zone out of the step "
            "(dead_zone=0.5), or take a finer one",
            stacklevel=2,
        )
