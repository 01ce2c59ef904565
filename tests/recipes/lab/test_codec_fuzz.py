"""All compressors under hard tensors; and that the program finds what it looks for."""

import pytest
import torch
from methods import COMPRESSORS

from mpcomp import TensorMeta, parse
from mpcomp.core.randomness import generator_for
from recipes.lab import codec_fuzz
from recipes.lab.codec_fuzz import DTYPES, HIDDEN, KINDS, NONFINITE, SHAPES, SPECS, fuzz

#: Of each kind and dtype one tensor, in turn of each shape.
TURN = len(KINDS) * len(DTYPES)


def test_nothing_finite_arrives_otherwise_and_no_nan_is_hidden():
    """Over 2,500 trials: each compressor of the laws sees all kinds in all dtypes."""
    shapes = len(SHAPES)
    trials = 0
    for number, compressor in enumerate(COMPRESSORS):
        start = number % shapes * TURN
        counted, first, _ = fuzz([compressor], range(start, start + TURN))
        trials += counted.total()
        assert not first
    assert trials == TURN * len(COMPRESSORS) > 2500


def test_the_program_tries_every_compressor():
    assert {type(one) for one in COMPRESSORS} == {type(parse(spec)) for spec in SPECS}


class Doubled:
    """Overflows. (No `Compressor`, as such a class would be one of the library's.)"""

    variable_length = False

    def compress(self, x, generator):
        return (x,)

    def decompress(self, payload, meta, generator):
        return payload[0] * 2

    def __str__(self):
        return type(self).__name__


class Blind(Doubled):
    """Hides a NaN."""

    def decompress(self, payload, meta, generator):
        return payload[0].nan_to_num()


class Raising(Doubled):
    """Fails for what it can name."""

    def compress(self, x, generator):
        raise RuntimeError("this is a bug")


@pytest.mark.parametrize(
    ("compressor", "kinds", "fault"),
    [
        (Doubled(), {"largest", "all the largest", "near the largest"}, NONFINITE),
        (Blind(), {"one NaN"}, HIDDEN),
        (Raising(), set(KINDS), "RuntimeError: this is a bug"),
    ],
    ids=["overflows", "hides", "raises"],
)
def test_faults_are_found(compressor, kinds, fault):
    trials, first, faults = fuzz([compressor], range(TURN))
    found = {kind for _, kind in first}
    assert kinds <= found and {what for _, what in first.values()} == {fault}
    assert faults.total() >= len(kinds) * len(DTYPES) and trials.total() == TURN
    number, _ = first[str(compressor), min(kinds)]
    again = fuzz([compressor], range(number, number + 1))[1]  # by its number alone
    assert again == {(str(compressor), min(kinds)): (number, fault)}


def test_what_a_selection_of_rotated_elements_leaves_out_is_not_hidden():
    rotation = parse("rotate+randomk:0.1")
    x = torch.randn(90, 4)  # the NaN is in four elements, of which one in ten is sent
    x[7, 1] = torch.nan
    arrive = {
        seed: bool(rotation.decompress(payload, TensorMeta.of(x), draw()).isnan().any())
        for seed in range(20)
        for draw in [lambda seed=seed: generator_for("codec", seed)]
        for payload in [rotation.compress(x, draw())]
    }
    assert set(arrive.values()) == {True, False}
    assert [codec_fuzz.fault_of(rotation, x, seed) for seed in arrive] == [None] * 20


def test_the_table_and_the_end_of_the_program(capsys, monkeypatch):
    codec_fuzz.main(["--tensors", "30", "--every", "--compressors", "fp16", "topk:0.1"])
    out = capsys.readouterr().out
    assert out.splitlines()[-1].split() == ["all", "60", "0"]
    monkeypatch.setattr(codec_fuzz, "fault_of", lambda *_: "wrong")
    with pytest.raises(SystemExit) as caught:
        codec_fuzz.main(["--tensors", "30", "--compressors", "fp16"])
    assert caught.value.code == 1 and "fp16, normal, tensor 0: wrong" in capsys.readouterr().out
    for options, message in (
        (["--tensors", "0"], "error: tensors is 0"),
        (["--compressors", "ef+topk:0.1"], "error: ef.* is no compressor"),
    ):
        with pytest.raises(SystemExit, match=message):
            codec_fuzz.main(options)


def test_what_is_scaled_up_saturates_and_hides_nothing():
    """At the largest value of its sign; what was not finite stays as it was."""
    for dtype in DTYPES:
        largest = torch.finfo(dtype).max
        x = torch.tensor([largest, -largest, torch.inf, -torch.inf, torch.nan, 0.0, 1.0, -2.0])
        x = x.to(dtype).repeat(8)
        compressor = parse("randomk:0.5:unbiased=true")
        draw = torch.Generator()
        payload = compressor.compress(x, draw.manual_seed(1))
        sent = compressor.indices(payload, TensorMeta.of(x), draw.manual_seed(1))
        y = compressor.decompress(payload, TensorMeta.of(x), draw.manual_seed(1))
        expected = (x[sent].double() * 2).clamp(-largest, largest)
        expected = torch.where(x[sent].isfinite(), expected, x[sent].double()).to(dtype)
        assert len(sent.remainder(8).unique()) == 8  # one of each at least
        torch.testing.assert_close(y[sent], expected, rtol=0, atol=0, equal_nan=True)
