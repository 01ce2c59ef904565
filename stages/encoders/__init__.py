"""Encoders of transformers with their heads, cut between their blocks without tracing.

The model's own forward runs in every stage, with all that the batch says of masks and positions. In
place of the embeddings a later stage has what crosses the cut; its forward ends with its last
block::

    model                    stage 0             stage 1               stage 2
    |- bert
    |  |- embeddings         embeddings          (x)                   (x)
    |  |- encoder.layer      layer.0 to layer.3  layer.4 to layer.7    layer.8 to layer.11
    |  |- pooler                                                       pooler
    |- classifier                                                      classifier -> logits

It is one way for all families: where embeddings, blocks and head are follows from the model, and a
few tokens or pixels that are tried when it is cut show whether the stages give what it gives.
"""

from stages.encoders.encoder import Encoder, check_head_loss, is_encoder
from stages.encoders.loss import HeadLoss

__all__ = ["Encoder", "HeadLoss", "check_head_loss", "is_encoder"]
