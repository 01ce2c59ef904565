"""`mpcomp methods`: every method, and what each does to one tensor on this machine."""

from __future__ import annotations

import argparse
import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

from mpcomp.command.output import print_json
from mpcomp.core.spec import closest
from mpcomp.plan.catalogue import KINDS, SELECTION, Entry, Figures, entries, entry_of, figures_of
from mpcomp.plan.planner import CHANGES

__all__ = ["add_to"]

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: A microbatch of 8 rows of 256 tokens, as wide as SmolLM2-135M.
SHAPE: Final = "8,256,576"
DTYPE: Final = "bf16"
#: Larger tensors are no message of a cut, and would take the memory of several copies.
MOST_ELEMENTS: Final = 1 << 27
#: Characters of a line of the table.
WIDTH: Final = 120
TITLES: Final[Mapping[str, str]] = {
    "compressor": "Compressors",
    "feedback": "Feedback: a memory round a compressor",
    "adaptive": "Adaptive at cuts: the ratio is chosen while training (no figures)",
    "replicas": "Between replicas: of gradients over many steps (no figures)",
}
EPILOG = """\
examples:
  mpcomp methods
  mpcomp methods --shape 32,64,32,32 --dtype fp32
  mpcomp methods --only quant:4:scale=token topk:0.1+quant:8 ef21+topk:0.1
  mpcomp methods --tensor activation.pt --json
"""


def add_to(commands: Any) -> None:
    """Adds the command to others."""
    parser = commands.add_parser(
        "methods",
        help="list every method, with its bytes, error and speed on one tensor",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("--only", nargs="+", metavar="SPEC", help="these methods, in settings of your own")
    add("--shape", metavar="N,N,...", help=f"of a Gaussian tensor, rows first (default {SHAPE})")
    add("--dtype", choices=DTYPES, help=f"of it (default {DTYPE})")
    add("--seed", type=int, help="of it (default 0)")
    add("--tensor", type=Path, metavar="FILE", help="a saved one: .pt, .safetensors or .npy")
    add("--key", metavar="NAME", help="of the tensor, where the file has several")
    add("--repeats", type=int, default=5, help="that speeds are medians of (default %(default)s)")


def run(options: argparse.Namespace) -> None:
    """Measures and prints.

    Raises:
        ValueError: no such method, or a tensor that cannot be read or sent.
        OSError: the file cannot be read.
    """
    if options.repeats < 1:
        raise ValueError(f"--repeats {options.repeats}: pass at least 1")
    chosen = [entry_of(spec) for spec in dict.fromkeys(options.only or ())] or entries()
    x, described = _tensor(options)
    found: dict[Entry, Figures | str | None] = {}
    with tqdm(chosen, unit="method", leave=False) as bar:
        for entry in bar:
            bar.set_postfix_str(entry.spec)
            found[entry] = _figures(entry, x, options.repeats)
    if options.json:
        about = {
            "tensor": described,
            "shape": list(x.shape),
            "dtype": _dtype_name(x.dtype),
            "repeats": options.repeats,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
        print_json(options, {**about, "methods": [_row(*item) for item in found.items()]})
        return
    for kind in KINDS:
        of_kind = {entry: figures for entry, figures in found.items() if entry.kind == kind}
        if of_kind:
            print(f"{TITLES[kind]}\n{_table(of_kind, x.dtype)}\n")
    for line in _notes(found, x, described, options.repeats):
        print(line)


def _figures(entry: Entry, x: Tensor, repeats: int) -> Figures | str | None:
    """The figures; why this tensor has none with this method; None of what is not measured."""
    if not entry.is_measured:
        return None
    try:
        return figures_of(entry, x, repeats=repeats)
    except ValueError as error:
        return str(error)


# -- the tensor -----------------------------------------------------------------------------------


def _tensor(options: argparse.Namespace) -> tuple[Tensor, str]:
    """The tensor that methods are measured on, and a description of its data."""
    if options.tensor is None:
        if options.key is not None:
            raise ValueError(
                f"--key {options.key} is the name of a tensor in a file: pass --tensor"
            )
        shape = _shape(options.shape or SHAPE)
        seed = 0 if options.seed is None else options.seed
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return x.to(DTYPES[options.dtype or DTYPE]), f"Gaussian data of seed {seed}"
    for name in ("shape", "dtype", "seed"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name} is of a Gaussian tensor: leave it out with --tensor")
    where = f"--tensor {options.tensor}"
    x = _loaded(options.tensor, options.key)
    if not x.is_floating_point() or x.dtype.itemsize < 2:
        raise ValueError(f"{where} is {x.dtype}: expected floating point of 16 bits or more")
    if x.dim() == 0 or x.numel() == 0:
        raise ValueError(f"{where} has shape {list(x.shape)}: expected [rows, ...], not empty")
    _check_size(where, x.numel())
    if not x.isfinite().all():
        raise ValueError(f"{where} has NaN or Inf, which no link sends: save a finite one")
    return x.contiguous(), f"{options.tensor.name}{f' {options.key}' if options.key else ''}"


def _shape(text: str) -> list[int]:
    sizes = [int(word) if word.isascii() and word.isdigit() else 0 for word in text.split(",")]
    if min(sizes) < 1:
        raise ValueError(f"--shape {text}: expected sizes from 1 up, as in --shape {SHAPE}")
    _check_size(f"--shape {text}", math.prod(sizes))
    return sizes


def _check_size(where: str, num_elements: int) -> None:
    if num_elements > MOST_ELEMENTS:
        raise ValueError(
            f"{where} has {num_elements} elements: expected at most {MOST_ELEMENTS}; "
            "pass fewer rows"
        )


def _loaded(path: Path, key: str | None) -> Tensor:
    """The tensor in a file, or that of the name.

    Raises:
        ValueError: not such a file, or it holds something else.
        OSError: there is no such file.
    """
    readers: dict[str, Callable[[Path], Any]] = {
        ".pt": _read_pt,
        ".safetensors": load_file,
        ".npy": _read_npy,
    }
    if path.suffix not in readers:
        raise ValueError(f"--tensor {path}: expected a file that ends in {', '.join(readers)}")
    if not path.is_file():
        raise FileNotFoundError(f"--tensor {path}: there is no such file")
    try:
        held = readers[path.suffix](path)
    except (pickle.UnpicklingError, SafetensorError, RuntimeError, ValueError, EOFError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"--tensor {path} cannot be read as {path.suffix}: {reason}; save one tensor, "
            "as with torch.save(x, 'x.pt')"
        ) from error
    if isinstance(held, Mapping):
        names = [str(name) for name, value in held.items() if isinstance(value, Tensor)]
        if key is None and len(names) == 1:
            key = names[0]
        if key not in names:
            given = "" if key is None else f" no {key!r}{closest(key, names)} but"
            shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise ValueError(f"--tensor {path} has{given} {shown or 'no tensor'}: pass --key NAME")
        held = held[key]
    elif key is not None:
        raise ValueError(f"--key {key}: {path} has one tensor without a name; leave --key out")
    if not isinstance(held, Tensor):
        raise ValueError(f"--tensor {path} holds a {type(held).__name__}: save one tensor")
    return held.detach()


def _read_pt(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _read_npy(path: Path) -> Tensor:
    """The tensor of an array.

    Raises:
        ValueError: it is of a type that no tensor has.
    """
    array = np.load(path, allow_pickle=False)
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise ValueError(str(error)) from error


# -- the output -----------------------------------------------------------------------------------


def _row(entry: Entry, figures: Figures | str | None) -> dict[str, Any]:
    """All that is known of a method, as JSON can hold it."""
    reason = figures if isinstance(figures, str) else None
    known = asdict(figures) if isinstance(figures, Figures) else None
    return {**asdict(entry), "figures": known, "refused": reason}


def _table(found: Mapping[Entry, Figures | str | None], dtype: torch.dtype) -> str:
    """The table of one kind, no wider than a terminal."""
    own = _dtype_name(dtype)
    measured = any(entry.is_measured for entry in found)
    headers = ["spec"]
    if measured:
        headers += ["below\nbf16"] if own == "bf16" else ["below\nbf16", f"below\n{own}"]
        headers += ["error", "encode\nM/s", "decode\nM/s"]
    headers += ["what it is"]
    rows = []
    for entry, figures in found.items():
        cells = [""] * (len(headers) - 2)
        if isinstance(figures, Figures):
            below = [figures.below_bf16, figures.below_own]
            cells = [f"{fewer:.4g}x" for fewer in below[: 1 if own == "bf16" else 2]]
            cells += [f"{figures.relative_error:.3f}"]
            rates = (figures.encode_melems_s, figures.decode_melems_s)
            cells += [f"{rate:.3g}" if rate < 100 else f"{rate:.0f}" for rate in rates]
        rows.append([entry.spec, *cells, entry.summary])
    # What is left for the last column; tabulate pads a heading by two, and columns by two.
    taken = 0
    for heading, *cells in zip(headers[:-1], *(row[:-1] for row in rows), strict=True):
        longest = max(len(line) for line in heading.split("\n")) + 2
        taken += max(longest, *(len(cell) for cell in cells)) + 2
    widths = [*(None for _ in headers[:-1]), WIDTH - taken]
    align = ["left", *("right" for _ in headers[1:-1]), "left"]
    return tabulate(rows, headers, disable_numparse=True, maxcolwidths=widths, colalign=align)


def _notes(
    found: Mapping[Entry, Figures | str | None], x: Tensor, described: str, repeats: int
) -> list[str]:
    """Lines under the table: what the figures are of, and what they do not say."""
    lines = []
    for entry, figures in found.items():
        said = figures.notes if isinstance(figures, Figures) else (figures,) if figures else ()
        lines += [f"{entry.spec}: {note}" for note in said]
    if any(entry.is_measured for entry in found):
        size = f"{list(x.shape)} {_dtype_name(x.dtype)}"
        lines.append(
            f"{described}, {size}; threads: {torch.get_num_threads()}, torch {torch.__version__}. "
            "Bytes are of messages, header\nincluded; error is ||x - y|| / ||x|| of what arrives; "
            f"speeds are million elements a second, medians of {repeats}."
        )
        if described.startswith("Gaussian"):
            lines.append(
                "Real activations differ: outliers, and directions that many tokens share. "
                "Pass one with --tensor."
            )
    if any(entry.kind == "feedback" for entry in found):
        lines.append(
            f"Feedback: message {repeats + 2} of a tensor that changes by {100 * CHANGES[0]:g} % "
            "of its energy each time, as a sample's does that comes\nagain. ef21 keeps a row's "
            "place and not its sample, so it may arrive worse; ef, efmixed and conef send later "
            "what\nthey left out, so one message alone may be far off."
        )
    if any(entry.spec.partition(":")[0] == "same" for entry in found):
        lines.append(f"same: the elements that {SELECTION} has just selected.")
    return lines


def _dtype_name(dtype: torch.dtype) -> str:
    names = {known: name for name, known in DTYPES.items()}
    return names.get(dtype, str(dtype).removeprefix("torch."))
