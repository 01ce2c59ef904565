"""The methods that words in place of a spec stand for at a cut, by argument of `mpcomp.pipeline`.

``auto`` goes with any model and any data. ``auto:memory`` is for samples that come again while the
model changes little, as in fine-tuning over several epochs: each end remembers what a sample's
activations were, and what changes is sent. It needs ``sample_ids=`` with every batch.

They are the methods that no other surpasses in rate and quality on the models measured here
(`recipes.rate_quality`); a later version of mpcomp may have better ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["AUTO"]

_GRADIENTS: Final = "step:1:scale=tensor:rounding=dither"

AUTO: Final[Mapping[str, Mapping[str, str]]] = {
    "auto": {"act_comp": "step:0.3:centre=true", "grad_comp": _GRADIENTS},
    "auto:memory": {
        "act_comp": "aqsgd:first=step/0.3/centre=true:eval=first+step:0.3:dead_zone=0.6",
        "grad_comp": _GRADIENTS,
    },
}
