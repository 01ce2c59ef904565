"""The pipeline: both ways to train, toggles, evaluation, methods per boundary, names."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from everyday import slow_but_one_a_class
from methods import FEEDBACK, beside, same_bits
from models import (
    CONV_SPLIT,
    MLP_SPLIT,
    assert_same_state,
    assert_same_training,
    clone,
    convnet,
    images,
    links_state,
    mlp,
    num_stored_rows,
    pipe_of,
    plain_step,
    rows,
    sgd,
)
from torch import nn

import mpcomp
import stages
from mpcomp import (
    AQSGD,
    EF21,
    Cast,
    ErrorFeedback,
    Identity,
    Quantize,
    SameIndices,
    TopK,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")
STATEFUL = [
    ("ef+topk:0.3", "ef+topk:0.3"),
    ("ef21+topk:0.3", "ef21+quant:4"),
    ("efmixed+topk:0.3", "efmixed:second=remainder+topk:0.3"),
    ("aqsgd+quant:4:rounding=stochastic", "quant:8"),
    ("ef21:storage=8+randomk:0.3", "ef:storage=bf16+quant:4:rounding=stochastic"),
    ("aqsgd:storage=4+topk:0.3", "same"),
]


def train(pipe, steps, first=0, optimizer=None, batch=rows):
    losses = []
    for step in range(first, first + steps):
        x, y = batch(6, step)
        losses.append(pipe.forward_backward(x, y, sample_ids=range(6)))
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(losses)


# -- forward and backward through a compressed cut ------------------------------------------------


class Straight(torch.autograd.Function):
    """§1.1: forward gives what arrives, backward compresses the gradient that arrives."""

    @staticmethod
    def forward(ctx, x, act, grad):
        ctx.grad = grad
        return compressed(act, x)

    @staticmethod
    def backward(ctx, g):
        return compressed(ctx.grad, g), None, None


def compressed(compressor, x):
    return compressor.decompress(compressor.compress(x), mpcomp.TensorMeta.of(x))


@pytest.mark.parametrize(
    "act, grad",
    [
        (TopK(0.3), TopK(0.5)),
        (Quantize(4), Quantize(8)),
        (Cast("bf16"), TopK(0.2)),
        (None, TopK(0.2)),
    ],
    ids=str,
)
def test_training_is_that_of_the_straight_through_simulation(act, grad):
    """Bit for bit what an autograd function in a plain model computes: reference §1.1."""
    pipe = pipe_of(act_comp=act, grad_comp=grad)
    plain = clone(pipe.merge())
    parts = stages.split(plain, MLP_SPLIT)
    x, y = rows(7)
    loss = pipe.forward_backward(x, y)
    total = torch.zeros(())
    for xs, ys in zip(x.split([4, 3]), y.split([4, 3]), strict=True):
        for part in parts[:-1]:
            xs = Straight.apply(part(xs), act or Identity(), grad)
        one = F.cross_entropy(parts[-1](xs), ys) * (len(ys) / 7)
        one.backward()
        total = total + one.detach()
    assert torch.equal(loss, total)
    assert_same_training(pipe, plain)
    assert pipe.wire_bytes < pipe.dense_bytes


@pytest.mark.parametrize("chunks", [1, 3])
def test_module_style_gives_the_same_gradients(chunks):
    """loss_fn(pipe(x), y).backward(): one graph, so within rounding; bitwise with one chunk."""
    one, two = (pipe_of(chunks=chunks, act_comp=TopK(0.5), grad_comp=TopK(0.5)) for _ in range(2))
    x, y = rows(6)
    output = one(x)
    assert output.shape == (6, 5)
    loss = F.cross_entropy(output, y)
    loss.backward()
    torch.testing.assert_close(two.forward_backward(x, y), loss.detach())
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)
        assert chunks > 1 or same_bits(a.grad, b.grad)
    assert one.wire_bytes == two.wire_bytes < one.dense_bytes


@pytest.mark.parametrize("act, grad", STATEFUL)
def test_module_style_learns_the_same_at_the_next_call(act, grad):
    """With one microbatch both styles are bitwise alike, states included."""
    one, two = (pipe_of(chunks=1, act_comp=act, grad_comp=grad) for _ in range(2))
    for step in range(3):
        x, y = rows(6, step)
        loss = F.cross_entropy(one(x, sample_ids=range(6)), y)
        loss.backward()
        assert torch.equal(two.forward_backward(x, y, sample_ids=range(6)), loss.detach())
    assert one.num_steps == 2 and two.num_steps == 3
    one.forward_backward(*rows(6, 3), sample_ids=range(6))
    two.forward_backward(*rows(6, 3), sample_ids=range(6))
    assert one.num_steps == two.num_steps == 4
    assert_same_state(links_state(one), links_state(two))
    assert_same_training(one, two)


@pytest.mark.parametrize("act, grad", STATEFUL)
def test_a_run_is_repeatable_and_a_seed_matters(act, grad, global_rng_untouched):
    """Law 4, and torch's generator is left as it was found."""

    def run(seed):
        pipe = pipe_of(convnet_seeded(), split=CONV_SPLIT, act_comp=act, grad_comp=grad, seed=seed)
        with global_rng_untouched():
            losses = train(pipe, 4, batch=images, optimizer=sgd(pipe))
        return losses, links_state(pipe)

    (one, state), (two, other), (three, _) = run(1), run(1), run(2)
    assert same_bits(one, two)
    assert_same_state(state, other)
    assert not torch.equal(one, three)  # at least dropout


def convnet_seeded():
    torch.manual_seed(0)
    return convnet()


@pytest.mark.parametrize("method", slow_but_one_a_class(FEEDBACK), ids=str)
def test_every_feedback_method_trains(method):
    """Loss falls on a fixed batch while bytes are saved (law 9)."""
    if isinstance(method, mpcomp.AQSGD):
        pipe = pipe_of(act_comp=method, grad_comp=beside(method, None))
    else:
        pipe = pipe_of(grad_comp=method)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    x, y = rows(8)
    losses = []
    for _ in range(40):
        losses.append(float(pipe.forward_backward(x, y, sample_ids=range(8))))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0], losses[::10]
    links = [link for link in pipe.links if link.method == method]
    assert len(links) == 2
    for link in links:
        traffic = link.meter.train
        assert traffic.ratio < 0.9 and traffic.relative_error > 0, link.name


def test_both_ends_agree_through_training():
    """Law 5 inside a pipeline: estimates at sender and receiver are equal bit for bit."""
    pipe = pipe_of(act_comp="aqsgd:storage=4+quant:2", grad_comp="ef21:storage=fp16+topk:0.2")
    optimizer = sgd(pipe)
    for step in range(8):
        x, y = rows(7 - step % 3, step)
        pipe.forward_backward(x, y, sample_ids=torch.randperm(20)[: len(y)])
        optimizer.step()
    for link in pipe.links:
        state = link.endpoint.state_dict()
        for key in [key for key in state if key.startswith("sender.")]:
            assert same_bits(state[key], state[key.replace("sender", "receiver")]), link.name
    assert num_stored_rows(pipe) > 0


# -- law 6: what must not change state ------------------------------------------------------------


@pytest.mark.parametrize("act, grad", STATEFUL)
def test_evaluation_and_no_grad_change_nothing(act, grad):
    """Evaluating after every step, on and off, does not change the training by a bit."""
    plain = pipe_of(convnet_seeded(), split=CONV_SPLIT, act_comp=act, grad_comp=grad)
    curious = pipe_of(convnet_seeded(), split=CONV_SPLIT, act_comp=act, grad_comp=grad)
    optimizers = sgd(plain), sgd(curious)
    for step in range(3):
        train(plain, 1, step, optimizers[0], images)
        train(curious, 1, step, optimizers[1], images)
        before = links_state(curious)
        buffers = {name: b.clone() for name, b in curious.named_buffers()}
        x, y = images(5, 99)
        curious.evaluate([(x, y), (x[:1], y[:1])])
        with curious.uncompressed():
            curious.evaluate([(x, y)])
        curious.eval()
        curious(x)  # with gradients, but in evaluation mode
        curious.train()
        assert_same_state(links_state(curious), before)
        assert all(torch.equal(b, buffers[name]) for name, b in curious.named_buffers())
        with torch.no_grad():  # in training mode: dropout and BatchNorm's, but no links'
            state = {name: b.clone() for name, b in curious.named_buffers()}
            curious(x)
            for name, buffer in curious.named_buffers():
                buffer.copy_(state[name])
        assert_same_state(links_state(curious), before)
    assert plain.num_steps == curious.num_steps == 3
    assert_same_training(curious, plain)
    assert_same_state(links_state(curious), links_state(plain))
    assert plain.wire_bytes == curious.wire_bytes
    assert any(link.meter.eval.messages for link in curious.links)


@pytest.mark.parametrize("grad", ["same", "ef21+topk:0.3"])
def test_evaluation_between_forward_and_backward_changes_nothing(grad):
    """Module style: an evaluation while a step is open leaves its masks and notes alone."""
    one, two = (pipe_of(act_comp="ef+topk:0.3", grad_comp=grad) for _ in range(2))
    for step in range(2):
        x, y = rows(6, step)
        losses = [F.cross_entropy(pipe(x), y) for pipe in (one, two)]
        two.evaluate([rows(6, 50 + step)])
        for loss in losses:
            loss.backward()
    assert_same_training(two, one)
    for pipe in (one, two):
        pipe.forward_backward(*rows(6, 9))
    assert_same_state(links_state(two), links_state(one))


def test_modes_are_put_back_after_an_evaluation():
    """Every module's own: a frozen BatchNorm stays in evaluation mode."""
    model = convnet()
    model.bn1.eval()
    pipe = mpcomp.pipeline(model, 2, split=CONV_SPLIT, loss_fn=F.cross_entropy)
    modes = [module.training for module in pipe.modules()]
    pipe.evaluate([images(4)])
    assert [module.training for module in pipe.modules()] == modes
    assert not model.bn1.training and model.bn2.training
    with pytest.raises(ZeroDivisionError):
        pipe.evaluate([images(4)], lambda output, target: 1 / 0)
    assert [module.training for module in pipe.modules()] == modes


# -- toggles --------------------------------------------------------------------------------------


def sent_dense(pipe):
    """By link: whether the last step's messages were as long as dense ones."""
    return [link.meter.train.ratio > 1 for link in pipe.links]


@pytest.mark.parametrize("act, grad", list(itertools.product([True, False], repeat=2)))
def test_toggles_are_per_direction_and_put_back(act, grad):
    pipe = pipe_of(act_comp=TopK(0.3), grad_comp=TopK(0.3))
    with pipe.compressed(act=act, grad=grad):
        train(pipe, 1)
    assert sent_dense(pipe) == [not act, not grad] * 2
    fresh = pipe_of(act_comp=TopK(0.3), grad_comp=TopK(0.3))
    with pytest.raises(KeyError), fresh.uncompressed():
        raise KeyError
    train(fresh, 1)
    assert sent_dense(fresh) == [False] * 4


def test_toggles_nest():
    pipe = pipe_of(act_comp=TopK(0.3), grad_comp=TopK(0.3))
    with pipe.uncompressed():
        with pipe.compressed(act=True, grad=False):
            train(pipe, 1)
            assert sent_dense(pipe) == [False, True] * 2
        before = [link.meter.train.sent for link in pipe.links]
        train(pipe, 1)
        for link, sent in zip(pipe.links, before, strict=True):
            step = link.meter.train.sent - sent
            assert step.wire_bytes > step.dense_bytes > 0  # a header besides


def test_evaluation_off_is_the_plain_model_and_on_is_not():
    """Both evaluations of a compressed model: finding 3 of §2.6 needs them apart."""
    pipe = pipe_of(convnet_seeded(), split=CONV_SPLIT, act_comp=TopK(0.1))
    train(pipe, 2, batch=images, optimizer=sgd(pipe))
    x, y = images(6)
    plain = clone(pipe.merge()).eval()
    expected = [F.cross_entropy(plain(x[i : i + 3]), y[i : i + 3]).item() for i in (0, 3)]
    with pipe.uncompressed():
        off = pipe.evaluate([(x, y)])
    on = pipe.evaluate([(x, y)])
    assert off == pytest.approx(sum(expected) / 2, rel=1e-6)
    assert abs(on - off) > 1e-3
    assert pipe.boundaries[0].act.meter.eval.ratio < 1


@pytest.mark.parametrize("act, grad", STATEFUL)
def test_warm_up_is_compression_switched_off_for_n_steps(act, grad):
    """The same bits, and after it the same state, whichever way it is said."""
    warm = pipe_of(act_comp=act, grad_comp=grad, warmup_steps=2)
    switched = pipe_of(act_comp=act, grad_comp=grad)
    optimizers = sgd(warm), sgd(switched)
    train(warm, 2, optimizer=optimizers[0])
    with switched.uncompressed():
        train(switched, 2, optimizer=optimizers[1])
    assert sent_dense(warm) == [True] * 4
    for pipe, optimizer in zip((warm, switched), optimizers, strict=True):
        train(pipe, 2, 2, optimizer)
    assert_same_training(warm, switched)
    assert_same_state(links_state(warm), links_state(switched))
    assert warm.wire_bytes < 2 * switched.dense_bytes


def test_ef21_needs_no_raw_send_after_a_warm_up():
    """Estimates are set to what went dense: the first compressed message is a correction."""
    pipe = pipe_of(act_comp=EF21(TopK(0.3)), warmup_steps=1)
    train(pipe, 1)
    dense = pipe.boundaries[0].act.meter.train.wire_bytes
    train(pipe, 1, 1)
    assert pipe.boundaries[0].act.meter.train.wire_bytes - dense < 0.6 * dense


def test_same_indices_gradients_are_zero_where_activations_were_dropped():
    """Pitfall 5: in a pipeline, per microbatch; dense in the warm-up; no index bytes."""
    pipe = pipe_of(act_comp=TopK(0.3), grad_comp=SameIndices(), warmup_steps=1)
    arrived, gradients = [], []
    pipe.stages[1].register_forward_pre_hook(lambda _m, args: arrived.append(args[0]))
    pipe.stages[0].register_forward_hook(lambda _m, _a, out: keep_gradient(out, gradients))
    train(pipe, 1)
    assert all((g != 0).all() for g in gradients)
    arrived.clear(), gradients.clear()
    before = pipe.boundaries[0].grad.meter.train.wire_bytes
    train(pipe, 1, 1)
    for x, g in zip(arrived, gradients, strict=True):
        assert torch.equal(g != 0, x != 0) and 0 < (x != 0).sum() < x.numel() / 2
    kept = sum(int((x != 0).sum()) for x in arrived)
    assert pipe.boundaries[0].grad.meter.train.wire_bytes - before == 2 * 16 + 4 * kept


def keep_gradient(output, gradients):
    output.register_hook(lambda gradient: gradients.append(gradient))


# -- evaluation -----------------------------------------------------------------------------------


def test_evaluate_weights_by_rows_and_takes_numbers_tensors_and_mappings():
    pipe = pipe_of()
    loader = [(*rows(7, 0), "more"), rows(2, 1), rows(1, 2)]  # fewer rows than chunks, too
    plain = clone(pipe.merge()).eval()

    def correct(output, target):
        return (output.argmax(1) == target).float().mean()

    x, y = (torch.cat([batch[i] for batch in loader]) for i in range(2))
    accuracy = float(correct(plain(x), y))
    loss = F.cross_entropy(plain(x), y).item()
    assert pipe.evaluate(loader, correct) == pytest.approx(accuracy)
    assert pipe.evaluate(loader, lambda o, t: correct(o, t).item()) == pytest.approx(accuracy)
    assert pipe.evaluate(loader) == pytest.approx(loss)
    both = pipe.evaluate(loader, lambda o, t: {"loss": F.cross_entropy(o, t), "acc": correct(o, t)})
    assert both == {"loss": pytest.approx(loss), "acc": pytest.approx(accuracy)}


def test_evaluate_without_data_or_metric():
    with pytest.raises(ValueError, match="the loader yielded no batch"):
        pipe_of().evaluate([])
    with pytest.raises(ValueError, match=r"evaluate needs a metric: evaluate\(loader, metric\)"):
        pipe_of(loss_fn=None).evaluate([rows(4)])


# -- methods per boundary -------------------------------------------------------------------------


def methods_of(pipe, direction):
    return [str(link.method) for link in pipe.links if link.direction == direction]


@pytest.mark.parametrize(
    "given, expected",
    [
        (None, ["none", "none"]),
        ("topk:0.1", ["topk:0.1", "topk:0.1"]),
        (TopK(0.1), ["topk:0.1", "topk:0.1"]),
        (["topk:0.1", None], ["topk:0.1", "none"]),
        ((EF21(TopK(0.1)), "quant:4"), ["ef21+topk:0.1", "quant:4"]),
        ({1: "quant:4"}, ["none", "quant:4"]),
        ({"tanh": "quant:4", "relu": "fp16"}, ["quant:4", "fp16"]),
    ],
    ids=str,
)
def test_one_method_for_all_a_list_or_a_mapping(given, expected):
    pipe = pipe_of(act_comp=given, grad_comp=given)
    assert methods_of(pipe, "act") == methods_of(pipe, "grad") == expected
    train(pipe, 4)  # ef21's first step is dense
    for link, method in zip(pipe.links, [m for m in expected for _ in range(2)], strict=True):
        assert (link.meter.train.ratio > 1) == (method == "none")


def test_a_container_names_the_cut_after_it():
    """layer1 stands for the cut after layer1.1, as in the paper's cut."""
    pipe = mpcomp.pipeline(
        stages.resnet18(width=2), 1, split="paper", act_comp={"layer2": "topk:0.1"}
    )
    assert methods_of(pipe, "act") == ["none", "topk:0.1", "none"]


# -- the rest of an ordinary training loop --------------------------------------------------------


@pytest.mark.parametrize("act, grad", [(None, None), ("ef21+topk:0.3", "ef+topk:0.3")])
def test_gradients_accumulate_over_calls(act, grad):
    """Several calls before the optimizer's step add up, each a step of the links."""
    pipe = pipe_of(act_comp=act, grad_comp=grad)
    single = pipe_of(act_comp=act, grad_comp=grad)
    sums = None
    for step in range(3):
        x, y = rows(6, step)
        pipe.forward_backward(x, y)
        single.forward_backward(x, y)
        grads = [p.grad.clone() for p in single.parameters()]
        sums = grads if sums is None else [a + b for a, b in zip(sums, grads, strict=True)]
        single.zero_grad()
    for parameter, total in zip(pipe.parameters(), sums, strict=True):
        torch.testing.assert_close(parameter.grad, total, rtol=1e-5, atol=1e-7)
    assert pipe.num_steps == 3
    assert_same_state(links_state(pipe), links_state(single))


def test_uncompressed_accumulation_is_the_plain_models():
    pipe = pipe_of()
    plain = clone(pipe.merge())
    for step in range(2):
        x, y = rows(6, step)
        assert torch.equal(pipe.forward_backward(x, y), plain_step(plain, x, y, [3, 3]))
    assert_same_training(pipe, plain)


def test_names_and_state_are_the_models():
    """Optimizers, checkpoints and schedulers see the model, not how it was cut."""
    model = convnet()
    pipe = mpcomp.pipeline(model, 2, split=CONV_SPLIT)
    assert [n for n, _ in pipe.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert [n for n, _ in pipe.named_buffers()] == [n for n, _ in model.named_buffers()]
    assert list(pipe.state_dict()) == list(model.state_dict())
    assert all(p is q for p, q in zip(pipe.parameters(), model.parameters(), strict=True))
    other = convnet()
    pipe.load_state_dict(other.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])
    with pytest.raises(RuntimeError, match=r"missing \['conv1.weight'.*unexpected \['x'\]"):
        pipe.load_state_dict({"x": torch.zeros(())})
    keys = pipe.load_state_dict({"x": torch.zeros(())}, strict=False)
    assert "conv1.weight" in keys.missing_keys and keys.unexpected_keys == ["x"]


def test_state_reaches_a_module_that_holds_the_pipeline():
    """As a child, also as the first one, whose parent's dictionary is still empty."""
    outer = nn.ModuleDict({"pipe": pipe_of()})
    assert list(outer.state_dict()) == [f"pipe.{name}" for name in mlp().state_dict()]


def test_merge_returns_the_very_model_as_trained():
    model = mlp()
    before = clone(model)
    pipe = pipe_of(model, act_comp=TopK(0.3))
    train(pipe, 2, optimizer=sgd(pipe))
    merged = pipe.merge()
    assert merged is model and list(merged.state_dict()) == list(before.state_dict())
    assert not torch.equal(model.one.weight, before.one.weight)


def test_only_the_dtype_can_be_changed():
    pipe = pipe_of()
    assert pipe.to(torch.float64) is pipe and next(pipe.parameters()).dtype == torch.float64
    x, y = rows(4)
    assert pipe.forward_backward(x.double(), y).dtype == torch.float64
    for move in (lambda: pipe.to("meta"), lambda: pipe.to(torch.zeros(1, device="meta"))):
        with pytest.raises(TypeError, match=r"devices given to mpcomp.pipeline\(..., devices="):
            move()


def test_split_forms():
    for split, names in [
        (2, 2),
        ([1, 4], ["one"]),
        (["tanh"], ["tanh"]),
        (MLP_SPLIT, ["tanh", "relu"]),
    ]:
        pipe = pipe_of(split=split)
        if isinstance(names, int):
            assert len(pipe.stages) == names
        else:
            assert [stage.block_names[-1] for stage in pipe.cut_stages[:-1]] == names
    assert len(pipe_of(split=None, devices=["cpu", "cpu", "cpu"]).stages) == 3


def test_links_are_in_order():
    names = [link.name for link in pipe_of().links]
    assert names == [f"boundary {i} {way}" for i in range(2) for way in ("act", "grad")]


def test_dropout_does_not_repeat_from_step_to_step():
    """Draws depend on (step, stage, microbatch), and on nothing that was drawn before."""
    pipe = pipe_of(
        nn.Sequential(nn.Linear(13, 64), nn.Dropout(0.5), nn.Linear(64, 5)), split=[2, 1]
    )
    masks = []
    pipe.stages[0].register_forward_hook(lambda _m, _a, output: masks.append(output == 0))
    x, y = rows(4)
    for _ in range(2):
        torch.rand(7)
        pipe.forward_backward(x, y)
    for a, b in itertools.combinations(masks, 2):
        assert not torch.equal(a, b)
    assert len(masks) == 4


def test_aqsgd_with_augmentation_seeds_and_batch_indices():
    """Keys other than the sample id, through the pipeline."""
    augmented = pipe_of(act_comp=AQSGD(Quantize(4), key="augmented"))
    x, y = rows(4)
    ids = torch.tensor([[0, 1], [0, 2], [1, 1], [1, 2]])
    for _ in range(2):
        augmented.forward_backward(x, y, sample_ids=ids)
    assert num_stored_rows(augmented) == 2 * 2 * 4
    batches = pipe_of(act_comp=AQSGD(Quantize(4), key="batch"))
    for index in (3, 8, 3):
        batches.forward_backward(x, y, sample_ids=index)
    assert num_stored_rows(batches) == 2 * 2 * 4 * 2
    assert batches.boundaries[0].act.meter.train.ratio < 1


def test_following_rescales_the_residual():
    """lr_scaled through the pipeline: after a change of the rate, other gradients than without."""

    def run(lr_scaled, rates):
        pipe = pipe_of(grad_comp=ErrorFeedback(TopK(0.2), lr_scaled=lr_scaled), chunks=1)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=rates[0])
        pipe.follow(optimizer)
        grads = []
        for step, lr in enumerate(rates):
            optimizer.param_groups[0]["lr"] = lr
            pipe.zero_grad()
            pipe.forward_backward(*rows(6, step))
            grads.append(pipe.merge().one.weight.grad.clone())
        return grads

    constant = run(True, [0.5, 0.5]), run(False, [0.5, 0.5])
    assert same_bits(constant[0][1], constant[1][1])  # powers of two: units do not matter
    changed = run(True, [0.5, 0.25]), run(False, [0.5, 0.25])
    assert same_bits(changed[0][0], changed[1][0])
    assert not torch.equal(changed[0][1], changed[1][1])


def test_gradients_in_evaluation_mode():
    """As for any module: a saliency map needs the gradient of the input, and no training."""
    torch.manual_seed(0)
    model = mlp()
    x, y = rows(6)
    x.requires_grad_()
    F.cross_entropy(model.eval()(x), y).backward()
    expected, x.grad = x.grad, None
    model.zero_grad()
    pipe = mpcomp.pipeline(model, 2, split=MLP_SPLIT).eval()
    F.cross_entropy(pipe(x), y).backward()
    torch.testing.assert_close(x.grad, expected)
    assert pipe.num_steps == 0


@pytest.mark.parametrize("chunks", [1, 3, 4, 8])
def test_chunks_may_be_changed_between_steps(chunks):
    """Steps are then those of a pipeline that was made with as many."""
    changed, made = pipe_of(), pipe_of(chunks=chunks)
    changed.chunks = chunks
    calls = []
    changed.stages[0].register_forward_hook(lambda *_: calls.append(1))
    x, y = rows(8)
    assert same_bits(changed.forward_backward(x, y), made.forward_backward(x, y))
    assert (len(calls), changed.chunks) == (chunks, chunks)
    for ours, theirs in zip(changed.parameters(), made.parameters(), strict=True):
        assert same_bits(ours.grad, theirs.grad)


def test_a_scaler_may_be_given_later():
    pipe = pipe_of()
    pipe.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    plain = pipe_of()
    pipe.forward_backward(*rows(8))
    plain.forward_backward(*rows(8))
    for scaled, as_it_is in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(scaled.grad, 8 * as_it_is.grad)
