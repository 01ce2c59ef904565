"""The ways of learning that methods ask for, by their class."""

from __future__ import annotations

from functools import singledispatch

from mpcomp.compressors.klt import KLT
from mpcomp.compressors.token_mean import TokenMean
from mpcomp.core.spec import SpecValue
from mpcomp.links.bases import Bases
from mpcomp.links.learned import Learned
from mpcomp.links.token_means import TokenMeans

__all__ = ["learned_of"]


@singledispatch
def learned_of(method: SpecValue) -> Learned | None:
    """The learner that a link begins with; None of a method that does not learn."""
    return None


@learned_of.register
def _(method: KLT) -> Learned:
    return Bases(method)


@learned_of.register
def _(method: TokenMean) -> Learned:
    return TokenMeans(method, learned_of(method.inner))
