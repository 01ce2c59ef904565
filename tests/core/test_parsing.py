"""Spec strings: what each means, back and forth, and errors that name the nearest name."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from methods import ALL

from mpcomp import (
    AQSGD,
    EF21,
    Cast,
    EFMixed,
    ErrorFeedback,
    FixedPoint,
    Identity,
    Quantize,
    RandomBlock,
    RandomK,
    SameIndices,
    Sign,
    TopK,
    parse,
)

MEANINGS = {
    "none": Identity(),
    "identity": Identity(),
    "bf16": Cast("bf16"),
    "fp16": Cast("fp16"),
    "fp8": Cast("fp8_e4m3"),
    "fp8_e5m2": Cast("fp8_e5m2"),
    "topk:0.1": TopK(0.1),
    "topk:0.1:row": TopK(0.1, scope="row"),
    "topk:0.1:scope=tensor+fp16": TopK(0.1, scope="tensor", values=Cast("fp16")),
    "topk:0.1+quant:8": TopK(0.1, values=Quantize(8)),
    "topk:1e-2": TopK(0.01),
    "randomk:0.1:unbiased=true": RandomK(0.1, unbiased=True),
    "randomblock:0.1+bf16": RandomBlock(0.1, values=Cast("bf16")),
    "quant:4": Quantize(4),
    "quant:4:scale=128": Quantize(4, scale=128),
    "quant:4:128": Quantize(4, scale=128),
    "quant:4:scale=channel:rounding=stochastic": Quantize(4, "channel", rounding="stochastic"),
    "quant:4:scale=token": Quantize(4, scale="token"),
    "quant:8:mode=none": Quantize(8),
    "fixed:4:scale=tensor": FixedPoint(4, "tensor"),
    "sign": Sign(),
    "sign:sample": Sign("sample"),
    "same": SameIndices(),
    "same+fp16": SameIndices(Cast("fp16")),
    "same:where=nonzero+fp16": SameIndices(Cast("fp16"), where="nonzero"),
    "ef+topk:0.1": ErrorFeedback(TopK(0.1)),
    "ef:lr_scaled=True+topk:0.1": ErrorFeedback(TopK(0.1), lr_scaled=True),
    "efmixed:second=remainder+topk:0.1": EFMixed(TopK(0.1), second="remainder"),
    "ef21+topk:0.1+quant:8": EF21(TopK(0.1, values=Quantize(8))),
    "ef21:storage=8+quant:4": EF21(Quantize(4), storage=8),
    "aqsgd+quant:4": AQSGD(Quantize(4)),
    "aqsgd:storage=fp16:key=augmented+quant:4": AQSGD(Quantize(4), storage="fp16", key="augmented"),
    "aqsgd:cap_bytes=1000:first=quant/8/scale=sample+quant:4": AQSGD(
        Quantize(4), cap_bytes=1000, first=Quantize(8, "sample")
    ),
    "  topk:0.1 ": TopK(0.1),
}


@pytest.mark.parametrize("spec", MEANINGS)
def test_a_spec_means_one_value(spec):
    assert parse(spec) == MEANINGS[spec] and type(parse(spec)) is type(MEANINGS[spec])


@pytest.mark.parametrize("method", ALL, ids=str)
def test_every_method_has_a_spec_that_gives_it_back(method):
    again = parse(str(method))
    assert again == method and type(again) is type(method)
    assert not set(str(method)) & set(" ;&|<>()$`\\\"'*?[]#~!{}")  # safe in a shell


_scales = st.one_of(st.sampled_from(["tensor", "sample", "channel", "token"]), st.integers(1, 999))
_quantize = st.builds(
    Quantize,
    st.integers(1, 8),
    _scales,
    st.sampled_from([None, "minmax", "maxabs"]),
    st.sampled_from(["nearest", "stochastic"]),
)
_keeps = st.floats(0, 1, exclude_min=True)
_values = st.one_of(st.none(), _quantize, st.sampled_from([Cast("fp16"), Sign(7)]))
_topk = st.builds(TopK, _keeps, st.sampled_from(["sample", "row", "tensor"]), _values)
_randomk = st.builds(RandomK, _keeps, st.just(False), _values)
_feedback = st.builds(
    AQSGD,
    st.one_of(_topk, _randomk, _quantize),
    first=st.one_of(st.none(), _quantize, _topk),
    storage=st.one_of(st.sampled_from(["fp32", "fp16", "bf16"]), st.integers(1, 8)),
    cap_bytes=st.one_of(st.none(), st.integers(1, 10**12)),
    key=st.sampled_from(["sample", "augmented", "batch"]),
)


@settings(max_examples=25)
@given(method=st.one_of(_quantize, _topk, _randomk, _feedback))
def test_any_method_has_a_spec_that_gives_it_back(method):
    assert parse(str(method)) == method


@pytest.mark.parametrize(
    "spec, message",
    [
        ("ef21:topk:0.1", r"topk is a method and no setting of ef21.*write ef21\+topk:0.1"),
        ("ef:decay=0.9:quant:4", r"write ef:decay=0.9\+quant:4"),
        ("topk:0.1:fp16", r"fp16 is a method.*write topk:0.1\+fp16"),
        ("topkk:0.1", r"unknown method 'topkk'.*did you mean 'topk'.*known: .*aqsgd"),
        ("quantize:4", "did you mean 'quant'"),
        ("ef12+topk:0.1", "did you mean 'ef21'"),
        ("", "expected text such as 'topk:0.1'"),
        ("topk", r"topk needs keep; write topk:<keep>"),
        ("ef21", r"ef21 needs inner; write ef21\+topk:0.1"),
        ("topk:ten", "keep of topk .*'ten' is not float"),
        ("topk:0.1:scop=row", "unknown setting 'scop' of topk.*did you mean 'scope'"),
        ("quant:4:loud=1", r"unknown setting 'loud'.*known: bits, scale, mode, rounding"),
        ("quant:4.5", "bits of quant .*'4.5' is not int"),
        ("quant:9", "bits=9: Quantize packs 1 to 8 bits"),
        ("quant:0", "bits=0"),
        ("topk:0", r"keep=0.0.*\(0, 1\]"),
        ("topk:10", r"keep=10.0.*for 10 % write 0.1"),
        ("topk:-0.1", "keep=-0.1"),
        ("topk:nan", "keep=nan"),
        ("topk:0.1+topk:0.1", "cannot be selected again; lower keep"),
        ("topk:0.1+ef21+quant:4", "feedback goes round the whole"),
        ("ef+ef21+topk:0.1", "one feedback method a link"),
        ("quant:4+fp16", r"quant takes nothing behind a '\+'"),
        ("none:3", "none takes no further '3'"),
        ("randomk:0.1:unbiased=maybe", "unbiased of randomk .*'maybe' is not bool"),
        ("ef+randomk:0.1:unbiased=true", "unbiased=True inside feedback diverges"),
        ("efmixed+quant:4", "EFMixed halves"),
        ("ef:storage=int8+topk:0.1", "storage='int8'"),
        ("topk:0.1+", "unknown method ''"),
    ],
)
def test_a_bad_spec_says_what_is_wrong_and_how_to_write_it(spec, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse(spec)
    assert repr(spec) in str(caught.value)  # the whole spec is named


@pytest.mark.parametrize("spec", [None, 3, TopK(0.1)])
def test_what_is_no_text(spec):
    with pytest.raises(ValueError, match="expected text"):
        parse(spec)
