"""Choices of `mpcomp.pipeline` that cannot be, each refused before anything has been done.

`test_bad_input.py` has those of methods, splits and batches.
"""

import math

import pytest
import torch
import torch.distributed as dist
from methods import same_bits
from models import mlp, pipe_of, rows

import mpcomp


@pytest.fixture
def one_process(monkeypatch):
    """What no launcher has started."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert not dist.is_initialized()
    yield
    assert not dist.is_initialized()


#: An engine that has these choices, so that only the value can be wrong.
ENGINES = ["distributed", None]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "value", [0, -1, True, False, 2.0, "x", "Auto", "4", [4], math.nan], ids=repr
)
def test_a_depth_that_is_none(value, engine, one_process):
    message = r"in_flight=.*: expected a number of microbatches, 1 or more, 'auto' or None"
    with pytest.raises(ValueError, match=message) as caught:
        pipe_of(in_flight=value, engine=engine)
    assert f"in_flight={value!r}:" in str(caught.value)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("value", [0, -5, True, "4GB", math.nan, math.inf, [1]], ids=repr)
def test_a_memory_bound_that_is_none(value, engine, one_process):
    with pytest.raises(ValueError, match="in_flight_bytes=.*: expected a positive number of bytes"):
        pipe_of(in_flight_bytes=value, engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "60", None, True], ids=repr)
def test_a_timeout_that_never_or_always_ends(value, engine, one_process):
    with pytest.raises(ValueError, match="timeout=.*: expected seconds, more than 0"):
        pipe_of(timeout=value, engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("value", [0, -1, 2.0, "4", None, True], ids=repr)
def test_a_number_of_connections_that_is_none(value, engine, one_process):
    with pytest.raises(ValueError, match="connections=.*: expected a whole number, 1 or more"):
        pipe_of(connections=value, engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "choice", [{"in_flight": 4}, {"in_flight": "auto"}, {"in_flight_bytes": 10**9}], ids=str
)
@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "ZBVZeroBubble"])
def test_torchs_schedules_have_their_own_depth(choice, schedule, engine, one_process):
    [(name, value)] = choice.items()
    message = f"{name}={value!r} with schedule='{schedule}': torch's.*leave one of the two out"
    with pytest.raises(ValueError, match=message):
        pipe_of(schedule=schedule, engine=engine, **choice)


@pytest.mark.parametrize("engine", [None, "local"])
@pytest.mark.parametrize(
    "choice",
    [
        {"schedule": "1F1B"},
        {"schedule": "none of them"},
        {"in_flight": 1},
        {"in_flight": "auto"},
        {"in_flight_bytes": 1e9},
    ],
    ids=str,
)
def test_the_local_engine_has_only_its_own_order(choice, engine, one_process):
    [(name, value)] = choice.items()
    message = f"{name}={value!r}: the local engine has only its own order; leave {name} out, or.*"
    with pytest.raises(ValueError, match=message + "torchrun"):
        pipe_of(engine=engine, **choice)


@pytest.mark.parametrize("engine", [None, "local", "distributed"])
@pytest.mark.parametrize("given", ["topk:0.1", mpcomp.TopK(0.1)], ids=repr)
def test_compression_between_replicas_takes_several(given, engine, one_process):
    with pytest.raises(ValueError, match="dp_comp=.*nobody to exchange gradients with; leave"):
        pipe_of(dp_comp=given, engine=engine)


@pytest.mark.parametrize("engine", [None, "local", "distributed"])
def test_blocks_are_timed_on_a_sample(engine, one_process):
    with pytest.raises(ValueError, match="split='time' measures the model's blocks: pass sample=x"):
        pipe_of(split="time", engine=engine)


def test_an_engine_that_is_none(one_process):
    with pytest.raises(ValueError, match="engine='nccl': expected one of local, distributed"):
        pipe_of(engine="nccl")


# -- several processes, where there is one --------------------------------------------------------


def test_the_distributed_engine_needs_a_launcher(one_process):
    """The error says how to start, and nothing has been done to the model."""
    model = mlp()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    message = "engine='distributed' needs several processes: start the script with torchrun, or"
    with pytest.raises(ValueError, match=message):
        pipe_of(model, engine="distributed")
    assert all(same_bits(model.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    "schedule, message",
    [
        ("1F1", "schedule='1F1'.*expected GPipe, 1F1B.*or None for the engine's own"),
        ("zbvzerobubbel", "did you mean .*ZBVZeroBubble"),
    ],
)
def test_a_schedule_that_is_none(schedule, message, one_process):
    with pytest.raises(ValueError, match=message):
        pipe_of(schedule=schedule, engine="distributed")


def test_a_group_of_one_is_no_pipeline(one_process):
    """Also where it says so itself: every rank of a script's smallest run."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        message = "1 rank: a pipeline of one rank sends nothing.*engine='local'"
        with pytest.raises(ValueError, match=message):
            pipe_of(engine="distributed")
        assert pipe_of().num_ranks == 1  # the local engine, chosen by itself
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("environment", [{"WORLD_SIZE": "1", "RANK": "0"}, {"WORLD_SIZE": "4"}])
def test_without_other_ranks_the_local_engine_is_chosen(environment, monkeypatch, one_process):
    """A batch system may set WORLD_SIZE for purposes of its own."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert pipe_of().engine.name == "local"


# -- devices --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "devices, message",
    [
        ([], r"devices=\[\]: expected at least one device, or None"),
        (["cpu"], "1 devices for 3 stages: give one device for each stage"),
        (["cpu"] * 4, "4 devices for 3 stages"),
        (("cpu", "cpu"), "2 devices for 3 stages"),
    ],
)
def test_a_list_of_devices_that_does_not_fit(devices, message, one_process):
    with pytest.raises(ValueError, match=message):
        pipe_of(devices=devices)


@pytest.mark.parametrize("devices", ["cpu", torch.device("cpu"), ["cpu"] * 3, ("cpu",) * 3, None])
def test_devices_that_fit(devices, one_process):
    pipe = pipe_of(devices=devices)
    assert len(pipe.stages) == 3
    assert pipe.forward_backward(*rows(4)).isfinite()


def test_a_rank_without_a_device(monkeypatch, one_process):
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ValueError, match="2 devices, but this is rank 2: give one for each rank"):
        pipe_of(devices=["cpu", "cpu"], engine="distributed")


def test_as_many_stages_as_devices_balanced_by_time(one_process):
    model = mlp()
    pipe = pipe_of(model, split="time", sample=rows(4)[0], devices=["cpu", "cpu"])
    assert len(pipe.stages) == 2
    assert sum(len(stage.block_names) for stage in pipe.stages) == 5
    with pytest.raises(ValueError, match="split is required here"):
        pipe_of(split="time", sample=rows(4)[0])
