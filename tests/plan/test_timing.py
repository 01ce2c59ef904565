"""Times of runs on a busy machine, with clocks that a test sets."""

from __future__ import annotations

import itertools

import pytest
import torch

from mpcomp.plan.coding import measure_coding, measure_cut
from mpcomp.plan.profile import measure_profile
from mpcomp.plan.timing import Run, Undisturbed, timed, typical

X = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(0))
WORK_S = 0.010


class Machine:
    """Clocks of a machine on which each piece of work takes the same by itself.

    Args:
        waits: seconds that other programs take during one run after the other, again and again.
        threads: that share the work.
    """

    def __init__(self, waits: list[float], threads: int = 1) -> None:
        self._waits = itertools.cycle(waits)
        self._threads = threads
        self._clock_s = self._processor_s = 0.0
        self._running = False

    def now(self) -> float:
        if self._running:
            self._clock_s += WORK_S + next(self._waits)
            self._processor_s += WORK_S * self._threads
        self._running = not self._running
        return self._clock_s

    def process_time(self) -> float:
        return self._processor_s


def on(monkeypatch: pytest.MonkeyPatch, waits: list[float], threads: int = 1) -> None:
    machine = Machine(waits, threads)
    monkeypatch.setattr("mpcomp.plan.timing.now", machine.now)
    monkeypatch.setattr("mpcomp.plan.timing.time.process_time", machine.process_time)


IDLE = [0.0]
#: Each run is interrupted, for longer or shorter.
BUSY = [0.004, 0.030, 0.012, 0.080, 0.007]


@pytest.mark.parametrize("waits", [IDLE, BUSY], ids=["idle", "busy"])
def test_a_run_has_its_own_time_and_the_clocks(
    waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, waits)
    result, run = timed(max, 3, 4)
    assert result == 4
    assert run == pytest.approx((WORK_S + waits[0], WORK_S))


def test_threads_do_not_make_a_run_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, IDLE, threads=4)
    assert timed(int)[1] == pytest.approx((WORK_S, WORK_S))


def test_an_accelerator_computes_in_no_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, BUSY)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    assert timed(int)[1] == pytest.approx((WORK_S + BUSY[0],) * 2)


def test_typical_is_what_a_step_sees() -> None:
    assert typical([Run(3.0, 1.0), Run(2.0, 2.0), Run(9.0, 1.0)]) == 3.0


def test_undisturbed_notes_how_far_runs_were_from_it() -> None:
    settle = Undisturbed()
    assert (settle.slowdown, settle.spread, settle.busy) == (1.0, 0.0, False)
    assert settle([Run(3.0, 1.0), Run(2.0, 1.1), Run(4.0, 1.2)]) == 1.0
    assert settle.slowdown == pytest.approx(9.0 / 3.3)
    assert settle.spread == pytest.approx(0.1)
    assert settle.to_dict() == {
        "slowdown": settle.slowdown,
        "spread": settle.spread,
        "busy": True,
    }
    assert "10% above" in settle.sentence() and "2.7 times as long" in settle.sentence()


@pytest.mark.parametrize(
    ("runs", "busy"),
    [
        ([Run(1.0, 1.0), Run(1.02, 1.01), Run(1.1, 1.05)], False),
        ([Run(2.0, 1.0), Run(2.0, 1.0), Run(2.0, 1.0)], True),  # others had the processor
        ([Run(1.0, 1.0), Run(1.5, 1.5), Run(1.6, 1.6)], True),  # and the memory
    ],
)
def test_a_busy_machine_is_said_to_be(runs: list[Run], busy: bool) -> None:
    settle = Undisturbed()
    settle(runs)
    assert settle.busy == busy
    assert ("busy" in settle.sentence()) == busy


def test_what_is_undisturbed_does_not_depend_on_other_programs(
    monkeypatch: pytest.MonkeyPatch, _no_walk_through_memory: None
) -> None:
    monkeypatch.setattr("mpcomp.plan.coding._REST_S", 0.0)
    found = []
    for waits in (IDLE, BUSY):
        on(monkeypatch, waits)
        settle = Undisturbed()
        found.append(measure_coding("quant:4", "quant:8", X, X, repeats=3, settle=settle))
        assert settle.busy == (waits is BUSY)
        blocks = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
        profile = measure_profile(blocks, X, torch.Tensor.sum, settle=settle)
        assert [sum(block.compute) for block in profile.blocks] == pytest.approx([2 * WORK_S] * 2)
    idle, busy = found
    assert idle.coding == pytest.approx((WORK_S,) * 4) == busy.coding
    assert idle.messages == busy.messages


def test_by_default_a_measurement_is_the_clocks_median(
    monkeypatch: pytest.MonkeyPatch, _no_walk_through_memory: None
) -> None:
    monkeypatch.setattr("mpcomp.plan.coding._REST_S", 0.0)
    on(monkeypatch, [0.020])
    cost = measure_cut("quant:4", "quant:8", X, X, repeats=3).cost
    assert cost.coding == pytest.approx((WORK_S + 0.020,) * 4)
