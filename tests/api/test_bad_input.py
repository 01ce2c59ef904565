"""Bad input: an error that names the value, what is accepted and the fix; nothing half-done.

Settings of single methods are tested beside them, specs in test_parsing.py, checkpoints in
test_checkpoint.py, NaN and Inf in test_precision.py.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from methods import same_bits
from models import (
    CONV_SPLIT,
    assert_same_state,
    convnet,
    images,
    links_state,
    mlp,
    pipe_of,
    rows,
)
from torch import nn

import mpcomp
from mpcomp import (
    AQSGD,
    EF21,
    Cast,
    EFMixed,
    ErrorFeedback,
    Identity,
    Quantize,
    SameIndices,
    TopK,
)
from mpcomp.api.launch import device_of_rank

# -- making a pipeline ----------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [0, -1, 2.0, "4", True, None])
def test_chunks_below_one(chunks):
    with pytest.raises(ValueError, match=f"chunks={chunks!r}: expected a whole number.*1 or more"):
        pipe_of(chunks=chunks)


@pytest.mark.parametrize(
    "split, message",
    [
        (None, "split is required here: a pipeline of one stage compresses nothing.*split=4"),
        (1, "split=1 makes one stage.*at least 2 stages"),
        (6, "6.*5"),
        (0, "0"),
        (-2, "-2"),
        ([2, 2], r"\[2, 2\] add up to 4.*5 blocks"),
        ([3, 0, 2], r"hold 0; each stage needs 1 block"),
        (["tahn"], "no block 'tahn'.*tanh"),
        (["three"], "'three'.*end of the model.*empty stage"),
        (["relu", "tanh"], "comes before"),
        (["tanh", "tanh"], "named twice"),
        ("tanh,relu", r"For blocks to cut after pass \['tanh', 'relu'\]"),
        ("3", "For a number of stages pass 3"),
        ("1, 4", r"For block counts pass \[1, 4\]"),
        ("paper", "no paper_cut"),
    ],
)
def test_a_split_that_cannot_be(split, message):
    with pytest.raises(ValueError, match=message):
        pipe_of(split=split)


def test_a_parameter_shared_across_a_cut_is_named():
    model = mlp()
    model.two = nn.Linear(19, 19)
    model.three = nn.Linear(19, 5)
    model.add_module("four", model.three)
    model.three.weight = model.two.weight = nn.Parameter(torch.randn(19, 19))
    with pytest.raises(ValueError, match=r"'two.weight' in stage 1 and 'three.weight' in stage 2"):
        pipe_of(model)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_module_used_twice_in_one_stage_is_no_two_weights(stage):
    """Beside a weight of another stage: copies of it would each move by a part of the gradient."""
    one, other = nn.Linear(19, 19), nn.Linear(19, 19)
    other.weight = one.weight
    model = nn.Sequential(one, nn.Tanh(), one, other, nn.Tanh())
    if stage == 1:
        model = nn.Sequential(other, nn.Tanh(), one, nn.Tanh(), one)
        with pytest.raises(ValueError, match="are one tensor; a stage must own what it trains"):
            pipe_of(model, split=[2, 3])
        return
    plain, x, y = copy.deepcopy(model), torch.randn(6, 19), torch.randint(19, (6,))
    pipe = pipe_of(model, split=[3, 2], ties="apart")
    pipe.forward_backward(x, y)
    F.cross_entropy(plain(x), y).backward()
    expected = plain[0].weight.grad
    for weight in (p for p in pipe.parameters() if p.dim() == 2):
        torch.testing.assert_close(weight.grad, expected)


@pytest.mark.parametrize("way", ["wrapped", "in place"])
def test_a_compiled_model(way):
    model = mlp()
    if way == "wrapped":
        model = torch.compile(model)
    else:
        model.compile()
    with pytest.raises(ValueError, match=r"the model is compiled.*block.compile\(\)"):
        pipe_of(model)


def test_compiled_blocks_stay_so():
    """A plain chain inside that was compiled as one is one block."""
    model = nn.Sequential(nn.Linear(13, 7), nn.Sequential(nn.ReLU(), nn.Linear(7, 5)))
    model[1].compile()
    pipe = pipe_of(model, split=2)
    assert pipe.stages[1].block_names == ("1",)
    assert pipe.stages[1].get_submodule("1")._compiled_call_impl is not None


def test_devices_that_do_not_fit():
    with pytest.raises(ValueError, match="2 devices for 3 stages: give one device for each stage"):
        pipe_of(devices=["cpu", "cpu"])
    with pytest.raises(ValueError, match=r"devices=\[\]: expected at least one"):
        pipe_of(devices=[])
    with pytest.raises(ValueError, match="split is required"):
        pipe_of(split=None, devices="cpu")


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"warmup_steps": -1}, "warmup_steps=-1: expected 0 or more"),
        ({"engine": "ray"}, "engine='ray'"),
        ({"schedule": "1F1B"}, "schedule='1F1B': the local engine has only its own order"),
        ({"replicas": 2}, "replicas=2.*one process holds one replica"),
        ({"dp_comp": "topk:0.1"}, "dp_comp='topk:0.1'"),
    ],
)
def test_choices_that_the_local_engine_lacks(kwargs, message):
    with pytest.raises(ValueError, match=message):
        pipe_of(**kwargs)


@pytest.mark.parametrize("argument", ["act_comp", "grad_comp"])
@pytest.mark.parametrize(
    "given, error, message",
    [
        ("topkk:0.1", ValueError, "unknown method 'topkk'.*did you mean 'topk'"),
        (["topk:0.1"], ValueError, "{argument} has 1 entries for 2 boundaries: give one for each"),
        (["topk:0.1"] * 3, ValueError, "3 entries for 2 boundaries"),
        ({2: "topk:0.1"}, ValueError, r"no boundary 2: expected 0 to 1 .*\(tanh, relu\)"),
        ({-1: "topk:0.1"}, ValueError, "no boundary -1"),
        ({"rellu": "topk:0.1"}, ValueError, "no boundary 'rellu'; did you mean 'relu'"),
        (0.1, TypeError, "{argument}=0.1: expected a compressor such as TopK"),
        (TopK, TypeError, "expected a compressor such as TopK"),
        ([TopK(0.1), 4], TypeError, "{argument}=4"),
    ],
    ids=str,
)
def test_methods_that_are_none(argument, given, error, message):
    with pytest.raises(error, match=message.format(argument=argument)):
        pipe_of(**{argument: given})


@pytest.mark.parametrize(
    "act",
    [None, Identity(), Quantize(4), Cast("fp16"), EF21(Quantize(4)), EFMixed(TopK(0.2))],
    ids=str,
)
def test_same_indices_without_a_selection_to_reuse(act):
    message = r"SameIndices\(\) at boundary 0 with act_comp=.*one selection to reuse.*TopK"
    with pytest.raises(ValueError, match=message):
        pipe_of(act_comp=act, grad_comp=SameIndices())
    with pytest.raises(ValueError, match="at boundary 1 with act_comp=none"):
        pipe_of(act_comp=["topk:0.1", None], grad_comp="same")


def test_same_indices_is_for_gradients():
    with pytest.raises(ValueError, match="it reuses the activation's selection, so it is for grad"):
        pipe_of(act_comp=SameIndices())


def test_lr_scaled_is_for_gradients():
    with pytest.raises(ValueError, match="lr_scaled is for gradients"):
        pipe_of(act_comp=ErrorFeedback(TopK(0.1), lr_scaled=True))


def test_a_model_is_not_moved_by_a_pipeline_that_cannot_be(monkeypatch):
    """Nothing half-done: modules stay on their device when anything is wrong."""
    moved = []
    monkeypatch.setattr(nn.Module, "to", lambda self, *args, **kwargs: moved.append(args) or self)
    for kwargs in (
        {"chunks": 0},
        {"split": 9},
        {"act_comp": "nope"},
        {"grad_comp": "same"},
        {"devices": ["meta"] * 2},
        {"act_comp": ["none"]},
    ):
        with pytest.raises(ValueError):
            pipe_of(**kwargs)
    assert not moved
    pipe_of()
    assert len(moved) == 3


# -- calling it -----------------------------------------------------------------------------------


class Watch:
    """A pipeline with state in every link and buffers in every stage, and what it held."""

    def __init__(self, **kwargs) -> None:
        kwargs.setdefault("act_comp", "ef21+topk:0.3")
        kwargs.setdefault("grad_comp", "ef+topk:0.3")
        torch.manual_seed(0)
        self.pipe = mpcomp.pipeline(
            convnet(), 2, split=CONV_SPLIT, loss_fn=F.cross_entropy, **kwargs
        )

    def warm(self, **kwargs) -> "Watch":
        for step in range(2):
            self.pipe.forward_backward(*images(4, step), **kwargs)
        pipe = self.pipe
        self.links, self.steps = links_state(pipe), pipe.num_steps
        self.bytes = pipe.wire_bytes
        self.tensors = {n: t.detach().clone() for n, t in pipe.state_dict().items()}
        self.grads = {n: p.grad.clone() for n, p in pipe.named_parameters()}
        return self

    def assert_untouched(self) -> None:
        """Weights, buffers, gradients, step counter, bytes and links are as they were."""
        pipe = self.pipe
        assert pipe.num_steps == self.steps and pipe.wire_bytes == self.bytes
        assert_same_state(links_state(pipe), self.links)
        assert not any(end.open_slots for link in pipe.links for end in link.endpoint.ends.values())
        for name, tensor in pipe.state_dict().items():
            assert same_bits(tensor, self.tensors[name]), name
        for name, parameter in pipe.named_parameters():
            assert same_bits(parameter.grad, self.grads[name]), name


CALLS = {
    "fewer rows than chunks": (
        lambda pipe: pipe.forward_backward(*images(1)),
        ValueError,
        "chunks=2 is larger than the batch of 1 rows: use fewer chunks.*drop_last=True",
    ),
    "fewer rows than chunks, module": (
        lambda pipe: pipe(images(1)[0]),
        ValueError,
        "chunks=2 is larger than the batch of 1 rows",
    ),
    "no rows": (
        lambda pipe: pipe.forward_backward(*images(0)),
        ValueError,
        "the batch has no rows: expected at least one sample",
    ),
    "no rows in evaluation": (
        lambda pipe: pipe.evaluate([images(0)]),
        ValueError,
        "the batch has no rows",
    ),
    "no tensor": (
        lambda pipe: pipe.forward_backward("cat.png", images(4)[1]),
        TypeError,
        "batch of type str holds no tensor",
    ),
    "rows that differ": (
        lambda pipe: pipe.forward_backward((images(4)[0], images(5)[0]), images(4)[1]),
        ValueError,
        r"tensors of a batch differ in dim 0",
    ),
    "targets that differ": (
        lambda pipe: pipe.forward_backward(images(4)[0], images(6)[1]),
        ValueError,
        "target has 6 rows, the batch 4: expected one each",
    ),
    "evaluation mode": (
        lambda pipe: pipe.eval().forward_backward(*images(4)),
        ValueError,
        r"forward_backward in evaluation mode: call pipe.train\(\) first",
    ),
    "too few ids": (
        lambda pipe: pipe.forward_backward(*images(4), sample_ids=[1, 2, 3]),
        ValueError,
        r"sample_ids of shape \[3\] for a batch of 4 rows: expected one id",
    ),
    "too many ids": (
        lambda pipe: pipe(images(4)[0], sample_ids=range(5)),
        ValueError,
        r"sample_ids of shape \[5\] for a batch of 4 rows",
    ),
    "a repeated id": (
        lambda pipe: pipe.forward_backward(*images(4), sample_ids=[1, 2, 3, 2]),
        ValueError,
        "sample id 2 occurs twice in one batch",
    ),
    "ids that are no numbers": (
        lambda pipe: pipe.forward_backward(*images(4), sample_ids=[0.5, 1.5, 2.5, 3.5]),
        TypeError,
        "sample_ids of dtype torch.float32: expected whole numbers",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_bad_call_changes_nothing(case):
    call, error, message = CALLS[case]
    watch = Watch().warm()
    with pytest.raises(error, match=message):
        call(watch.pipe)
    watch.assert_untouched()


IDS = {
    "none": (
        "sample",
        None,
        r"AQSGD\(key='sample'\) needs sample_ids \[batch\] in every training step; got none",
    ),
    "pairs for samples": (
        "sample",
        [[1, 0], [2, 0], [3, 0], [4, 0]],
        r"AQSGD\(key='sample'\) needs sample_ids \[batch\].*got ids of 2 numbers each",
    ),
    "samples for pairs": (
        "augmented",
        [1, 2, 3, 4],
        r"AQSGD\(key='augmented'\) needs sample_ids \[batch, 2\].*got ids of 1 numbers each",
    ),
    "a batch for samples": ("sample", 7, "got 7"),
    "samples for a batch": ("batch", [1, 2, 3, 4], "needs sample_ids=<index of the batch>"),
}


@pytest.mark.parametrize("style", ["forward_backward", "module"])
@pytest.mark.parametrize("case", IDS)
def test_sample_ids_of_the_wrong_form_change_nothing(case, style):
    """Found before a stage has run: BatchNorm's statistics are untouched too."""
    key, ids, message = IDS[case]
    watch = Watch(act_comp=[None, AQSGD(Quantize(4), key=key)])
    good = {"sample": range(4), "augmented": [[i, 0] for i in range(4)], "batch": 1}[key]
    watch.warm(sample_ids=good)
    x, y = images(4, 9)
    with pytest.raises(ValueError, match=message):
        if style == "module":
            watch.pipe(x, sample_ids=ids)
        else:
            watch.pipe.forward_backward(x, y, sample_ids=ids)
    watch.assert_untouched()
    watch.pipe.evaluate([(x, y)])  # needs no ids


@pytest.mark.parametrize("lr", [None, 0.0])
def test_a_learning_rate_that_is_not_known_changes_nothing(lr):
    """Found before the step, not in the middle of its backward."""
    watch = Watch(grad_comp=[None, "ef:lr_scaled=true+topk:0.3"])
    optimizer = torch.optim.SGD(watch.pipe.parameters(), lr=0.1)
    watch.pipe.follow(optimizer)
    watch.warm()
    if lr is None:
        watch.pipe.follow(None)
    else:
        optimizer.param_groups[0]["lr"] = lr
    with pytest.raises(ValueError, match=r"call pipe.follow\(optimizer\)"):
        watch.pipe.forward_backward(*images(4, 9))
    watch.assert_untouched()


@pytest.mark.parametrize("what", ["parameters", "model"])
def test_a_norm_of_something_else_than_a_pipeline(what):
    pipe = pipe_of()
    given = pipe.parameters() if what == "parameters" else pipe.merge()
    with pytest.raises(TypeError, match=r"pass the pipeline itself.*torch.nn.utils.clip_grad_norm"):
        mpcomp.clip_grad_norm_(given, 1.0)


@pytest.mark.parametrize("devices", ["cuda", ["cpu", "cuda:1", "cpu"]])
def test_devices_that_are_not_there(devices):
    with pytest.raises(ValueError, match=r"devices: 'cuda.* is not there, torch .*'cpu'"):
        pipe_of(devices=devices)


def test_fewer_gpus_than_processes(monkeypatch):
    """Of a machine: one on the GPU and one on the processor would not be one pipeline."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(ValueError, match=r"2 processes on this machine.*sees 1.*'cpu'"):
            device_of_rank(None)
        assert device_of_rank("cuda:0") == torch.device("cuda:0")


LOADERS = {
    "tensors": (
        lambda x, y: [x],
        None,
        TypeError,
        r"yielded a Tensor of shape \[4, 13\].*\(x, y\)",
    ),
    "a pair": (lambda x, y: (x, y), None, TypeError, r"a Tensor of shape \[4, 13\].*\[\(x, y\)\]"),
    "lone": (lambda x, y: [(x,)], None, TypeError, "a tuple of length 1: expected pairs"),
    "unreduced": (
        lambda x, y: [(x, y)],
        lambda o, t: F.cross_entropy(o, t, reduction="none"),
        ValueError,
        r"metric returned a tensor of shape \[2\].*reduction='none'",
    ),
    "two figures": (lambda x, y: [(x, y)], lambda o, t: (1, 2), TypeError, "a tuple.*a mapping"),
    "words": (lambda x, y: [(x, y)], lambda o, t: {"loss": None}, TypeError, "a NoneType"),
}


@pytest.mark.parametrize("case", LOADERS)
def test_what_cannot_be_evaluated(case):
    loader, metric, error, message = LOADERS[case]
    with pytest.raises(error, match=message):
        pipe_of().evaluate(loader(*rows(4)), metric)


def test_no_loss_function():
    pipe = pipe_of(loss_fn=None)
    with pytest.raises(ValueError, match=r"needs the loss: pipeline\(..., loss_fn=F.cross_entropy"):
        pipe.forward_backward(*rows(4))
    assert pipe.num_steps == 0


# -- what stages put on a cut ---------------------------------------------------------------------


class Returns(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def bad_stage(function):
    """A pipeline whose first stage returns ``function`` of its output."""
    model = nn.Sequential(nn.Linear(13, 19), Returns(function), nn.Linear(19, 5))
    return pipe_of(model, split=[2, 1], act_comp="ef21+topk:0.3")


@pytest.mark.parametrize(
    "function, error, message",
    [
        (lambda x: (x, x), TypeError, r"stage 0 .*returned a tuple.*accepted is one tensor"),
        (lambda x: None, TypeError, "returned a NoneType"),
        (
            lambda x: x.long(),
            TypeError,
            "boundary 0 act: a torch.int64 tensor cannot cross.*floating",
        ),
        (lambda x: x[:, :0], ValueError, r"boundary 0 act: an empty activation of shape \[2, 0\]"),
        (lambda x: x / 0, FloatingPointError, "boundary 0 act, step 0"),
    ],
    ids=["tuple", "none", "integers", "empty", "infinite"],
)
def test_what_cannot_cross_a_cut(function, error, message):
    pipe = bad_stage(function)
    for call in (lambda: pipe.forward_backward(*rows(4)), lambda: pipe(rows(4)[0])):
        with pytest.raises(error, match=message):
            call()
        assert pipe.num_steps == 0 and not pipe.wire_bytes
        assert not any(link.endpoint.ends for link in pipe.links)
    with pytest.raises(error, match=message):
        pipe.evaluate([rows(4)])
