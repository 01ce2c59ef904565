"""One rank's mesh, where every collective gives back what it was given; and comparing ranks."""

import pytest
import torch

from mpcomp.comm.agreement import SharedOutcome
from mpcomp.comm.handshake import check_alike
from mpcomp.comm.mesh import LocalMesh, ProcessMesh

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
    scalars = {"c": torch.tensor(3.0), "a": torch.tensor(1.0)}
    assert MESH.gather_scalars(scalars, ["a", "b", "c"]).tolist() == [1, 3]
    assert MESH.gather_scalars({}, ["a"]).shape == (0,)
    MESH.broadcast(x, 0, "a tensor")
    assert x.tolist() == [0, 1, 2]
    assert (MESH.rank, MESH.num_ranks, MESH.num_replicas, MESH.pp_size) == (0, 1, 1, 1)


def gather_scalars(replicas, apart):
    """Each place has a name of its own, the first one also "both"; nobody has "none"."""
    mesh = ProcessMesh(replicas, 60.0, torch.device("cpu"))
    mesh.connect([f"rank {i}" for i in range(mesh.num_ranks)])
    own = {f"place {mesh.place}": torch.tensor(10.0 * mesh.rank, dtype=torch.float64)}
    if mesh.place == 0:
        own["both"] = torch.tensor(1.0 + mesh.replica, dtype=torch.float64)
    found = mesh.gather_scalars(own, ["place 1", "none", "both", "place 0"], apart=apart)
    mesh.close()
    return found.dtype, found.tolist()


@pytest.mark.parametrize("apart", [False, True])
def test_scalars_of_two_pipelines_are_in_the_order_of_names(ranks, apart):
    """Their mean, or of each its own."""
    means, own = [20.0, 1.5, 10.0], ([10.0, 1.0, 0.0], [30.0, 2.0, 20.0])
    expected = [own[0]] * 2 + [own[1]] * 2 if apart else [means] * 4
    assert ranks(gather_scalars, 4, 2, apart) == [(torch.float64, each) for each in expected]


def test_an_error_of_one_rank_is_its_own():
    with pytest.raises(KeyError, match="absent"), MESH.abort_all_on_error("looking it up"):
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
