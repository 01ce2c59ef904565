"""The least time of a step on given links, and the bytes that a link's own protocols add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

# Of one packet: Ethernet 14, IPv4 20, TCP 20 and its timestamps 12; 1448 of 1514 bytes are left.
PACKET_HEADER_BYTES: Final = 66
# What gloo sends before each message: length, kind, slot and offsets (`Op` in its tcp/pair.h).
MESSAGE_HEADER_BYTES: Final = 48


def header_bytes(num_packets: int, num_messages: int) -> int:
    """Bytes of the headers of so many TCP packets, acknowledgements included, and messages."""
    return PACKET_HEADER_BYTES * num_packets + MESSAGE_HEADER_BYTES * num_messages


def least_step_s(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    *,
    chunks: int,
    message_s: float,
    sent_s: Sequence[float],
    received_s: Sequence[float],
    num_cores: int,
) -> float:
    """Seconds that a step takes at least, whatever the schedule.

    Each stage's processor and each host's two ways of its link is a resource: until it has its
    first work the pipeline fills up to it, then it is busy with all its work, and after its last
    work the pipeline drains from it. The cores together are a resource without either.

    Args:
        forward_s: of one microbatch, for each stage.
        backward_s: likewise.
        chunks: microbatches in a step.
        message_s: of one message on a link.
        sent_s: of all that a host sends in a step on its link, for each host.
        received_s: of all that it receives.
        num_cores: that the hosts share.
    """
    last = len(forward_s) - 1
    bounds = [chunks * (sum(forward_s) + sum(backward_s)) / num_cores]
    for stage, (forward, backward) in enumerate(zip(forward_s, backward_s, strict=True)):
        # From the step's start to this stage's first input; from its last gradient to the end.
        fill = sum(forward_s[:stage]) + stage * message_s
        drain = sum(backward_s[:stage]) + stage * message_s
        # From its first output, or after its last output, until the gradient is back.
        later = slice(stage + 1, None)
        away = 2 * (last - stage) * message_s + sum(forward_s[later]) + sum(backward_s[later])
        bounds.append(fill + chunks * (forward + backward) + drain)
        # It sends activations first, the last stage only gradients; the first stage only
        # activations, the others gradients last. The message itself is part of the work.
        to_first = fill + forward + (backward if stage == last else 0.0)
        from_last = away - message_s + backward if stage == 0 else drain - message_s
        bounds.append(to_first + sent_s[stage] + from_last)
        # It receives activations first, the first stage only gradients, and gradients last, the
        # last stage only activations.
        to_first = forward + away - message_s if stage == 0 else fill - message_s
        from_last = backward + drain + (forward if stage == last else 0.0)
        bounds.append(to_first + received_s[stage] + from_last)
    return max(bounds)
