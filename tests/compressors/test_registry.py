"""Every method is under the laws: found by its class, a frozen value with a spec string."""

import copy
import dataclasses
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from everyday import slow_after
from methods import ALL, BETWEEN_REPLICAS, COMPRESSORS, EXAMPLES, SELECTING, drawn

import mpcomp
from mpcomp import QSGD, Quantize, RandomK, Sign, TensorMeta, TopK, parse
from mpcomp.core.spec import SpecValue, registered


def library_methods() -> set[type[SpecValue]]:
    return {cls for cls in registered(SpecValue) if cls.__module__.startswith("mpcomp.")}


def test_every_method_of_the_library_has_examples_in_the_law_tests():
    """A module that is put into one of the folders of methods is under the laws, or fails here."""
    missing = library_methods() - (EXAMPLES.keys() | BETWEEN_REPLICAS.keys())
    assert not missing, f"give examples of {missing} in tests/methods.py"
    assert library_methods() == EXAMPLES.keys() | BETWEEN_REPLICAS.keys()


def test_every_method_is_exported():
    for cls in library_methods():
        assert getattr(mpcomp, cls.__name__, None) is cls, f"export {cls} from mpcomp"
        assert cls.__name__ in mpcomp.__all__


ROOMS = ["compressors", "feedback", "data_parallel"]  # the folders of methods

HALF = """
from dataclasses import dataclass
from typing import ClassVar

from mpcomp.compressors.cast import Cast


@dataclass(frozen=True)
class Dropped(Cast):
    dtype: str = "fp16"
    spec: ClassVar[str] = "dropped"
    aliases = {}
"""

FOUND = """
import importlib, sys
room = importlib.import_module("mpcomp." + sys.argv[1])
import mpcomp
from mpcomp.core.spec import import_all
room.__path__.append(sys.argv[2])
import_all(room.__name__, room.__path__)
print(mpcomp.parse("topk:0.1+dropped"), mpcomp.parse("ef+dropped:bf16"))
"""


@pytest.mark.parametrize("room", slow_after(1, ROOMS))
def test_a_module_in_the_folder_is_found(room, tmp_path):
    """One file, no line elsewhere."""
    (tmp_path / "half.py").write_text(HALF)
    root = str(Path(mpcomp.__file__).parents[1])
    found = subprocess.run(
        [sys.executable, "-c", FOUND, room, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == ["topk:0.1+dropped", "ef+dropped:bf16"]


@pytest.mark.parametrize("room", ROOMS)
def test_all_modules_of_a_room_of_methods_are_imported_with_it(room):
    folder = Path(mpcomp.__file__).parent / room
    names = {f"mpcomp.{room}.{path.stem}" for path in folder.glob("*.py")}
    assert names - {f"mpcomp.{room}.__init__"} <= sys.modules.keys()
    assert "import_all(__name__, __path__)" in (folder / "__init__.py").read_text()


def test_spec_names_and_aliases_are_unique():
    names = [name for cls in library_methods() for name in (cls.spec, *cls.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("method", ALL, ids=str)
def test_a_method_is_a_frozen_value(method):
    """Hashable, comparable, picklable, copyable, printable, and not to be changed."""
    again = pickle.loads(pickle.dumps(method))
    assert again == method == copy.deepcopy(method) and hash(again) == hash(method)
    assert type(method).__name__ in repr(method)
    for field in dataclasses.fields(method):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(method, field.name, None)


@pytest.mark.each_once
@pytest.mark.parametrize("selecting", SELECTING, ids=str)
@pytest.mark.parametrize("cf", [1, 4, 20.0])
def test_with_cf_sends_one_element_in_cf(selecting, cf):
    faster = selecting.with_cf(cf)
    assert type(faster) is type(selecting) and faster.values == selecting.values
    assert faster.keep == pytest.approx(1 / cf)
    x = torch.randn(4000)
    payload = faster.compress(x, drawn())
    assert faster.indices(payload, TensorMeta.of(x), drawn()).numel() == -(-4000 // cf)


@pytest.mark.parametrize("cf", [1, 4, 20.0])
@pytest.mark.parametrize("quantizer", [Quantize(4, scale=128), QSGD(4, group=100)], ids=str)
def test_with_cf_sets_the_bits_of_a_quantizer(quantizer, cf):
    """floor(32 / cf), within what can be packed; nothing else is changed."""
    fewest = 1 if isinstance(quantizer, Quantize) else 2
    bits = {1: 8, 4: 8, 20.0: fewest}[cf]
    assert quantizer.with_cf(cf) == dataclasses.replace(quantizer, bits=bits)
    assert quantizer.with_cf(32 / 5).bits == 5 and quantizer.with_cf(32 / 5 + 0.1).bits == 4


def test_with_cf_refuses_a_factor_below_one_and_methods_without_a_ratio():
    with pytest.raises(ValueError, match=r"cf=0.5.*at least 1"):
        TopK(0.1).with_cf(0.5)
    with pytest.raises(ValueError, match=r"cf=0.5.*at least 1"):
        Quantize(4).with_cf(0.5)
    with pytest.raises(TypeError, match=r"sign has no compression factor.*topk.*quant"):
        Sign().with_cf(4)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_wire_ratio_is_wire_bytes_over_dense_bytes(compressor):
    meta = TensorMeta((4, 64))
    wire = sum(part.numel * part.dtype.itemsize for part in compressor.layout(meta))
    assert compressor.wire_bytes(meta) == wire
    assert compressor.wire_ratio(meta) == wire / (4 * 64 * 4)
    assert compressor.wire_ratio(TensorMeta((0, 64))) == 1.0  # nothing to send, nothing saved


def test_spec_of_a_value_compressor_is_readable():
    assert str(parse("topk:0.1+quant:8")) == "topk:0.1+quant:8"
    assert str(RandomK(0.25, unbiased=True)) == "randomk:0.25:unbiased=True"
