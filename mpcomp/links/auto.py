"""The methods that words in place of a spec stand for at a cut, by argument of `mpcomp.pipeline`.

``auto`` goes with any model and any data. ``auto:scratch`` is for a language model that begins with
random weights: its links learn a basis of what they carry, in which a fine step takes few bits (see
`mpcomp.KLT`). ``auto:relu`` is for models whose cuts lie behind a ReLU,
as those of a ResNet do: where an activation is zero its gradient is not sent, as the stage before
would multiply it by zero (see `mpcomp.SameIndices`). ``auto:memory`` is for samples that come
again while the model changes little, as in fine-tuning over several epochs: each end remembers what
a sample's activations and gradients were, and what changes is sent. It needs ``sample_ids=`` with
every batch, and memory for both (see `mpcomp.AQSGD`). Before a head with a stage of its own it is
finer, in a basis (`BEFORE_HEAD`).

The gradient of a weight that two stages have copies of is sent once a step: of a released model it
is many times as large as what crosses compressed cuts. So each word stands for a method with error
feedback there, too, wherever ``tie_comp`` is not given.

Given to `mpcomp.pipeline`, ``auto`` becomes one of the four at each cut, by what is known of the
model and its batches (`mpcomp.pilot.dial`); it is itself where nothing is.

They were chosen by what they cost and send on the models of docs/results; a later version of mpcomp
may have better ones, so a run that is to be repeated names its method.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["AUTO", "BEFORE_HEAD", "GENERAL", "INFERENCE", "TIE_COMP", "Words"]

#: What words stand for: by word, then by argument of `mpcomp.pipeline`, a spec.
Words = Mapping[str, Mapping[str, str]]
#: Not a word: what ``auto`` is for a released language model that nobody has trained yet.
INFERENCE: Final = "inference"

#: Method of tied weights' gradients beside any of the words.
TIE_COMP: Final = "ef+quant:4:scale=128"
AUTO: Final[Words] = {
    # Gradients with a step for each token: from scratch, one for all loses those of most tokens.
    "auto": {"act_comp": "step:0.3:centre=true:spikes=16", "grad_comp": "step:0.5"},
    # Activations of such a model lie along few directions, and it learns in the weak ones. There
    # gradients are mostly below half a step: dithered they arrive right on average.
    "auto:scratch": {
        "act_comp": "klt+step:0.1:centre=true",
        "grad_comp": "klt+step:0.7:rounding=dither",
    },
    # One step for all gradients leaves most of a heavy tail at zero; dithered, right on average.
    "auto:relu": {
        "act_comp": "step:0.4",
        "grad_comp": "same:where=nonzero+step:1:scale=tensor:rounding=dither",
    },
    # Both ways what a sample changes by is small from one epoch to the next. With dead zones a run
    # learns the samples that it remembers. Gradients are dithered at the first visit: from there on
    # an element lies anywhere in its step, so that small changes arrive right on average.
    "auto:memory": {
        "act_comp": "aqsgd:first=step/0.4/centre=true/spikes=16"
        ":eval=step/0.1/centre=true/spikes=16+step:0.4:spikes=16",
        "grad_comp": "aqsgd:first=step/1.2/scale=tensor/rounding=dither+step:1:scale=tensor",
    },
}
#: What words are at the cut before a head with a stage of its own, where that is something else.
#: Errors of activations are errors of the logits there, and errors of gradients reach all blocks.
#: A basis saves most there, a third of a gradient's bits, and finer steps take them.
BEFORE_HEAD: Final[Words] = {
    "auto:memory": {
        "act_comp": "klt:weighted=true+aqsgd:first=step/0.35/centre=true/spikes=16"
        ":eval=step/0.05/centre=true/spikes=16+step:0.35:spikes=16",
        "grad_comp": "klt+aqsgd:first=step/0.5/scale=tensor/rounding=dither+step:0.5:scale=tensor",
    },
}
#: Plain ``auto``: activations, gradients.
GENERAL: Final = (AUTO["auto"]["act_comp"], AUTO["auto"]["grad_comp"])
