"""A rank's GPU, whoever launched it, and the backend that its ranks then have."""

import os

import pytest
import torch
import torch.distributed as dist

import mpcomp
from mpcomp.api import build
from mpcomp.comm import devices, joining
from mpcomp.comm.channels import LocalChannel
from mpcomp.comm.devices import backend_of, device_of_rank
from mpcomp.core.launchers import local_rank, local_size

#: Everything that any launcher sets.
NAMES = [
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_LOCALID", "SLURM_NODEID"),
    *("SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("MPI_LOCALRANKID", "MPI_LOCALNRANKS", *devices.VISIBLE),
]
SLURM = {"SLURM_LOCALID": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}
#: Environment; the process's number on its machine, and how many are there.
LAUNCHERS = {
    "torchrun": ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, 1, 4),
    "srun, a node of many": ({**SLURM, "SLURM_NODEID": "1"}, 2, 4),
    "srun, the last node": ({**SLURM, "SLURM_NODEID": "2"}, 2, 3),
    "torchrun in srun": (
        {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
        3,
        4,
    ),
    "mpirun": ({"OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 3, 4),
    "mpiexec": ({"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}, 0, 2),
    "by hand": ({"LOCAL_RANK": "2"}, 2, None),
}


@pytest.fixture
def machine(monkeypatch):
    """Sets the environment of a process, and how many GPUs torch sees in it."""

    def set_up(environment, num_gpus=4):
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)

    return set_up


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_has_the_gpu_of_its_number_on_the_machine(machine, launcher):
    environment, number, size = LAUNCHERS[launcher]
    machine(environment)
    assert (local_rank(), local_size()) == (number, size)
    assert device_of_rank(None) == torch.device("cuda", number)
    machine(environment, num_gpus=0)
    assert device_of_rank(None) == torch.device("cpu")


def test_a_rank_without_a_number_is_not_given_the_first_gpu(machine):
    machine({"RANK": "3", "WORLD_SIZE": "4"})
    with pytest.raises(ValueError, match=r"sees 4 GPUs.*SLURM_LOCALID.*export LOCAL_RANK"):
        device_of_rank(None)
    assert device_of_rank("cuda:3") == torch.device("cuda", 3)
    machine({"RANK": "3", "WORLD_SIZE": "4"}, num_gpus=1)
    assert device_of_rank(None) == torch.device("cuda", 0)


@pytest.mark.parametrize("launcher", [name for name in LAUNCHERS if name != "by hand"])
@pytest.mark.parametrize("name", devices.VISIBLE)
def test_a_rank_that_sees_one_gpu_alone_has_that(machine, launcher, name):
    """As with srun --gpus-per-task=1; many processes are on the machine all the same."""
    machine({**LAUNCHERS[launcher][0], name: "GPU-6f"}, num_gpus=1)
    assert device_of_rank(None) == torch.device("cuda", 0)


@pytest.mark.parametrize("visible", [None, "0,1"])
def test_more_processes_than_gpus_are_refused(machine, visible):
    named = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    machine({**LAUNCHERS["torchrun"][0], **named}, num_gpus=2)
    with pytest.raises(ValueError, match=r"4 processes on this machine.*sees 2"):
        device_of_rank(None)


@pytest.mark.parametrize("given", [["cpu", "cuda:0"], "cpu"])
def test_devices_that_are_given_are_taken(machine, given):
    machine({"RANK": "1", "WORLD_SIZE": "2"})
    assert device_of_rank(given) == torch.device("cpu" if given == "cpu" else "cuda:0")


NCCL = "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(
    "identities, backend",
    [
        (["a"], NCCL),
        (["a", "b"], NCCL),
        (["a", "b", "c", "d"], NCCL),
        (["a", "a"], "gloo"),
        (["a", "b", "a"], "gloo"),
        (["", ""], "gloo"),
        (["a", ""], "gloo"),
    ],
)
def test_nccl_takes_ranks_that_have_a_gpu_each(monkeypatch, identities, backend):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert backend_of(identities) == backend
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert backend_of(identities) == "gloo"


# -- joining --------------------------------------------------------------------------------------


def joins(port, seen, given, shares):
    """In each rank, of a machine whose GPUs are told by ``seen``: backend and current device."""
    rank, size = int(os.environ["TEST_RANK"]), len(seen)
    own = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    own |= {"TORCHELASTIC_USE_AGENT_STORE": True, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in own.items()})
    set_to, begun = [], []
    torch.cuda.device_count = lambda: size
    torch.cuda.set_device = set_to.append
    torch.distributed.is_nccl_available = lambda: True
    joining.identity_of = lambda device: seen[rank] if device.type == "cuda" else ""
    joining.dist.init_process_group = lambda backend, **_: begun.append(backend)
    device = torch.device(given) if isinstance(given, str) else torch.device(given[rank])
    try:
        joining.join(device, 60.0, patience_s=60.0, shares=shares)
    except ValueError as error:
        return str(error), set_to
    return begun, set_to


def test_ranks_that_share_a_gpu_go_by_gloo_and_are_refused_unless_they_were_told_to(ranks):
    """Each case: GPUs by rank, devices given, whether they may be shared; what comes of it."""
    cases = [
        (["a", "b"], ["cuda:0", "cuda:1"], False, NCCL),
        (["a", "b"], "cuda", False, NCCL),
        (["a", "b"], "cuda:0", False, NCCL),  # one visible GPU each, or two machines
        (["a", "a"], "cuda:0", True, "gloo"),
        (["a", "a"], "cuda:0", False, "ranks 0 and 1 see one GPU alone, the same one (a)"),
        (["", ""], "cpu", False, "gloo"),
        (["a", "b"], ["cuda:0", "cpu"], True, "gloo"),
    ]
    for seen, given, shares, expected in cases:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        found = ranks(joins, 2, store.port, seen, given, shares, init=False)
        for rank, (outcome, set_to) in enumerate(found):
            if isinstance(outcome, str):
                assert expected in outcome and "devices='cuda:0'" in outcome
            else:
                assert outcome == [expected], (seen, given)
            own = given if isinstance(given, str) else given[rank]
            own = f"cuda:{rank}" if own == "cuda" else own
            assert set_to == ([torch.device(own)] if own != "cpu" else [])


# -- other accelerators, and copies to the host ---------------------------------------------------


@pytest.mark.parametrize("kind", ["mps", "xpu", "hpu", "mtia", "privateuseone", "meta"])
@pytest.mark.parametrize("form", [lambda kind: kind, lambda kind: ["cpu", f"{kind}:0"]])
def test_other_accelerators_are_refused_by_name(kind, form):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    with pytest.raises(ValueError, match=rf"devices: '{kind}.*'cpu' or 'cuda'"):
        mpcomp.pipeline(model, 2, split=2, devices=form(kind))


class Moved:
    """A message on an accelerator that takes down how it is moved."""

    device = torch.device("cuda", 7)

    def to(self, device, non_blocking=False):
        return device.type, non_blocking


@pytest.mark.parametrize("kind", ["cpu", "cuda", "cuda:1", "xpu", "meta", "mps"])
def test_a_message_to_host_memory_is_waited_for(kind):
    """Not waited for, it would be decoded before it is there: pinned memory is used again."""
    channel = LocalChannel(torch.device(kind))
    channel.send(0, Moved())
    assert channel.receive(0) == (torch.device(kind).type, kind != "cpu")


# -- unlike GPUs ----------------------------------------------------------------------------------

#: Methods both of whose ends must come to one estimate by products of matrices.
ALIKE = ("ef21+lowrank:2", "ef21+rotate+lowrank:2", "ef21+lowrank:1:iterations=0")
#: Those of an end alone, without products, or with none of a memory.
ANY = ("topk:0.3", "lowrank:2", "ef+lowrank:2", "ef21+topk:0.3", "klt+step:0.3", "aqsgd+quant:4")


def built(methods):
    """In each rank, on a GPU of another model: what building a pipeline says, by method."""
    build.model_of = lambda device: f"GPU {dist.get_rank()}"
    said = []
    for method in methods:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        try:
            mpcomp.pipeline(model, 2, act_comp=method, loss_fn=torch.nn.MSELoss(), timeout=60.0)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_gpus_of_two_models_are_refused_where_they_would_come_apart(ranks):
    for said in ranks(built, 2, [*ALIKE, *ANY]):
        for method, words in zip([*ALIKE, *ANY], said, strict=True):
            differs = 'rank 1 has GPU="GPU 1", rank 0 has "GPU 0"'
            assert (differs in words) if method in ALIKE else not words, (method, words)
