"""The form of a plan: a page that answers "what network do I need?" without Python.

    python -m recipes.lab.plan_form            # writes docs/start/network_form.html
    python -m recipes.lab.plan_form --check    # says whether it is what this would write

The page calculates as `mpcomp.plan` does. Its figures are gathered here: what blocks of known
models compute (`mpcomp.plan.profile`), what settings cost in quality
(`mpcomp.plan.known_quality`), the bits an element that they sent in those studies, and the seconds
that coding took (`recipes.lab.plan_coding`).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mpcomp.comm.all_gather import RADIX
from mpcomp.comm.connections import CONNECTIONS
from mpcomp.command.models import candidate
from mpcomp.command.plan import SLACK
from mpcomp.core.account import agreed_in_step
from mpcomp.page import write_page
from mpcomp.plan.coding import Coding, CutCost
from mpcomp.plan.curve import LONGEST
from mpcomp.plan.known_quality import TASKS, UNITS, Known, known_of, methods_of
from mpcomp.plan.network import FIRST_WINDOW, PACKET_SHARE
from mpcomp.plan.outcome import RECOMMENDED
from mpcomp.plan.planner import Pair
from mpcomp.plan.profile import BACKWARD_OVER_FORWARD, Profile, count_profile
from mpcomp.plan.timeline import Messages
from recipes.lab.plan_coding import CODING, kind_of
from recipes.lab.rate_quality import points_of
from recipes.run_folder import read_json_lines

__all__ = ["IMAGES", "PAGE", "TEXT", "cost_of", "data"]

PAGE: Final = CODING.parents[1] / "start" / "network_form.html"
#: Bits of an element without compression in a study, where a run was not in fp32.
DENSE_BITS: Final = {"cifar10_study": 16, "cifar10_study_decayed": 16}


def _llama(hidden: int, layers: int, heads: int, kv: int, ffn: int, vocab: int, tied: bool) -> str:
    return (
        f"llama --config hidden_size={hidden} num_hidden_layers={layers} "
        f"num_attention_heads={heads} num_key_value_heads={kv} intermediate_size={ffn} "
        f"vocab_size={vocab} tie_word_embeddings={str(tied).lower()} max_position_embeddings=8192"
    )


#: Language models: name in the form -> as ``mpcomp plan`` takes it.
TEXT: Final[Mapping[str, str]] = {
    "GPT-2": "gpt2",
    "GPT-2 medium": "gpt2-medium",
    "GPT-2 large": "gpt2-large",
    "GPT-2 XL": "gpt2-xl",
    "SmolLM2-135M": _llama(576, 30, 9, 3, 1536, 49152, True),
    "SmolLM2-360M": _llama(960, 32, 15, 5, 2560, 49152, True),
    "SmolLM2-1.7B": _llama(2048, 24, 32, 32, 8192, 49152, True),
    "Llama 1B": _llama(2048, 16, 32, 8, 8192, 128256, True),
    "Llama 3B": _llama(3072, 28, 24, 8, 8192, 128256, True),
    "Llama 8B": _llama(4096, 32, 32, 8, 14336, 128256, False),
    "Llama 70B": _llama(8192, 80, 64, 8, 28672, 128256, False),
}
IMAGES: Final[Mapping[str, str]] = {
    "ResNet-18": "resnet18",
    "ResNet-34": "resnet34",
    "ResNet-50": "resnet50",
    "ResNet-101": "resnet101",
}
#: Tokens of a row at which operations are counted: they grow with it, and with its square.
_LENGTHS: Final = (512, 1024)


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the page, or says whether it is current."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.lab.plan_form",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    if not parser.parse_args(argv).check:
        write(PAGE)
        return
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / PAGE.name
        write(made)
        if made.read_text() != PAGE.read_text():
            sys.exit(f"{PAGE} is not what python -m recipes.lab.plan_form writes; run it")


def write(path: Path) -> None:
    """Writes the page."""
    write_page(path, "recipes.lab", data(), template="plan_form.html")


def data() -> dict[str, Any]:
    """All figures that the page calculates with."""
    return {
        "tasks": dict(TASKS),
        "units": dict(UNITS),
        "settings": {task: [_setting(task, pair) for pair in methods_of(task)] for task in TASKS},
        "text": {name: _text(command) for name, command in TEXT.items()},
        "images": {name: _images(command) for name, command in IMAGES.items()},
        "cores": _cores(),
        "constants": {
            "window_bytes": FIRST_WINDOW,
            "packet_share": PACKET_SHARE,
            "connections": CONNECTIONS,
            "radix": RADIX,
            "slack": SLACK,
            "backward_over_forward": BACKWARD_OVER_FORWARD,
            "recommended": RECOMMENDED,
            "longest": LONGEST,
            # Of two ranks without a link, and for each link.
            "agreed_bytes": agreed_in_step(2, 0).wire_bytes,
            "agreed_bytes_of_link": agreed_in_step(2, 1).wire_bytes
            - agreed_in_step(2, 0).wire_bytes,
        },
    }


def _cores() -> dict[str, Any]:
    """Coding on many cores, times faster than on one (`recipes.bench.gpu_check`)."""
    method = "auto:scratch"
    part = json.loads(CODING.with_name("gpu_check.json").read_text())["parts"]["coding"]
    seconds = {
        row["threads"]: sum(row[name] for name in Coding._fields)
        for row in part["rows"]
        if row["row"] == method
    }
    most = max(seconds)
    return {
        "method": method,
        "threads": most,
        "times": seconds[1] / seconds[most],
        "beside": part["stamp"]["gpu"],
    }


def cost_of(task: str, pair: Pair, num_elements: int) -> CutCost:
    """The cost of one microbatch at a cut, by the figures of the page.

    Args:
        task: in `mpcomp.plan.known_quality.TASKS`.
        pair: of methods that are known for it.
        num_elements: of the microbatch at the cut.
    """
    setting = _setting(task, pair)
    messages = Messages(*(bits / 8 * num_elements for bits in setting["bits"]))
    return CutCost(Coding(*(1e-9 * ns * num_elements for ns in setting["coding_ns"])), messages)


def _setting(task: str, pair: Pair) -> dict[str, Any]:
    """A setting: bits of an element and coding, each way, and what it costs."""
    known = known_of(task, *pair)
    assert known is not None
    (row,) = (
        row
        for row in json.loads(CODING.read_text())["rows"]
        if (row["kind"], row["act"], row["grad"]) == (kind_of(task), *pair)
    )
    bits = row["bits"]
    if known.study:  # as many as there, shared by both ways as the tensors of the measurement are
        factor = 2 * _bits_in_study(known) / sum(bits)
        bits = [factor * each for each in bits]
    return {
        "act": pair[0],
        "grad": pair[1],
        "bits": [float(f"{each:.4g}") for each in bits],
        "coding_ns": [float(f"{each:.4g}") for each in row["coding_ns"]],
        "loss": known.loss,
        "half_width": known.half_width,
        "n": known.n,
        "study": known.study,
    }


def _bits_in_study(known: Known) -> float:
    """Bits of an element, the mean of both ways and of all epochs."""
    rows = read_json_lines(CODING.with_name(f"{known.study}.jsonl"))
    _, points = points_of(rows, dense_bits=DENSE_BITS.get(known.study, 32))
    return next(point.bits for point in points if point.method == known.row)


def _profile(command: str, seq_len: int) -> tuple[Profile, Any]:
    """The profile of one row, on a machine of one operation a second, and the model."""
    name, *rest = command.split()
    config = dict(entry.split("=", 1) for entry in rest if "=" in entry)
    found = candidate(name, rows=1, seq_len=seq_len, config=config)
    return count_profile(found.model, found.sample, flops_per_s=1.0), found.model


def _text(command: str) -> dict[str, Any]:
    """A language model: operations of a block, for each token and for each pair of tokens."""
    (short, _), (long, model) = (_profile(command, length) for length in _LENGTHS)
    first, last = (
        [profile.blocks[i].compute.forward_s for profile in (short, long)] for i in (0, -1)
    )
    if len({block.compute for block in long.blocks[:-1]}) > 1:
        raise ValueError(f"{command}: blocks differ, which the form does not know")
    a, b = _LENGTHS
    square = (first[1] / b - first[0] / a) / (b - a)
    head = (last[1] - first[1]) / b
    return {
        "command": command,
        "hidden": long.blocks[0].output.last_dim,
        "layers": long.num_blocks,
        "vocabulary": long.blocks[-1].output.last_dim,
        "tied": bool(long.ties),
        "positions": model.config.max_position_embeddings,
        "token": first[1] / b - square * b,
        "pair": square,
        "head": head,
        "parameters": long.num_parameters,
    }


def _images(command: str) -> dict[str, Any]:
    """A convolutional net: of each block operations and elements that it hands on, an image."""
    profile, _ = _profile(command, 1)
    return {
        "command": command,
        "blocks": [[block.compute.forward_s, block.output.numel] for block in profile.blocks],
        "parameters": profile.num_parameters,
    }


if __name__ == "__main__":
    main()
