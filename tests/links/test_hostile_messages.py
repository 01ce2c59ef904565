"""Hostile messages to all methods: an error, or numbers that are flagged where they are none.

`recipes.lab.hostile_messages` is the same with more of them.
"""

import itertools
from collections import Counter
from itertools import islice

import pytest
import torch
from methods import COMPRESSORS, FEEDBACK

from mpcomp import EF21, TensorMeta, TopK, parse
from mpcomp.compressors.bits import decode_indices, encode_indices
from recipes.lab import hostile_messages
from recipes.lab.hostile_messages import FAILED, FINITE, FLAGGED, METHODS, REFUSED, attacks

pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")
METHODS_HERE = [*COMPRESSORS, *FEEDBACK]
MESSAGES = 8_000


def test_no_message_does_harm():
    generator = torch.Generator().manual_seed(20)
    found = Counter()
    for method, outcome in islice(attacks(METHODS_HERE, generator), MESSAGES):
        assert not outcome.startswith(FAILED), (method, outcome)
        found[outcome] += 1
    assert min(found[REFUSED], found[FINITE]) > MESSAGES // 10 and found[FLAGGED] > MESSAGES // 400


def test_the_program_attacks_each_class(capsys):
    classes = {type(method) for method in METHODS_HERE}
    assert {type(parse(spec)) for spec in METHODS} >= classes
    hostile_messages.main(["--messages", "60", "--methods", "topk:0.1", "ef21+topk:0.1"])
    words = capsys.readouterr().out
    assert "60 messages, seed 0" in words and "ef21+topk:0.1" in words.splitlines()[3]


class Panic(BaseException):
    """What a library in another language raises."""


@pytest.mark.parametrize(
    "error", [IndexError("index 9"), Panic("thread panicked"), RuntimeError("cannot allocate 9 GB")]
)
def test_it_would_notice(error, monkeypatch, capsys):
    def decompress(*_):
        raise error

    monkeypatch.setattr(TopK, "decompress", decompress)
    generator = torch.Generator().manual_seed(0)
    attack = hostile_messages.attack_compressor(TopK(0.1), TensorMeta((4, 24)), generator)
    outcomes = list(attack)
    assert len(outcomes) == 25 and all(outcome.startswith(FAILED) for outcome in outcomes)
    found = itertools.repeat(("topk:0.1", outcomes[0]))
    monkeypatch.setattr(hostile_messages, "attacks", lambda *_: found)
    with pytest.raises(SystemExit) as ended:
        hostile_messages.main(["--messages", "60", "--methods", "topk:0.1"])
    assert ended.value.code == 1 and str(error) in capsys.readouterr().out


def test_it_would_notice_nan_that_nobody_is_told_of(monkeypatch):
    monkeypatch.setattr("mpcomp.links.nonfinite.NonfiniteNotes.found", lambda *_: False)
    generator = torch.Generator().manual_seed(0)
    meta = TensorMeta((4, 24), torch.float16)
    outcomes = Counter(hostile_messages.attack_link(EF21(TopK(0.3)), meta, generator, 300))
    assert any("nobody is told" in outcome for outcome in outcomes)


@pytest.mark.parametrize("n, k", [(100, 1), (100, 3), (1000, 30), (100, 40), (5, 2), (1 << 16, 9)])
def test_positions_beyond_the_tensor_are_refused(n, k):
    """And those that do not ascend: one place would be written twice."""
    generator = torch.Generator().manual_seed(n + k)
    code = encode_indices(torch.randperm(n, generator=generator)[:k].sort().values, n)
    refused = 0
    for _ in range(300):
        bad = hostile_messages.spoilt(code, generator)
        try:
            positions = decode_indices(bad, n, k)
        except ValueError as error:
            assert f"not of {k} ascending positions below {n}" in str(error)
            refused += 1
            continue
        assert positions.numel() == k and (positions.diff() > 0).all()
        assert positions.min() >= 0 and positions.max() < n
    assert refused > 30


@pytest.mark.gpu
@pytest.mark.parametrize("n, k", [(100, 3), (1000, 30), (100, 40)])
def test_on_an_accelerator_positions_stay_within_the_tensor(n, k):
    """An index beyond it would end the process' use of the device."""
    generator = torch.Generator().manual_seed(n + k)
    code = encode_indices(torch.arange(k), n)
    for _ in range(50):
        positions = decode_indices(hostile_messages.spoilt(code, generator).cuda(), n, k)
        assert positions.numel() == k and positions.min() >= 0 and positions.max() < n
