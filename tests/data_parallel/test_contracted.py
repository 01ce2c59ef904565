"""What ConEF remembers of a parameter: against the algorithm as it is written, memory by memory."""

from functools import partial

import pytest
import torch
from everyday import slow_but
from methods import same_bits
from torch import Tensor

from mpcomp import (
    QSGD,
    Compressor,
    ConEF,
    LowRank,
    Quantize,
    RandomBlock,
    RandomK,
    TensorMeta,
    TopK,
)
from mpcomp.core.randomness import generator_for
from mpcomp.data_parallel.plan import Context, GradientPlan, load_tensors, tensors_of
from mpcomp.feedback.memory import Memory, Residual
from mpcomp.feedback.sketch import VectorSketch, num_cells
from mpcomp.feedback.state import EndState
from mpcomp.feedback.store import StoragePlan

META = TensorMeta((6, 50))
VECTOR = TensorMeta((1, META.numel))
CPU = torch.device("cpu")
CODED = ConEF(TopK(0.1), error=QSGD(8, group=64))
METHODS = [
    ConEF(TopK(0.1)),
    ConEF(RandomBlock(0.1), 0.4, beta=0.8),
    ConEF(TopK(0.2), 0.4, hash="murmur"),
    CODED,
    ConEF(RandomBlock(0.1), error=QSGD(8, group=64), beta=0.5),
    ConEF(TopK(0.1), error=Quantize(8, scale=32, rounding="stochastic")),
    ConEF(TopK(0.1), error=QSGD(8), improved="v1"),
    ConEF(TopK(0.1), error=QSGD(8), improved="v2"),
    ConEF(RandomBlock(0.2), 0.4, improved="v2"),
    ConEF(RandomK(0.2), 0.4, improved="v2"),
]
EVERY = pytest.mark.parametrize("method", METHODS, ids=str)


def draw_of(step: int):
    return lambda alike: generator_for("error", step, int(alike))


def gradient_of(step: int) -> Tensor:
    return torch.randn(META.numel, generator=torch.Generator().manual_seed(step))


def sent_of(inner: Compressor, wanted: Tensor, step: int) -> Tensor:
    """What arrives of ``wanted`` [n]."""
    meta = META if inner.by_matrix else VECTOR
    payload = inner.compress(wanted.reshape(meta.shape), generator_for("sent", step))
    return inner.decompress(payload, meta, generator_for("sent", step)).reshape(-1)


def end_of(method: Memory, meta: TensorMeta = META) -> EndState:
    """The state a replica keeps of one parameter."""
    return EndState(method, meta, CPU, capped=False)


def due_of(end: EndState, gradient: Tensor, step: int, scale: float = 1.0) -> GradientPlan:
    plan = GradientPlan("parameter", gradient, end)
    plan.load(Context(None, None, None, scale, lambda *_: draw_of(step)))
    return plan


def step_of(
    end: EndState, inner: Compressor, step: int, *, scale: float = 1.0, commit: bool = True
) -> Tensor:
    """One step of a memory, with gradients times ``scale``; what was sent, free of it."""
    due = due_of(end, gradient_of(step) * scale, step, scale)
    sent = sent_of(inner, due.target, step)
    due.sent(lambda y: y - sent)
    if commit:
        end.commit()
    else:
        end.discard()
    return sent / scale


def known_of(end: EndState) -> list[Tensor]:
    """What each of its memories knows."""
    return [end.open(flat=True)[name] for name in end.fields]


def state_of(end: EndState) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in tensors_of(end).items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(same_bits(a[key], b[key]) for key in a)


# -- the algorithm --------------------------------------------------------------------------------


class Reference:
    """p = g + (1 - beta) (e + q); m = Q(p); e and q as §6.1 says, a sketch told of changes."""

    def __init__(self, method: ConEF) -> None:
        self.method = method
        self.sketch = VectorSketch(META.numel, method.fraction, columns=50, hash=method.hash)
        self.cells = torch.zeros(self.sketch.cells)
        self.coded = [torch.zeros(META.numel) for _ in range(2)]

    @property
    def kinds(self) -> list[Compressor | None]:
        method = self.method
        if method.improved is None:
            return [method.error]
        return [method.inner if method.improved == "v2" else method.error, method.error]

    def known(self) -> list[Tensor]:
        decoded = self.sketch.estimate(self.cells[None])[0]
        return [decoded if c is None else self.coded[i] for i, c in enumerate(self.kinds)]

    def step(self, step: int) -> Tensor:
        method, before = self.method, self.known()
        gradient = gradient_of(step)
        wanted = gradient + (1 - method.beta) * sum(before)
        sent = sent_of(method.inner, wanted, step)
        left = method.beta * sum(before) + wanted - sent  # what both memories are to hold
        if method.improved is not None and method.error is None:
            left = left - method.beta * before[1]  # of what a sketch says a part is taken over
        for i, compressor in enumerate(self.kinds):
            if compressor is None:
                # Of what was left over before this step and after it the difference, which for
                # one memory is g - m, and for the second also what the first has taken up.
                change = gradient - sent
                if i == 1:
                    change = change - (self.coded[0] - before[0])
                self.cells = self.cells + self.sketch.sketch(change[None])[0]
                continue
            seed = draw_of(step)(False).initial_seed()
            generators = [torch.Generator().manual_seed(seed) for _ in range(2)]
            payload = compressor.compress(left[None], generators[0])
            self.coded[i] = compressor.decompress(payload, VECTOR, generators[1])[0]
            left = left - self.coded[i]
        return sent


@EVERY
def test_the_algorithm_as_written(method):
    memory, reference = end_of(method), Reference(method)
    for step in range(25):
        expected = reference.step(step)
        # Where rounding turns a choice, whole elements would differ.
        sent = step_of(memory, method.inner, step)
        torch.testing.assert_close(sent, expected, rtol=1e-4, atol=1e-4)
        for ours, theirs in zip(known_of(memory), reference.known(), strict=True):
            scale = float(theirs.abs().max())
            # A number at a step of its grid may fall on either side of it: of few, and by 1 / 127.
            off = (ours - theirs).abs() > 1e-4 * (1 + scale)
            assert off.float().mean() < 0.02 and (ours - theirs).abs().max() <= 0.03 * (1 + scale)
    assert sum(known_of(memory)).norm() > 5


@EVERY
def test_the_first_step_knows_of_no_error(method):
    memory = end_of(method)
    gradient = gradient_of(0)
    assert due_of(memory, gradient, 0).target.data_ptr() == gradient.data_ptr()
    assert not memory.known and tensors_of(memory) == {}


@pytest.mark.parametrize("inner", [TopK(0.1), RandomBlock(0.2), Quantize(4), LowRank(1)], ids=str)
@pytest.mark.parametrize("improved", [None, "v2"])
def test_with_a_full_sketch_no_mass_is_lost(inner, improved):
    """Sum of what was sent and what is known of the error are the sum of all gradients."""
    memory = end_of(ConEF(inner, 1.0, 0.5, improved=improved))
    given, sent = torch.zeros(2, META.numel, dtype=torch.float64)
    for step in range(30):
        given += gradient_of(step)
        sent += step_of(memory, inner, step)
    error = sum(known_of(memory)).double()
    assert error.norm() > 1
    torch.testing.assert_close(sent + error, given, rtol=0, atol=1e-4)


@pytest.mark.parametrize("improved", [None, "v2"])
@pytest.mark.parametrize("fraction", [0.2, 0.4])
def test_a_sketch_holds_that_of_all_that_is_missing(fraction, improved):
    """Also of a part of the elements: by linearity no mass is lost in its cells."""
    inner = RandomBlock(0.2)
    memory = end_of(ConEF(inner, fraction, improved=improved))
    sketch = VectorSketch(META.numel, fraction, columns=50)
    missing = torch.zeros(META.numel)
    for step in range(30):
        missing += gradient_of(step) - step_of(memory, inner, step)
    name = "error" if improved is None else "second_error"
    if improved is not None:
        missing -= known_of(memory)[0]
    cells = tensors_of(memory)[name]
    torch.testing.assert_close(cells, sketch.sketch(missing[None])[0], rtol=1e-4, atol=1e-3)


@pytest.mark.each_once
@pytest.mark.parametrize("inner", [TopK(0.2), RandomBlock(0.2), Quantize(8)], ids=str)
@pytest.mark.parametrize("fraction, beta", [(0.1, 0.9), (0.3, 0.8), (0.5, 0.5)])
@pytest.mark.parametrize("improved", [None, "v2"])
def test_what_is_kept_stays_bounded(inner, fraction, beta, improved):
    memory = end_of(ConEF(inner, fraction, beta, improved=improved))
    norms = []
    for step in range(1000):
        step_of(memory, inner, step)
        norms.append(float(torch.stack(known_of(memory)).norm()))
    assert max(norms[300:]) < 3 * max(norms[:300]) < 1000


def test_all_of_a_sketch_taken_over_at_once_blows_up():
    """Why the first memory of v2 takes 1 - beta of it: elements of a cell are chosen together."""
    inner, sketch = TopK(0.2), VectorSketch(META.numel, 0.3, columns=50)
    first, cells = torch.zeros(META.numel), torch.zeros(sketch.cells)
    for step in range(40):
        second = sketch.estimate(cells[None])[0]
        wanted = gradient_of(step) + 0.2 * (first + second)
        change = gradient_of(step) - sent_of(inner, wanted, step)
        now = sent_of(inner, first + second + change, step)
        cells = cells + sketch.sketch((change - (now - first))[None])[0]
        first = now
    assert not first.norm() < 1e6


def test_without_beta_a_full_sketch_is_error_feedback():
    memory = end_of(ConEF(TopK(0.1), 1.0, 0.0))
    plain = end_of(Residual())
    for step in range(30):
        ours, theirs = (step_of(m, TopK(0.1), step) for m in (memory, plain))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_second_memory_knows_more_of_the_error():
    """The point of iConEF: |e - (first + second)| is below |e - first|."""
    errors = {}
    for improved in (None, "v1"):
        method = ConEF(TopK(0.1), error=QSGD(4), improved=improved, beta=0.5)
        memory = end_of(method)
        lost = []
        for step in range(20):
            before = sum(known_of(memory))
            sent = step_of(memory, TopK(0.1), step)
            wanted = before + gradient_of(step) - sent
            lost.append(float((wanted - sum(known_of(memory))).norm()))
        errors[improved] = sum(lost)
    assert errors["v1"] < 0.4 * errors[None]


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.4, 1.0])
@pytest.mark.parametrize("storage, cell_bytes", [("fp32", 4), ("fp16", 2), ("bf16", 2)])
def test_row_bytes_is_that_of_its_cells(fraction, storage, cell_bytes):
    """Each row of the matrix has cells of its own; a vector is one row."""
    method = ConEF(TopK(0.1), fraction, storage=storage)
    matrix = end_of(method)
    assert matrix.row_bytes == 6 * num_cells(50, fraction) * cell_bytes
    vector = end_of(method, VECTOR)
    assert vector.row_bytes == num_cells(META.numel, fraction) * cell_bytes
    plain = end_of(Residual(StoragePlan(storage)))
    assert matrix.row_bytes == pytest.approx(fraction * plain.row_bytes)
    step_of(matrix, TopK(0.1), 0)
    held = sum(value.numel() for value in tensors_of(matrix).values())
    assert held * cell_bytes == matrix.row_bytes


@EVERY
def test_row_bytes_adds_up(method):
    memory = end_of(method)
    parts = {"sketch": 4 * 6 * num_cells(50, method.fraction)}
    for name in ("error", "inner"):
        compressor = getattr(method, name)
        parts[name] = compressor.wire_bytes(VECTOR) if compressor is not None else parts["sketch"]
    expected = {None: ["error"], "v1": ["error", "error"], "v2": ["inner", "error"]}
    assert memory.row_bytes == sum(parts[name] for name in expected[method.improved])
    before = memory.row_bytes
    step_of(memory, method.inner, 0)
    assert memory.row_bytes == before  # said before anything is held


def test_a_compressor_by_matrix_is_given_the_matrix():
    memory = end_of(ConEF(LowRank(2), improved="v2"))
    step_of(memory, TopK(0.1), 0)
    assert torch.linalg.matrix_rank(known_of(memory)[0].reshape(META.shape)) == 2


# -- steps, scales, state -------------------------------------------------------------------------


@EVERY
def test_discarded_steps_leave_no_trace(method):
    straight, skipping = (end_of(method) for _ in range(2))
    step_of(skipping, method.inner, 7, commit=False)
    assert not skipping.known
    for step in (0, 1, 3):
        expected = step_of(straight, method.inner, step)
    for step in (0, 1, 2, 3):
        before = state_of(skipping)
        got = step_of(skipping, method.inner, step, commit=step != 2)
        if step == 2:
            assert_same(state_of(skipping), before)
    assert same_bits(got, expected)
    assert_same(state_of(skipping), state_of(straight))


@EVERY
def test_a_step_that_stopped_half_way_leaves_no_trace(method):
    """After a target is formed backward may end with an error, so that nothing is sent."""
    straight, stopped = (end_of(method) for _ in range(2))
    for step in range(3):
        due_of(stopped, gradient_of(90 + step), 90 + step)
        stopped.discard()
        assert same_bits(
            step_of(stopped, method.inner, step), step_of(straight, method.inner, step)
        )


@EVERY
def test_state_is_free_of_the_loss_scale(method):
    """With powers of two it is so bit for bit."""
    plain, scaled = (end_of(method) for _ in range(2))
    for step, scale in enumerate((2.0**10, 2.0**10, 2.0**4, 0.5)):
        expected = step_of(plain, method.inner, step)
        assert same_bits(step_of(scaled, method.inner, step, scale=scale), expected)
    assert_same(state_of(scaled), state_of(plain))


@EVERY
def test_resumed_is_uninterrupted(method):
    whole = end_of(method)
    for step in range(3):
        step_of(whole, method.inner, step)
    later = end_of(method)
    load_tensors(later, state_of(whole))
    assert_same(state_of(later), state_of(whole))
    for step in range(3, 7):
        assert same_bits(step_of(later, method.inner, step), step_of(whole, method.inner, step))
    assert_same(state_of(later), state_of(whole))


@pytest.mark.parametrize("storage", ["fp16", "bf16", 8, 4])
def test_cells_in_few_bits_are_resumed_too(storage):
    method = ConEF(TopK(0.1), 0.4, storage=storage)
    whole, later = (end_of(method) for _ in range(2))
    for step in range(3):
        step_of(whole, TopK(0.1), step)
    load_tensors(later, state_of(whole))
    for step in range(3, 6):
        assert same_bits(step_of(later, TopK(0.1), step), step_of(whole, TopK(0.1), step))
    assert_same(state_of(later), state_of(whole))


@EVERY
def test_what_is_kept_has_a_size_to_be_checked(method):
    """`ReplicaState.check` compares a state's tensors with these before any is loaded."""
    memory = end_of(method)
    step_of(memory, method.inner, 0)
    for name, value in tensors_of(memory).items():
        field, _, part = name.partition(":")
        assert part or memory.fields[field].numel == value.numel()


@EVERY
def test_the_state_of_another_size_is_refused(method):
    memory = end_of(method)
    step_of(memory, method.inner, 0)
    other = end_of(method, TensorMeta((7, 90)))
    with pytest.raises(ValueError, match="use the same model"):
        load_tensors(other, state_of(memory))


def test_writing_to_a_state_dict_does_not_reach_the_memory():
    for method in (ConEF(TopK(0.1)), CODED):
        memory = end_of(method)
        step_of(memory, method.inner, 0)
        before = sum(known_of(memory))
        loaded = end_of(method)
        state = state_of(memory)
        load_tensors(loaded, state)
        step_of(loaded, method.inner, 1)
        assert same_bits(sum(known_of(memory)), before)


# -- what arrives in the long run ------------------------------------------------------------------


@pytest.mark.parametrize("fraction", slow_but([0.4], [0.2, 0.4, 1.0]))
def test_what_a_sketch_cannot_tell_apart_arrives_as_its_mean(fraction):
    """Of a constant gradient g a tenth arrives as it is, the rest as P g.

    P is what the sketch makes of a vector, over the elements of a cell: an orthogonal projection.
    So what arrives still descends, but only ``fraction`` of all directions have the full rate.
    """
    method = ConEF(RandomBlock(0.1), fraction, beta=0.9)
    memory = end_of(method)
    gradient = gradient_of(0)
    sketch = VectorSketch(META.numel, fraction, columns=50)
    same = sketch.estimate(sketch.sketch(torch.eye(META.numel)))  # 1 or -1 within a cell
    projection = same / same.abs().sum(dim=1, keepdim=True)
    assert torch.allclose(projection @ projection, projection, atol=1e-6)
    projected = projection @ gradient
    total = torch.zeros(META.numel)
    first, last = 500, 3_000
    for step in range(last):
        due = due_of(memory, gradient, step)
        sent = sent_of(method.inner, due.target, step)
        due.sent(partial(torch.sub, other=sent))
        memory.commit()
        if step >= first:
            total += sent
    mean = total / (last - first)
    expected = 0.1 * gradient + 0.9 * projected
    assert (mean - expected).norm() < 0.12 * expected.norm()
    if fraction < 1:
        assert (mean - gradient).norm() > 0.5 * gradient.norm()
