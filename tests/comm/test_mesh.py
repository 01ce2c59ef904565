"""One rank's mesh, where every collective gives back what it was given; and comparing ranks."""

import pytest
import torch

from mpcomp.comm.agreement import SharedOutcome
from mpcomp.comm.handshake import check_alike
from mpcomp.comm.mesh import LocalMesh

MESH = LocalMesh(torch.device("cpu"))


def test_one_rank_has_all_there_is():
    x = torch.arange(3.0)
    assert MESH.all_reduce_sum([1.0, 2.5]) == [1.0, 2.5]
    assert MESH.all_gather([3, 4], "numbers") == [[3, 4]]
    assert MESH.all_gather_object({"a": 1}) == [{"a": 1}]
    assert MESH.broadcast_object([1], 0, "a list") == [1]
    assert MESH.broadcast_tensor(x, 0, "a tensor") is x
    assert MESH.broadcast_in_pipelines(x, 0, "a tensor") is x
    assert MESH.all_gather_tensors({"x": x}, "weights") == {"x": x}
    MESH.broadcast(x, 0, "a tensor")
    assert x.tolist() == [0, 1, 2]
    assert (MESH.rank, MESH.num_ranks, MESH.num_replicas, MESH.num_in_pipeline) == (0, 1, 1, 1)


def test_an_error_of_one_rank_is_its_own():
    with pytest.raises(KeyError, match="absent"), MESH.failing_together("looking it up"):
        {}["absent"]
    with pytest.raises(KeyError, match="absent"), SharedOutcome(MESH):
        {}["absent"]


def test_what_a_block_gives_the_others():
    with SharedOutcome(MESH) as outcome:
        outcome.value = [1, 2]
    assert outcome.values == [[1, 2]]


def test_ranks_that_are_alike():
    check_alike([{"a": 1}] * 3, lambda found: "never")
    check_alike([{"a": 1}, {"a": 1}, {"a": 2}, {"a": 2}], lambda found: "never", group=2)


def test_ranks_that_differ():
    def message(found):
        return "; ".join(f"{d.rank} {d.first} {d.name} {d.value} {d.expected}" for d in found)

    with pytest.raises(ValueError, match="^1 0 a 2 1; 2 0 a None 1; 2 0 b 3 None$"):
        check_alike([{"a": 1}, {"a": 2}, {"b": 3}], message)
    with pytest.raises(ValueError, match="^3 2 a 5 1$"):
        check_alike([{"a": 9}, {"a": 9}, {"a": 1}, {"a": 5}], message, group=2)
