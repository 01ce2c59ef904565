"""Conditions on a tensor that crosses a cut, and the errors where they do not hold."""

from __future__ import annotations

from torch import Tensor

from mpcomp.core.kernels import kernel

__all__ = ["check_tensor", "has_nonfinite", "nonfinite_error", "nonfinite_loss_error"]

_CURE = (
    "Lower the learning rate, clip gradients, or use bf16; with fp16 give the pipeline a loss "
    "scaler (scaler=torch.amp.GradScaler(...)). A loss of one's own divides 0 by 0 in a microbatch "
    "in which nothing counts, such as padding: loss_fn.num_terms(target) says so"
)


@kernel
def has_nonfinite(x: Tensor) -> Tensor:
    """Whether there is NaN or Inf in a tensor of some elements: bool []."""
    low, high = x.aminmax()  # NaN passes through both
    return (low * 0 + high * 0) != 0  # of NaN and Inf that is NaN


def check_tensor(x: Tensor, link: str) -> None:
    """Refuses what no link carries.

    Raises:
        TypeError: not a floating-point tensor.
        ValueError: a tensor without elements.
    """
    if not x.is_floating_point():
        raise TypeError(
            f"{link}: a {x.dtype} tensor cannot cross a compressed cut, which carries "
            "floating-point activations; cut where the model's output is floating point"
        )
    if x.numel() == 0:
        raise ValueError(
            f"{link}: an empty activation of shape {list(x.shape)} cannot cross a cut; "
            "cut where every sample has features"
        )


def nonfinite_error(link: str, step: int) -> FloatingPointError:
    """The error for NaN or Inf on a link, named as in "boundary 0 act"."""
    return FloatingPointError(
        f"NaN or Inf at {link}, step {step}: the model has diverged or overflowed. {_CURE}"
    )


def nonfinite_loss_error(step: int) -> FloatingPointError:
    """The error for a loss of NaN or Inf, where all that crossed the cuts was finite."""
    return FloatingPointError(
        f"the loss of step {step} is NaN or Inf, though what crossed the cuts was finite: the last "
        f"stage or loss_fn has overflowed, or divides by 0. {_CURE}"
    )
