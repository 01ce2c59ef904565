"""The account of a run, from its line in a file of results, of this version or an earlier one.

Lines have an ``account`` since whole steps are counted (`mpcomp.core.account`). Before that, those
of studies of text had the bytes of cuts and ties apart, those of a GPU a ``traffic``, those of
images one sum, as nothing else is sent there; and some fine-tunings have the bytes of cuts alone,
so that of their steps nothing more is known.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import nan
from typing import Any, Final

from mpcomp.core.account import Account
from mpcomp.core.sent import Sent

__all__ = ["FORMER", "REFERENCE", "account_of", "reference_among", "reference_note"]

#: The row that others are held to: bf16 at the cuts, and where a tie is sent, there.
REFERENCE: Final = "bf16"
#: What that was in results from before: tensors as they are, in the dtype of the run.
FORMER: Final = "none"


def reference_among(rows: Collection[str], prefix: str = "") -> str:
    """The row that others in a file are held to.

    Args:
        rows: names in the file.
        prefix: of all rows that share a reference, as in "LoRA, ".
    """
    return prefix + (FORMER if prefix + FORMER in rows else REFERENCE)


def reference_note(reference: str) -> str:
    """A sentence on what costs and differences are held to."""
    if reference.endswith(FORMER):
        return (
            f"Costs are against `{reference}`, uncompressed in the dtype of the run, bytes against "
            "bf16: these runs were made before both were of one run."
        )
    return f"Costs and bytes are against bf16 at the cuts (`{reference}`)."


def account_of(line: Mapping[str, Any], dense_bits: int = 32) -> Account:
    """The account of a run, or of a step of it; what its line does not tell is not known.

    Args:
        line: of a file of results.
        dense_bits: of an element that goes uncompressed, in a line that does not count elements.
    """
    if "cut_bytes_per_step" in line:  # after the warm-up, where a row has one
        return Account(_per_step(line, "cut"), _per_step(line, "tie"))
    if "account" in line:
        return Account.from_dict(line["account"])
    traffic = (line.get("history") or [{}])[-1].get("traffic")
    if traffic:
        cuts, ties = (
            Sent(traffic.get(f"{each}_bytes", nan), nan, traffic.get(f"{each}_elements", nan))
            for each in ("cut", "tie")
        )
        return Account(cuts, ties)
    unknown = Account.from_dict(None)
    if "cut_bytes_by_epoch" in line:
        by_epoch = line["cut_bytes_by_epoch"]
        elements = len(by_epoch) * line["bf16_bytes_an_epoch"] / 2
        # With LoRA the embedding is not trained, so that nothing goes for it.
        ties = Sent() if line.get("lora") else unknown.ties
        return Account(Sent(sum(by_epoch), nan, elements), ties)
    if "dense_bytes" not in line:
        return unknown
    sent = Sent.from_dict({"num_elements": 8 * line["dense_bytes"] / dense_bits, **line})
    return Account(sent)


def _per_step(line: Mapping[str, Any], where: str) -> Sent:
    """Of cuts or ties; before elements were counted, these runs were in fp32."""
    dense = line[f"{where}_dense_bytes_per_step"]
    elements = line.get(f"{where}_elements_per_step", dense / 4)
    return Sent(line[f"{where}_bytes_per_step"], dense, elements)
