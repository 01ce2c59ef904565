"""Causal language models of transformers, cut between the blocks of their decoder without tracing.

The model's own forward runs in every stage, on a shallow copy that holds the stage's blocks alone;
what stands before the blocks belongs to the first stage, what stands after them to the last::

    model                      stage 0           stage 1               stage 2
    |- transformer
    |  |- wte, wpe, drop       input_ids         (inputs_embeds)       (inputs_embeds)
    |  |- h.0 ... h.11         h.0 to h.3        h.4 to h.7            h.8 to h.11
    |  |- ln_f                 (identity)        (identity)            ln_f
    |- lm_head                                                         lm_head -> logits

Masks and positions go to every stage from the batch, which every rank has, and so cross no cut.
Rotary embeddings have no weights: each stage has its own. Embedding and head are often one tensor;
cut apart they become two equal ones, and whoever trains adds up their gradients (`stages.ties`).

Tested with transformers 5.23; families outside `FAMILIES` are tried on a few tokens when they are
cut, and refused if the stages do not give the model's logits.
"""

from stages.language_models.caches import StageCaches
from stages.language_models.decoder import FAMILIES, Decoder
from stages.language_models.layout import is_causal_lm, is_encoder_decoder, is_pretrained
from stages.language_models.line import BlockLine
from stages.language_models.loss import check_own_loss

__all__ = [
    "FAMILIES",
    "BlockLine",
    "Decoder",
    "StageCaches",
    "check_own_loss",
    "is_causal_lm",
    "is_encoder_decoder",
    "is_pretrained",
]
