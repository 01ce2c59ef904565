"""Threads beside the stages: order, the first error, waits, and what is left of them."""

from __future__ import annotations

import gc
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from mpcomp.engines.background import Background
from mpcomp.links.boundary import Crossing

#: Deadline of what happens at once, on a busy machine.
SOON_S = 60.0


class Lost(Exception):
    """What a transport makes of an error of its own."""


class Wire:
    """A channel whose messages come when the test says so."""

    posts_ahead = True

    def __init__(self, seconds=SOON_S):
        self.seconds = seconds
        self.there = [threading.Event() for _ in range(8)]
        self.error = None

    def arrive(self, microbatch):
        assert self.there[microbatch].wait(SOON_S)
        if self.error is not None:
            raise self.error

    def until(self, microbatch, arrived):
        try:
            arrived(self.seconds)
        except RuntimeError as error:
            raise Lost(str(error)) from error

    def bring(self, *microbatches):
        for microbatch in microbatches:
            self.there[microbatch].set()


@pytest.fixture
def mesh():
    told = []
    return SimpleNamespace(
        device=torch.device("cpu"), where="start", does_beside=told.append, told=told
    )


def way(name="boundary 0 act", channel=None):
    return Crossing(SimpleNamespace(name=name), channel or Wire())


def give(beside, crossing, where, work):
    beside.give(crossing, where, work, torch.zeros(1))


def test_a_direction_does_one_thing_after_the_other_in_a_thread_of_its_own(mesh):
    beside, done = Background(mesh), []
    directions = [way("boundary 0 act"), way("boundary 0 grad"), way("boundary 1 act")]
    with beside.under_way():
        for number in range(50):
            for each in directions:
                given = each.link.name, number

                def work(given=given):
                    done.append((*given, threading.current_thread().name))

                give(beside, each, f"{number}", work)
    for each in directions:
        name = each.link.name
        own = [(number, thread) for link, number, thread in done if link == name]
        assert own == [(number, f"mpcomp {name}") for number in range(50)]
    assert sorted(mesh.told) == sorted(f"{number}" for number in range(50) for _ in directions)
    assert mesh.where == "start"


@pytest.mark.parametrize("error", [ValueError("boom"), RuntimeError("boom"), SystemExit("boom")])
def test_the_first_error_is_raised_and_nothing_is_begun_behind_it(mesh, error):
    beside, done = Background(mesh), []

    def fail():
        raise error

    with pytest.raises(type(error), match="boom") as caught, beside.under_way():
        give(beside, way(), "first", lambda: done.append(1))
        give(beside, way(), "second", fail)
        give(beside, way(), "third", lambda: done.append(3))
    assert caught.value is error and done == [1] and mesh.where == "second"


def test_an_error_ends_a_wait_for_a_message_and_is_not_the_transports(mesh):
    beside, wire = Background(mesh), Wire()
    grad = way("boundary 0 grad", wire)
    waits = threading.Event()

    def until(microbatch, arrived, real=wire.until):
        waits.set()
        real(microbatch, arrived)

    def fail():
        assert waits.wait(SOON_S)
        raise RuntimeError("boom")

    wire.until = until
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="boom"), beside.under_way():
        beside.expect(grad, 0, "decode", lambda: None)
        give(beside, way(), "encode", fail)
        beside.take(grad, 0)
    assert mesh.where == "encode" and time.monotonic() - begin < SOON_S
    wire.bring(0)


def test_an_error_ends_a_wait_for_what_is_not_posted_yet(mesh):
    beside = Background(mesh)

    def fail():
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"), beside.under_way():
        give(beside, way(), "encode", fail)
        beside.take(way("boundary 0 grad"), 0)


@pytest.mark.parametrize("words", ["closed by peer", None])
def test_a_message_that_does_not_come_is_the_transports_error(mesh, words):
    beside, wire = Background(mesh), Wire(seconds=SOON_S if words else 0.2)
    if words:
        wire.error = RuntimeError(words)
        wire.bring(0)
    with pytest.raises(Lost, match=words or "Timed out waiting 200ms"), beside.under_way():
        beside.expect(way(channel=wire), 0, "decode", lambda: pytest.fail("is not there"))
        beside.take(way(channel=wire), 0)
    wire.bring(0)
    assert mesh.where == "start"


def test_messages_are_decoded_two_ahead_in_their_order(mesh):
    beside, wire = Background(mesh), Wire()
    decoded, most = [], []
    with beside.under_way():
        for number in range(8):
            beside.expect(way(channel=wire), number, "", lambda n=number: decoded.append(n) or n)
        wire.bring(*reversed(range(8)))
        for number in range(8):
            assert beside.take(way(channel=wire), number) == number
            most.append(len(decoded) - number - 1)
        assert decoded == list(range(8))
    assert max(most) <= 2


def test_an_error_of_the_stages_waits_for_what_is_being_done_and_leaves_out_the_rest(mesh):
    beside, done = Background(mesh), []
    began, may_end = threading.Event(), threading.Event()

    def slow():
        began.set()
        assert may_end.wait(SOON_S)
        done.append(1)

    with pytest.raises(KeyError, match="own"), beside.under_way():
        give(beside, way(), "first", slow)
        give(beside, way(), "second", lambda: done.append(2))
        beside.expect(way("boundary 0 grad"), 0, "", lambda: done.append(3))  # never comes
        assert began.wait(SOON_S)
        threading.Timer(0.2, may_end.set).start()
        raise KeyError("own")
    assert done == [1] and mesh.where == "start"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_gradients_are_on_where_they_are_on_for_the_stages(mesh, mode):
    beside, found = Background(mesh), []
    wire = Wire()
    wire.bring(0)

    def work():
        found.append(torch.is_grad_enabled())
        beside.expect(way("grad", wire), 0, "", lambda: found.append(torch.is_grad_enabled()))

    with beside.under_way(), mode():
        give(beside, way(), "", work)
        beside.take(way("grad", wire), 0)
    assert found == [mode is torch.enable_grad] * 2


def test_no_thread_outlives_it(mesh):
    def ours():
        return [t for t in threading.enumerate() if t.name.startswith("mpcomp test")]

    for _ in range(3):
        beside = Background(mesh)
        with beside.under_way():
            give(beside, way("test act"), "", lambda: None)
            give(beside, way("test grad"), "", lambda: None)
        assert len(ours()) == 2
        del beside
        gc.collect()
        for thread in ours():
            thread.join(SOON_S)
        assert ours() == []
