"""The methods that words in place of a spec stand for at a cut, by argument of `mpcomp.pipeline`.

``auto`` goes with any model and any data. ``auto:memory`` is for samples that come again while the
model changes little, as in fine-tuning over several epochs: each end remembers what a sample's
activations were, and what changes is sent. It needs ``sample_ids=`` with every batch.

They were chosen by what they cost and send on the models of the README; a later version of mpcomp
may have better ones, so a run that is to be repeated names its method.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["AUTO"]

AUTO: Final[Mapping[str, Mapping[str, str]]] = {
    # Gradients with a step for each token: from scratch, one for all loses those of most tokens.
    "auto": {"act_comp": "step:0.3:centre=true", "grad_comp": "step:0.5"},
    # No dead zone: small changes of a sample are what the stages before have learned about it.
    "auto:memory": {
        "act_comp": "aqsgd:first=step/0.3/centre=true:eval=first+step:0.3",
        "grad_comp": "step:1.5:scale=tensor:dead_zone=0.6",
    },
}
