"""Every method is under the laws: found by its class, a frozen value with a spec string."""

import copy
import dataclasses
import pickle

import pytest
import torch
from methods import ALL, BETWEEN_REPLICAS, COMPRESSORS, EXAMPLES, SELECTING, drawn

import mpcomp
from mpcomp import QSGD, Quantize, RandomK, Sign, TensorMeta, TopK, parse
from mpcomp.core.spec import SpecValue, registered


def library_methods() -> set[type[SpecValue]]:
    return {cls for cls in registered(SpecValue) if cls.__module__.startswith("mpcomp.")}


def test_every_method_of_the_library_has_examples_in_the_law_tests():
    assert library_methods() == EXAMPLES.keys() | BETWEEN_REPLICAS.keys()


def test_every_method_is_exported():
    for cls in library_methods():
        assert getattr(mpcomp, cls.__name__) is cls
        assert cls.__name__ in mpcomp.__all__


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


@pytest.mark.parametrize("compressor", SELECTING, ids=str)
@pytest.mark.parametrize("cf", [1, 4, 20.0])
def test_with_cf_sends_one_element_in_cf(compressor, cf):
    faster = compressor.with_cf(cf)
    assert type(faster) is type(compressor) and faster.values == compressor.values
    assert faster.keep == pytest.approx(1 / cf)
    x = torch.randn(4000)
    payload = faster.compress(x, drawn())
    assert faster.indices(payload, TensorMeta.of(x), drawn()).numel() == -(-4000 // cf)


@pytest.mark.parametrize("cf", [1, 4, 20.0])
@pytest.mark.parametrize("compressor", [Quantize(4, scale=128), QSGD(4, group=100)], ids=str)
def test_with_cf_sets_the_bits_of_a_quantizer(compressor, cf):
    """floor(32 / cf), within what can be packed; nothing else is changed."""
    fewest = 1 if isinstance(compressor, Quantize) else 2
    bits = {1: 8, 4: 8, 20.0: fewest}[cf]
    assert compressor.with_cf(cf) == dataclasses.replace(compressor, bits=bits)
    assert compressor.with_cf(32 / 5).bits == 5 and compressor.with_cf(32 / 5 + 0.1).bits == 4


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
