"""bf16 autocast, fp16 under a loss scaler with skipped steps, and NaN or Inf at a cut."""

import pytest
import torch
import torch.nn.functional as F
from methods import same_bits
from models import (
    CONV_SPLIT,
    assert_same_state,
    assert_same_training,
    clone,
    convnet,
    images,
    links_state,
    num_stored_rows,
    pipe_of,
    rows,
    sgd,
)
from torch import nn

import mpcomp

pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")
STATEFUL = [
    ("ef+topk:0.3", "ef+topk:0.3"),
    ("ef21+topk:0.3", "ef21+topk:0.3"),
    ("topk:0.3", "ef:storage=8+quant:4:rounding=stochastic"),
    ("aqsgd+quant:4", "ef21:storage=bf16+randomk:0.3"),
    ("ef21+topk:0.3", "same"),
]


def scaler_of(scale):
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)


def train_step(pipe, optimizer, scaler, step, **kwargs):
    """One step of an ordinary loop with a loss scaler."""
    optimizer.zero_grad()
    with torch.autocast("cpu", **kwargs):
        loss = pipe.forward_backward(*rows(6, step), sample_ids=range(6))
    scaler.unscale_(optimizer)
    mpcomp.clip_grad_norm_(pipe, 10.0)
    scaler.step(optimizer)
    scaler.update()
    return loss


# -- autocast -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_uncompressed_autocast_is_the_plain_model_under_autocast(dtype, recompute):
    """Law 1 in mixed precision; cuts carry two bytes an element."""
    pipe = pipe_of(recompute=recompute)
    plain = clone(pipe.merge())
    x, y = rows(7)
    total = torch.zeros(())
    with torch.autocast("cpu", dtype=dtype):
        loss = pipe.forward_backward(x, y)
        for xs, ys in zip(x.split([4, 3]), y.split([4, 3]), strict=True):
            one = F.cross_entropy(plain(xs), ys) * (len(ys) / 7)
            one.backward()
            total = total + one.detach()
    assert torch.equal(loss, total)
    assert_same_training(pipe, plain)
    assert pipe.dense_bytes == 7 * (19 + 17) * 2 * 2


@pytest.mark.each_once
@pytest.mark.parametrize("act, grad", STATEFUL)
@pytest.mark.parametrize("recompute", [False, True])
def test_compressed_training_under_bf16_autocast(act, grad, recompute):
    """It trains, saves bytes, and recomputation changes nothing."""
    pipe = pipe_of(act_comp=act, grad_comp=grad, recompute=recompute)
    reference = pipe_of(act_comp=act, grad_comp=grad)
    optimizers = sgd(pipe), sgd(reference)
    losses = []
    for _ in range(12):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pair = [p.forward_backward(*rows(6), sample_ids=range(6)) for p in (pipe, reference)]
        assert torch.equal(*pair)
        losses.append(float(pair[0]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert losses[-1] < losses[0] and pipe.wire_bytes < pipe.dense_bytes
    assert_same_state(links_state(pipe), links_state(reference))
    # State is fp32, whatever crosses the cut, unless a storage was asked for.
    for state in links_state(pipe).values():
        for name in ("sender.rows0", "receiver.rows0"):
            assert name not in state or state[name].dtype in (torch.float32, torch.bfloat16)


def test_a_model_in_bf16_crosses_in_bf16():
    pipe = pipe_of(act_comp="topk:0.3", grad_comp="ef+topk:0.3").to(torch.bfloat16)
    x, y = rows(6)
    loss = pipe.forward_backward(x.bfloat16(), y)
    assert loss.dtype == torch.bfloat16 and loss.isfinite()
    assert pipe.dense_bytes == 6 * (19 + 17) * 2 * 2


# -- the loss scale -------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [2.0**4, 2.0**16])
@pytest.mark.parametrize("act, grad", STATEFUL)
def test_states_and_gradients_are_free_of_the_loss_scale(act, grad, scale):
    """An fp32 model with a scale that is a power of two trains as without one, bit for bit."""
    scaler = scaler_of(scale)
    scaled = pipe_of(act_comp=act, grad_comp=grad, scaler=scaler)
    plain = pipe_of(act_comp=act, grad_comp=grad)
    optimizers = sgd(scaled), sgd(plain)
    for step in range(4):
        x, y = rows(6, step)
        loss = scaled.forward_backward(x, y, sample_ids=range(6))
        assert torch.equal(loss, plain.forward_backward(x, y, sample_ids=range(6)))
        scaler.unscale_(optimizers[0])
        assert_same_training(scaled, plain)
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert_same_state(links_state(scaled), links_state(plain))
    assert not scaled.step_skipped and num_stored_rows(scaled) > 0


def test_a_changing_scale_changes_no_state():
    """Growth in the middle of a run: residuals are kept without it."""
    states = []
    for interval in (1, 1000):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=interval)
        pipe = pipe_of(grad_comp="ef+topk:0.3", scaler=scaler)
        optimizer = sgd(pipe)
        for step in range(4):
            train_step(pipe, optimizer, scaler, step, enabled=False)
        assert scaler.get_scale() == (64.0 if interval == 1 else 4.0)
        states.append(links_state(pipe))
    assert_same_state(*states)


def test_a_disabled_scaler_is_none():
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    pipe, plain = pipe_of(scaler=scaler), pipe_of()
    assert torch.equal(pipe.forward_backward(*rows(4)), plain.forward_backward(*rows(4)))
    assert_same_training(pipe, plain)


# -- skipped steps --------------------------------------------------------------------------------


@pytest.mark.parametrize("act, grad", STATEFUL)
def test_fp16_skips_steps_until_the_scale_fits(act, grad):
    """Law 6: a skipped step counts, and changes neither weights nor links; then it trains."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, backoff_factor=0.125)
    pipe = pipe_of(act_comp=act, grad_comp=grad, scaler=scaler)
    optimizer = sgd(pipe)
    skipped, losses = [], []
    for step in range(10):
        before = links_state(pipe)
        weights = [p.detach().clone() for p in pipe.parameters()]
        losses.append(train_step(pipe, optimizer, scaler, 0, dtype=torch.float16))
        skipped.append(pipe.step_skipped)
        same = all(torch.equal(p, w) for p, w in zip(pipe.parameters(), weights, strict=True))
        assert same == pipe.step_skipped  # we and the scaler agree
        if pipe.step_skipped and step:
            assert_same_state(links_state(pipe), before)
        assert pipe.num_steps == step + 1
    assert skipped[:2] == [True, True] and skipped[4:].count(False) >= 5
    assert losses[-1] < losses[0] and all(loss.isfinite() for loss in losses)
    assert pipe.wire_bytes < pipe.dense_bytes and num_stored_rows(pipe) > 0
    report = pipe.report(show=False)["boundaries"]
    gradients = [entry["train"] for entry in report if entry["direction"] == "grad"]
    assert sum(traffic["nonfinite"] for traffic in gradients) > 0
    # Fidelity is that of the messages that were used.
    assert all(0 <= traffic["relative_error"] < 2 for traffic in gradients)


@pytest.mark.parametrize("act, grad", STATEFUL)
def test_a_skipped_step_is_as_if_it_had_not_been(act, grad):
    """Apart from its number: the next step's messages are those of a run without it."""
    scaler = scaler_of(2.0**10)
    pipes = [pipe_of(act_comp=act, grad_comp=grad, scaler=scaler) for _ in range(2)]
    for pipe in pipes:
        for step in range(2):
            pipe.forward_backward(*rows(6, step), sample_ids=range(6))
        pipe.zero_grad()
    explode(pipes[0])
    pipes[1].num_steps += 1
    assert pipes[0].step_skipped
    assert_same_state(links_state(pipes[0]), links_state(pipes[1]))
    pipes[0].zero_grad()
    losses = [pipe.forward_backward(*rows(6, 5), sample_ids=range(6)) for pipe in pipes]
    assert torch.equal(*losses) and not pipes[0].step_skipped
    assert_same_training(*pipes)
    assert_same_state(links_state(pipes[0]), links_state(pipes[1]))


def explode(pipe, where=2):
    """A step whose gradient is infinite from stage ``where`` on backwards."""
    handle = pipe.stages[where].register_forward_pre_hook(
        lambda _m, args: args[0].register_hook(lambda g: g * torch.inf) and None
    )
    pipe.forward_backward(*rows(6, 4), sample_ids=range(6))
    handle.remove()


def test_an_overflow_in_parameters_alone_skips_too():
    """No cut saw it, but the scaler will: links must agree with it."""
    scaler = scaler_of(2.0)
    pipe = pipe_of(act_comp="ef21+topk:0.3", grad_comp="ef21+topk:0.3", scaler=scaler)
    pipe.forward_backward(*rows(6))
    before = links_state(pipe)
    pipe.zero_grad()
    weight = pipe.merge().three.weight
    handle = weight.register_hook(lambda g: g * torch.inf)
    pipe.forward_backward(*rows(6, 1))
    handle.remove()
    assert pipe.step_skipped and all(link.meter.train.nonfinite == 0 for link in pipe.links)
    assert_same_state(links_state(pipe), before)


def test_module_style_skips_at_the_next_call():
    """The step is judged when it is over, and an evaluation in between is not disturbed by it."""
    scaler = scaler_of(2.0**8)
    pipe = pipe_of(act_comp="ef21+topk:0.3", grad_comp="ef21+topk:0.3", scaler=scaler)
    pipe.forward_backward(*rows(6))
    pipe.zero_grad()
    before = links_state(pipe)
    x, y = rows(6, 1)
    output = pipe(x)
    output.register_hook(lambda g: g * torch.inf)
    scaler.scale(F.cross_entropy(output, y)).backward()
    assert pipe.evaluate([rows(6, 2)]) > 0
    assert pipe.num_steps == 1 and not pipe.step_skipped
    pipe.zero_grad()
    output = pipe(x)
    assert pipe.num_steps == 2 and pipe.step_skipped
    assert_same_state(links_state(pipe), before)
    scaler.scale(F.cross_entropy(output, y)).backward()
    pipe.forward_backward(x, y)
    assert pipe.num_steps == 4 and not pipe.step_skipped


def test_module_style_agrees_with_a_scaler_that_has_skipped():
    """Gradients are gone by the next call, and no cut saw the overflow; the scale tells."""
    scaler = scaler_of(2.0**8)
    pipe = pipe_of(act_comp="ef21+topk:0.3", grad_comp="ef21+topk:0.3", scaler=scaler)
    optimizer = sgd(pipe)
    states = []
    for step in range(4):
        x, y = rows(6, step)
        loss = F.cross_entropy(pipe(x), y)
        states.append((links_state(pipe), pipe.step_skipped))  # settled by the call
        scaler.scale(loss).backward()
        if step == 1:
            next(pipe.parameters()).grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 2.0**7
    assert [skipped for _, skipped in states] == [False, False, True, False]
    assert_same_state(states[1][0], states[2][0])
    with pytest.raises(AssertionError):
        assert_same_state(states[2][0], states[3][0])


# -- NaN and Inf at a cut -------------------------------------------------------------------------


def snapshot(pipe):
    return links_state(pipe), pipe.num_steps, [p.detach().clone() for p in pipe.parameters()]


def assert_nothing_half_done(pipe, before):
    state, steps, weights = before
    assert_same_state(links_state(pipe), state)
    assert pipe.num_steps == steps
    assert all(same_bits(p, w) for p, w in zip(pipe.parameters(), weights, strict=True))
    assert not any(end.open_slots for link in pipe.links for end in link.endpoint.ends.values())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("style", ["forward_backward", "module", "no_grad", "evaluate"])
def test_a_nonfinite_activation_is_an_error_naming_where(style, scaled, bad):
    """Boundary, direction and step; with a scaler too, as skipping would not help."""
    pipe = pipe_of(
        act_comp="ef21+topk:0.3",
        grad_comp="ef+topk:0.3",
        scaler=scaler_of(8.0) if scaled else None,
    )
    for step in range(2):
        pipe.forward_backward(*rows(6, step))
    before = snapshot(pipe)
    x, y = rows(6)
    handle = pipe.stages[1].register_forward_hook(lambda _m, _a, output: output * bad)
    with pytest.raises(FloatingPointError, match=r"NaN or Inf at boundary 1 act, step 2"):
        if style == "forward_backward":
            pipe.forward_backward(x, y)
        elif style == "module":
            pipe(x)
        elif style == "no_grad":
            with torch.no_grad():
                pipe(x)
        else:
            pipe.evaluate([(x, y)])
    handle.remove()
    assert_nothing_half_done(pipe, before)
    meter = pipe.boundaries[1].act.meter
    assert meter.of(style in ("forward_backward", "module")).nonfinite == 1
    twin = pipe_of(
        act_comp="ef21+topk:0.3",
        grad_comp="ef+topk:0.3",
        scaler=scaler_of(8.0) if scaled else None,
    )
    for step in range(2):
        twin.forward_backward(*rows(6, step))
    for one in (pipe, twin):
        one.zero_grad()
    losses = [one.forward_backward(x, y) for one in (pipe, twin)]
    assert torch.equal(*losses)
    assert_same_state(links_state(pipe), links_state(twin))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", [1, 2])
def test_a_nonfinite_gradient_without_a_scaler_is_an_error(where, bad):
    pipe = pipe_of(act_comp="ef21+topk:0.3", grad_comp="ef+topk:0.3")
    pipe.forward_backward(*rows(6))
    before = snapshot(pipe)
    handle = pipe.stages[where].register_forward_pre_hook(
        lambda _m, args: args[0].register_hook(lambda g: g * bad) and None
    )
    with pytest.raises(FloatingPointError, match=rf"at boundary {where - 1} grad, step 1.*scaler="):
        pipe.forward_backward(*rows(6, 1))
    handle.remove()
    assert_nothing_half_done(pipe, before)
    assert pipe.boundaries[where - 1].grad.meter.train.nonfinite == 1
    pipe.forward_backward(*rows(6, 2))
    assert pipe.num_steps == 2


def test_a_nonfinite_gradient_in_module_style_leaves_no_trace():
    """The error comes out of backward(); what links had noted till then is not stored later."""
    pipe = pipe_of(act_comp="ef21+topk:0.3", grad_comp="ef21+topk:0.3")
    pipe.forward_backward(*rows(6))
    state = links_state(pipe)
    x, y = rows(6, 1)
    handle = pipe.stages[1].register_forward_pre_hook(
        lambda _m, args: args[0].register_hook(lambda g: g * torch.nan) and None
    )
    output = pipe(x)
    with pytest.raises(FloatingPointError, match="boundary 0 grad, step 1"):
        F.cross_entropy(output, y).backward()
    handle.remove()
    assert_same_state(links_state(pipe), state)
    pipe.zero_grad()
    pipe.eval()(x)
    pipe.train()(x)  # settles the failed step, without raising again
    assert_same_state(links_state(pipe), state)


def test_a_nonfinite_loss_without_cuts_seeing_it_is_the_users():
    """NaN made behind the last cut is the loss's, and is named so."""
    pipe = pipe_of(loss_fn=lambda output, target: F.cross_entropy(output, target) * torch.nan)
    with pytest.raises(FloatingPointError, match="the loss of step 0 is NaN or Inf"):
        pipe.forward_backward(*rows(6))
    assert pipe.num_steps == 0


def test_an_error_of_the_users_own_leaves_no_trace():
    """Whatever is raised inside a step: links are as before, and the next step is the same one."""
    pipe = pipe_of(act_comp="ef21+topk:0.3", grad_comp="ef21+topk:0.3")
    pipe.forward_backward(*rows(6))
    before = snapshot(pipe)
    for module, when in ((pipe.stages[1], "forward"), (pipe.stages[0], "backward")):
        if when == "forward":
            handle = module.register_forward_hook(lambda *_: 1 / 0)
        else:
            handle = module.register_forward_hook(
                lambda _m, _a, output: output.register_hook(lambda g: 1 / 0) and None
            )
        with pytest.raises(ZeroDivisionError):
            pipe.forward_backward(*rows(6, 1))
        handle.remove()
        assert_nothing_half_done(pipe, before)


def test_batchnorm_and_dropout_under_a_scaler_and_recomputation():
    """fp16 autocast, skipped steps and recomputation together: as without recomputation."""
    results = []
    for recompute in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, backoff_factor=0.125)
        torch.manual_seed(0)
        pipe = mpcomp.pipeline(
            convnet(), 2, split=CONV_SPLIT, act_comp="ef21+topk:0.3", grad_comp="ef+topk:0.3",
            loss_fn=F.cross_entropy, recompute=recompute, scaler=scaler,
        )  # fmt: skip
        optimizer = sgd(pipe)
        skipped = []
        for step in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                pipe.forward_backward(*images(6, step))
            scaler.step(optimizer)
            scaler.update()
            skipped.append(pipe.step_skipped)
        assert any(skipped) and not all(skipped)
        results.append((pipe, skipped))
    assert results[0][1] == results[1][1]
    assert_same_training(results[0][0], results[1][0])
    assert_same_state(links_state(results[0][0]), links_state(results[1][0]))


def test_constant_and_zero_gradients_pass():
    """No range, no scale: nothing to divide by, nothing non-finite."""
    model = nn.Sequential(nn.Linear(13, 40), nn.Linear(40, 40), nn.Linear(40, 5))
    nn.init.zeros_(model[1].weight), nn.init.zeros_(model[2].weight)
    for method in ("quant:4", "sign", "ef+topk:0.1", "fixed:4", "ef21+quant:2:mode=maxabs"):
        pipe = pipe_of(clone(model), split=3, act_comp=method, grad_comp=method)
        for step in range(2):
            assert pipe.forward_backward(*rows(6, step)).isfinite()
        assert all(p.grad.isfinite().all() for p in pipe.parameters())
