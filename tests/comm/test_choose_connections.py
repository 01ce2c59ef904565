"""connections="auto": by the slowest exchange of all ranks, alike on all of them."""

import time
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from methods import same_bits
from models import mlp, rows

import mpcomp
from mpcomp.comm import probe
from mpcomp.comm.probe import choose_connections


class Ranks:
    """Ranks whose exchanges take so many seconds, in turn."""

    def __init__(self, seconds, able=True, size=4, monkeypatch=None):
        self.num_ranks, self.calls, self._able = size, 0, able
        self._seconds = [0.5, *seconds]  # at first ranks wait for each other
        self._now = 0

    def now(self):
        return self._now

    def all_gather(self, values, what):
        assert what == "latency of links"
        before = values[0]
        self._now += int(self._seconds[min(self.calls, len(self._seconds) - 1)] * 1e9)
        self.calls += 1
        others = [[before // 2, True] for _ in range(self.num_ranks - 2)]
        return [list(values), *others, [before, self._able]]


def chosen(ranks, monkeypatch, interface="eth0"):
    monkeypatch.setattr(time, "perf_counter_ns", ranks.now)
    monkeypatch.setattr(probe, "gloo_address", lambda: (interface, "10.0.0.1"))
    return choose_connections(ranks)


@pytest.mark.parametrize(
    "seconds, number, calls",
    [
        ([0.0002], 1, 3),  # one machine
        ([0.004], 1, 3),
        ([0.0099], 1, 3),
        ([0.0101], 4, 8),
        ([0.05], 4, 8),
        ([0.2, 0.05, 0.3, 0.05], 4, 8),
        ([0.03, 0.02, 0.05, 0.001, 0.05], 1, 6),  # a processor was busy, and then not
    ],
)
def test_long_links_have_several(monkeypatch, seconds, number, calls):
    ranks = Ranks(seconds)
    assert chosen(ranks, monkeypatch) == number
    assert ranks.calls == calls


def test_many_ranks_exchange_in_two_rounds_each_a_latency(monkeypatch):
    assert chosen(Ranks([0.016], size=20), monkeypatch) == 1
    assert chosen(Ranks([0.022], size=20), monkeypatch) == 4


def test_a_rank_that_does_not_know_its_interface_says_so_and_all_have_one(monkeypatch):
    with pytest.warns(UserWarning, match="export GLOO_SOCKET_IFNAME, the one that leads"):
        assert chosen(Ranks([0.05]), monkeypatch, interface="?") == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(Ranks([0.05], able=False), monkeypatch) == 1  # the other one says it


def trained(long):
    """Losses and the number of connections by default; perhaps one rank finds links long."""
    if not long:
        probe._LONG_LATENCY_S = 3600.0  # a busy machine's loopback may be slow
    elif dist.get_rank() == 1:
        real = time.perf_counter_ns
        counted = iter(range(1 << 20))
        probe.time = type("Clock", (), {
            "perf_counter_ns": staticmethod(lambda: real() + 50_000_000 * next(counted)),
            "perf_counter": staticmethod(time.perf_counter),
        })  # fmt: skip
    torch.manual_seed(0)
    pipe = mpcomp.pipeline(
        mlp(), 2, split=2, act_comp="step:0.3", loss_fn=F.cross_entropy, timeout=90.0
    )
    losses = [pipe.forward_backward(*rows(8, number)) for number in range(3)]
    return torch.stack(losses), pipe.engine.connections


def test_all_ranks_have_as_many_and_the_same_losses(ranks):
    (short, one), (_, also_one) = ranks(trained, 2, False)
    (long, four), (_, also_four) = ranks(trained, 2, True)
    assert (one, also_one, four, also_four) == (1, 1, 4, 4)
    assert same_bits(short, long)
