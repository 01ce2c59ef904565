"""A layout is computed once for each pair of compressor and meta, and nothing is kept alive."""

import copy
import gc
import pickle
import weakref
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from methods import COMPRESSORS, round_trip

from mpcomp import Cast, SameIndices, TensorMeta, TopK
from mpcomp.compressors import Compressor
from mpcomp.compressors.base import or_dense
from mpcomp.core.context import Step
from mpcomp.links.link import Link

ASKED: Counter[TensorMeta] = Counter()


@dataclass(frozen=True)
class Counting(Cast):
    """A cast that counts how often its layout is computed."""

    dtype: str = "fp16"

    def layout(self, meta):
        ASKED[meta] += 1
        return super().layout(meta)


def test_a_layout_is_computed_once_for_each_meta():
    ASKED.clear()
    x, short = torch.randn(4, 16, 8), torch.randn(3, 16, 8)
    for _ in range(3):
        for tensor in (x, short):
            meta = TensorMeta.of(tensor)
            compressor = Counting()  # another object each time, of equal value
            assert compressor.layout(meta) == Cast("fp16").layout(meta)
            assert compressor.wire_bytes(meta) == tensor.numel() * 2
            assert or_dense(compressor, TensorMeta(tuple(tensor.shape))) is compressor
            round_trip(compressor, tensor)
    link = Link(Counting(), boundary=0, direction="act")
    for index in range(3):
        step = Step(index, train=True)
        link.message_bytes(TensorMeta.of(x), step, 0, x.device)
        link.decode(link.encode(x, step, 0), TensorMeta.of(x), step, 0)
    assert {TensorMeta((4, 16, 8)): 1, TensorMeta((3, 16, 8)): 1} == ASKED


def test_what_is_remembered_is_by_value_and_by_class():
    """A subclass has its own layout, and equal settings of other classes are other compressors."""

    @dataclass(frozen=True)
    class Twice(Cast):
        def layout(self, meta):
            return super().layout(meta) * 2

    meta = TensorMeta((2, 3))
    assert Twice("bf16").wire_bytes(meta) == 2 * Cast("bf16").wire_bytes(meta) == 24
    assert len(Twice("bf16").layout(meta)) == 2 and len(Cast("bf16").layout(meta)) == 1
    assert TopK(0.5).layout(meta) != TopK(1.0).layout(meta)
    assert TopK(0.5).layout(meta) != TopK(0.5).layout(meta.with_dtype(torch.float64))


def test_what_holds_tensors_is_not_kept_alive():
    """The positions of one microbatch must go with it."""
    positions = torch.tensor([1, 3])
    held = weakref.ref(positions)
    at = SameIndices().at(positions)
    meta = TensorMeta((2, 3))
    assert at.wire_bytes(meta) == 8 and at.layout(meta) == (TensorMeta((1, 2)),)
    round_trip(at, torch.randn(2, 3))
    del at, positions
    gc.collect()
    assert held() is None


def test_a_compressor_that_cannot_be_hashed_is_asked_each_time():
    class Loose(Compressor):
        """Neither frozen nor hashable."""

        __hash__ = None

        def __eq__(self, other):
            return True

        def layout(self, meta):
            return (meta,)

        def compress(self, x, generator=None):
            return (x,)

        def decompress(self, payload, meta, generator=None):
            return payload[0]

    assert Loose().wire_bytes(TensorMeta((2, 3))) == 24
    assert Loose().wire_bytes(TensorMeta((2, 4))) == 32


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_remembering_changes_nothing_of_a_value(compressor):
    before = pickle.dumps(compressor)
    compressor.layout(TensorMeta((4, 16, 8)))
    compressor.wire_bytes(TensorMeta((4, 16, 8)))
    assert pickle.dumps(compressor) == before


def test_a_meta_is_its_fields_alone():
    """Values computed from them are not pickled, compared, copied or shown."""
    meta, fresh = TensorMeta((4, 3, 5)), TensorMeta((4, 3, 5))
    before = pickle.dumps(meta)
    assert (meta.numel, meta.dense_bytes, meta.row_numel) == (60, 240, 15)
    assert pickle.dumps(meta) == before and pickle.loads(before) == meta
    assert meta == fresh and hash(meta) == hash(fresh) and repr(meta) == repr(fresh)
    assert copy.deepcopy(meta) == meta == copy.copy(meta)
    assert copy.copy(meta).dense_bytes == meta.with_dtype(torch.int32).dense_bytes == 240
    assert meta.with_rows(2).numel == 30


def test_tensors_alike_have_one_meta():
    assert TensorMeta.of(torch.zeros(2, 3)) is TensorMeta.of(torch.ones(2, 3))
    images = torch.zeros(2, 3, 4, 5)
    last = images.contiguous(memory_format=torch.channels_last)
    assert TensorMeta.of(images) is not TensorMeta.of(last)
