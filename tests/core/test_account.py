"""The account of a step: parts and whole, below bf16, the largest part and its remedy."""

import json
import math

import pytest

from mpcomp.core.account import Account, agreed_in_step
from mpcomp.core.sent import Sent


def sent(num_elements: int, bytes_each: float) -> Sent:
    return Sent(bytes_each * num_elements, 4 * num_elements, num_elements)


#: By what is largest: bytes of an element at cuts, of ties, between replicas.
CASES = {
    "cuts": Account(sent(1000, 2.0), sent(100, 2.0), sent(100, 1.0), Sent(50)),
    "ties": Account(sent(1000, 0.25), sent(1000, 4.0), Sent(), Sent(50)),
    "replicas": Account(sent(1000, 0.25), sent(100, 4.0), sent(1000, 4.0), Sent(50)),
    "agreements": Account(sent(10, 0.5), Sent(), Sent(), Sent(5000)),
    "ties alone": Account(ties=sent(1000, 4.0)),
    "compressed ties": Account(sent(1000, 0.25), sent(1000, 0.5), Sent(), Sent(50)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_whole_is_the_sum_of_its_parts(case):
    account = CASES[case]
    figures = json.loads(json.dumps(account.to_dict()))
    for name in ("wire_bytes", "dense_bytes", "num_elements"):
        assert figures[name] == sum(part[name] for part in figures["parts"].values())
    assert figures["below_bf16"] == 2 * figures["num_elements"] / figures["wire_bytes"]
    cuts = figures["parts"]["cuts"]
    expected = 2 * cuts["num_elements"] / cuts["wire_bytes"] if cuts["wire_bytes"] else None
    assert figures["cuts_below_bf16"] == cuts["below_bf16"] == expected
    assert Account.from_dict(figures["parts"]) == account
    assert 2 * account - account == account == account + Account()


@pytest.mark.parametrize(
    ("case", "largest", "remedy"),
    [
        ("cuts", "cuts", "act_comp= and grad_comp="),
        ("ties", "ties", "compress them with tie_comp="),
        ("replicas", "replicas", "dp_comp="),
        ("agreements", "agreements", "more rows"),
        ("ties alone", "ties", "tie_comp="),
        ("compressed ties", "ties", "milder and stronger"),
    ],
)
def test_the_largest_part_is_named_with_its_remedy(case, largest, remedy):
    account = CASES[case]
    assert account.largest == largest
    whole, most = account.summary()
    assert f"{account.below_bf16:.1f} times below bf16" in whole
    assert ("cuts alone" in whole) == (case != "ties alone")
    assert most.startswith(f"most of it: {largest}, ") and remedy in most and "(docs/" in most


def test_of_nothing_and_of_what_is_not_known_nothing_is_said():
    assert Account().summary() == [] and Account().largest is None
    unknown = Account.from_dict(None) + Account(sent(10, 2.0))
    assert unknown.summary() == [] and unknown.below_bf16 is None
    assert json.dumps(unknown.to_dict(), allow_nan=False)
    assert math.isnan(Account.from_dict(unknown.to_dict()["parts"]).ties.wire_bytes)


def test_links_are_cuts_or_ties():
    directions = ("act", "grad", "act", "grad", "tie_first", "tie_last")
    account = Account.of_links((name, Sent(1 + i, 10, 10)) for i, name in enumerate(directions))
    assert account.cuts == Sent(10, 40, 40) and account.ties == Sent(11, 20, 20)
    assert account.replicas == account.agreements == Sent()


def test_one_process_agrees_with_nobody():
    assert agreed_in_step(1, 6) == Sent()
    assert agreed_in_step(4, 6).wire_bytes == 2 * agreed_in_step(3, 6).wire_bytes
