"""Schedules as the engine sees them: names, places, depth. No processes."""

import itertools

import pytest
from runs import SCHEDULES, SINGLE, SPLITTING
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping
from torch.distributed.pipelining.schedules import get_schedule_class

from mpcomp.engines.schedules import (
    DEFAULT_SCHEDULE,
    InFlight1F1B,
    Schedule,
    schedule_named,
    warmup_of,
)


def test_names_in_any_case():
    assert schedule_named(None) is DEFAULT_SCHEDULE
    for name in SCHEDULES[1:]:
        assert schedule_named(name).name == schedule_named(name.upper()).name == name
        assert get_schedule_class(name) is get_schedule_class(schedule_named(name).name)


@pytest.mark.parametrize(
    "name, message",
    [
        ("Gpipe2", r"schedule='Gpipe2'; did you mean 'GPipe'\?: expected GPipe, 1F1B, .* or None"),
        (
            "zbv",
            "schedule='zbv'.*: expected GPipe, 1F1B, Interleaved1F1B, .*DualPipeV, or None for",
        ),
        ("", "schedule=''.*: expected GPipe"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_known_ones(name, message):
    with pytest.raises(ValueError, match=message):
        schedule_named(name)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_places_are_torchs(name, num_ranks):
    schedule = schedule_named(name)
    for laps in {1, 2} if schedule.stages_per_rank is None else {schedule.stages_per_rank}:
        stages = laps * num_ranks
        style = "v" if schedule.v_shaped else "loop"
        theirs = generate_stage_to_rank_mapping(num_ranks, stages, style)
        assert {i: schedule.place_of(i, num_ranks) for i in range(stages)} == theirs


@pytest.mark.parametrize("laps", [1, 2, 3, 4])
@pytest.mark.parametrize("v_shaped", [False, True])
def test_places_of_more_laps_are_torchs_too(laps, v_shaped):
    schedule = Schedule("any", v_shaped=v_shaped)
    theirs = generate_stage_to_rank_mapping(3, 3 * laps, "v" if v_shaped else "loop")
    assert {i: schedule.place_of(i, 3) for i in range(3 * laps)} == theirs
    last = schedule.place_of(3 * laps - 1, 3)
    assert last == (0 if v_shaped and laps % 2 == 0 else 2)


def test_which_schedules_split_the_backward():
    assert {n for n in SCHEDULES if schedule_named(n).splits_backward} == set(SPLITTING)
    assert {n for n in SCHEDULES if schedule_named(n).stages_per_rank == 1} == set(SINGLE)


@pytest.mark.parametrize(
    "name, stages, ranks, message",
    [
        (
            None,
            3,
            2,
            "3 stages on 2 ranks: .* takes 1 stage on each rank; pass split=2",
        ),
        ("GPipe", 4, 2, "4 stages on 2 ranks: GPipe takes 1 stage on each rank; pass split=2"),
        ("Interleaved1F1B", 3, 2, "Interleaved1F1B takes the same number of stages on each rank"),
        ("Interleaved1F1B", 2, 4, "2 stages on 4 ranks: .* pass split=4 or a multiple of it"),
        (
            "ZBVZeroBubble",
            6,
            2,
            "6 stages on 2 ranks: .* takes 2 stages on each rank; pass split=4",
        ),
        ("DualPipeV", 2, 2, "2 stages on 2 ranks: .* takes 2 stages on each rank; pass split=4"),
    ],
)
def test_numbers_of_stages_that_cannot_be_placed(name, stages, ranks, message):
    with pytest.raises(ValueError, match=message):
        schedule_named(name).check_stages(stages, ranks)


@pytest.mark.parametrize("name", SCHEDULES)
def test_numbers_of_stages_that_can(name):
    schedule = schedule_named(name)
    for ranks in (2, 3, 8):
        schedule.check_stages(ranks * schedule.default_stages_per_rank, ranks)
        if schedule.stages_per_rank is None:
            schedule.check_stages(3 * ranks, ranks)


# -- depth ----------------------------------------------------------------------------------------


@pytest.mark.each_once
@pytest.mark.parametrize("num_stages", [2, 3, 4, 7])
@pytest.mark.parametrize("in_flight", [1, 2, 3, 4, 7, 8, 13, 100])
def test_warm_up_falls_from_in_flight_to_one(num_stages, in_flight):
    """The first stage has so many under way, the last none; and no two neighbours block."""
    depths = [warmup_of(i, num_stages, in_flight) for i in range(num_stages)]
    assert depths[0] == in_flight and depths[-1] == 1
    assert depths == sorted(depths, reverse=True)
    # As even as whole numbers can be: the link between any two stages has its share.
    falls = [a - b for a, b in itertools.pairwise(depths)]
    assert max(falls) - min(falls) <= 1


@pytest.mark.parametrize("num_stages", [2, 3, 4, 7])
def test_as_many_in_flight_as_stages_is_1f1b(num_stages):
    assert [warmup_of(i, num_stages, num_stages) for i in range(num_stages)] == list(
        range(num_stages, 0, -1)
    )
    assert warmup_of(0, 1, 5) == 1


class Recorded:
    """In place of a stage: writes down what the schedule does."""

    def __init__(self, stage_index, num_stages):
        self.stage_index, self.num_stages = stage_index, num_stages
        self.is_first, self.is_last = stage_index == 0, stage_index == num_stages - 1
        self.group_size = num_stages
        self.has_backward = True
        self.calls = []

    def forward_one_chunk(self, i, args, *_):
        self.calls.append(f"F{i}")

    def backward_one_chunk(self, i, loss=None):
        self.calls.append(f"B{i}")

    def perform_reduce_grad(self, scale):
        self.calls.append(f"R{scale}")


def order(stage_index, num_stages, chunks, in_flight):
    stage = Recorded(stage_index, num_stages)
    schedule = InFlight1F1B(stage, chunks, loss_fn=None, scale_grads=False)
    schedule.in_flight = in_flight
    schedule._step_microbatches([(None,)] * chunks, [{}] * chunks, None)
    return stage.calls


@pytest.mark.each_once
@pytest.mark.parametrize("chunks", [1, 2, 5, 8])
@pytest.mark.parametrize("in_flight", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("stage_index", [0, 1, 3])
def test_each_microbatch_once_in_ascending_order(chunks, in_flight, stage_index):
    """Forward before backward; never more in flight than allowed; one reduction, at the end."""
    calls = order(stage_index, 4, chunks, in_flight)
    assert [c for c in calls if c[0] == "F"] == [f"F{i}" for i in range(chunks)]
    assert [c for c in calls if c[0] == "B"] == [f"B{i}" for i in range(chunks)]
    assert calls[-1] == "R1" and len(calls) == 2 * chunks + 1
    under_way = most = 0
    for call in calls[:-1]:
        under_way += 1 if call[0] == "F" else -1
        most = max(most, under_way)
        assert under_way >= 0
    assert most == min(chunks, warmup_of(stage_index, 4, in_flight))


def test_the_picture_in_the_modules_first_lines():
    assert order(0, 2, 4, 2)[:6] == ["F0", "F1", "B0", "F2", "B1", "F3"]
    assert order(0, 2, 6, 4)[:9] == ["F0", "F1", "F2", "F3", "B0", "F4", "B1", "F5", "B2"]
