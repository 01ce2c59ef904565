"""The distance of a language model's predictions from those of another one for the same tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mpcomp.core.loss import CausalLMLoss

__all__ = ["Against"]


@dataclass(frozen=True)
class Against:
    """A metric of `mpcomp.Pipeline.evaluate` that holds predictions against a reference.

    A perplexity is of the text: a code whose errors make an overconfident model less sure of itself
    may lower it. The divergence is of the two models alone: with p the reference's probabilities of
    the next token and q the model's,

        KL(p || q) = sum_v p_v (log p_v - log q_v),

    which is zero only where they are equal.

    Args:
        reference: logits of the same batch [b, s, vocabulary].
    """

    reference: Tensor

    def __call__(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Means over the tokens that labels [b, s] predict, each 0-d.

        Returns:
            ``loss`` and ``divergence`` in nats a token; ``agreement``, the share of tokens that
            both models think the likeliest.
        """
        predicted = labels[:, 1:] != CausalLMLoss.ignore_index
        p, q = (
            each[:, :-1][predicted].float().log_softmax(-1) for each in (self.reference, logits)
        )
        return {
            "loss": CausalLMLoss()(logits, labels),
            "divergence": (p.exp() * (p - q)).sum(-1).mean(),
            "agreement": (p.argmax(-1) == q.argmax(-1)).float().mean(),
        }
