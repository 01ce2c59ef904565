"""Encoder-decoders of transformers with a head for tokens, cut between their blocks.

The model's own forward runs in every stage, as with encoders. Every decoder block reads what the
encoder gives, so both cross a cut side by side, as one tensor [b, s + t, width]::

    model                    stage 0             stage 1               stage 2
    |- model
    |  |- encoder            embeddings
    |  |  |- layers          layers.0 and 1      layers.2 and 3
    |  |- decoder            embeddings          (t positions)         (t positions)
    |  |  |- layers                              layers.0              layers.1 to layers.3
    |- lm_head                                                         lm_head -> logits
                       cut 0: [encoder | decoder]        cut 1: [encoder | decoder]

Embeddings of the decoder stand in the first stage, as they are the encoder's weight in most
families, and the head's as well. So the weight is at both ends of the model, as in a decoder, and
one mask [b, s + t] says of each cut which positions are padding.
"""

from stages.encoder_decoders.line import EncoderDecoder

__all__ = ["EncoderDecoder"]
