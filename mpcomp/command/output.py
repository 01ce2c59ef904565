"""The one JSON object that a command prints with ``--json``."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from typing import Any

__all__ = ["print_json"]


def print_json(options: argparse.Namespace, value: Mapping[str, Any]) -> None:
    """Prints an object on standard output if ``--json`` was given.

    Args:
        options: of the command; standard output is their ``out``.
        value: of what JSON can hold; numbers that are not finite become null.
    """
    if options.json:
        print(json.dumps(_finite(value), indent=1), file=options.out, flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
