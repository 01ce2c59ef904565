"""Padded positions: nothing is spent on them, nothing is learnt from them, nothing arrives."""

import copy
import itertools

import pytest
import torch
from everyday import slow_but_one_a_class
from methods import COMPRESSORS, FEEDBACK, same_bits
from models import assert_ends_agree, store_of

from mpcomp import (
    AQSGD,
    EF21,
    Boundary,
    EFMixed,
    ErrorFeedback,
    Identity,
    Link,
    Quantize,
    RandomK,
    SameIndices,
    Sign,
    TensorMeta,
    TopK,
)
from mpcomp.core.context import Step, valid_positions
from mpcomp.core.microbatch import rows_of_chunks, scatter
from mpcomp.core.traffic import Traffic
from mpcomp.core.wire import DENSE, Header

ROWS, POSITIONS, FEATURES = 4, 8, 15
SHAPE = (ROWS, POSITIONS, FEATURES)
ROW = TensorMeta((1, POSITIONS * FEATURES))
METHODS = [*COMPRESSORS, *FEEDBACK]
RESIDUALS = [method for method in FEEDBACK if isinstance(method, ErrorFeedback)]
ESTIMATES = [method for method in FEEDBACK if method.mirrors(ROW)]
#: Those that keep nothing but numbers of one element each.
BY_ELEMENT = [m for m in FEEDBACK if all(f.kept is None for f in m.fields(ROW).values())]
#: The storages that give back what is written to them a second time.
EXACT = ("fp32", "fp16", "bf16")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")


def link_of(method, direction="act", **kwargs) -> Link:
    return Link(method, boundary=0, direction=direction, **kwargs)


def lengths(*counts, left=False) -> torch.Tensor:
    """A mask [rows, positions] of sequences of so many tokens, padded at one side."""
    mask = torch.arange(POSITIONS)[None, :] < torch.tensor(counts)[:, None]
    return mask.flip(1) if left else mask


def mask_of(index: int, microbatch: int = 0) -> torch.Tensor:
    """Another mask in every step and microbatch: left, right, with holes; a row may be empty."""
    drawn = torch.Generator().manual_seed(17 * index + microbatch)
    if index % 3 == 2:
        return torch.rand(ROWS, POSITIONS, generator=drawn) < 0.5
    counts = torch.randint(0, POSITIONS + 1, (ROWS,), generator=drawn).tolist()
    return lengths(*counts, left=index % 3 == 1)


def step_of(index=0, *masks, train=True, shift=0, **kwargs) -> Step:
    """A step of two microbatches, whose sample ids begin at ``shift`` and repeat after 12."""
    rows = tuple(tuple(((shift + m * ROWS + i) % 12,) for i in range(ROWS)) for m in range(2))
    return Step(index, train, sample_ids=rows if train else (), valid=masks, **kwargs)


def tensor_of(index: int, microbatch: int = 0, dtype=torch.float32) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(1000 + 17 * index + microbatch)
    return torch.randn(SHAPE, generator=drawn).to(dtype)


def carry(link: Link, x: torch.Tensor, step: Step, microbatch: int = 0) -> torch.Tensor:
    """There and, decoded, back again."""
    return link.decode(link.encode(x, step, microbatch), TensorMeta.of(x), step, microbatch)


def rows_of(link: Link, role: str, step: Step, microbatch: int = 0) -> torch.Tensor:
    """The state of a microbatch's slots, shaped like its tensor."""
    if link.method.by_sample:
        keys = step.message(microbatch, (), on=True).sample_ids
    else:
        keys = [(microbatch, row) for row in range(ROWS)]
    return store_of(link.endpoint.ends[role]).read(keys).reshape(SHAPE)


def state_of(link: Link) -> dict:
    return copy.deepcopy(link.endpoint.state_dict())


def assert_same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for key in a:
        equal = same_bits(a[key], b[key]) if isinstance(a[key], torch.Tensor) else a[key] == b[key]
        assert equal, key


# -- the mask -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, torch.uint8], ids=str)
def test_masks_of_any_dtype_are_cut_as_batches_are(dtype):
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 1], [0, 1, 1]])
    sizes = rows_of_chunks(5, 3)
    found = valid_positions(mask.to(dtype), sizes)
    assert found[1] is None  # nothing is padded there
    for valid, part in zip(found, scatter(mask, sizes), strict=True):
        assert torch.equal(torch.ones_like(part) if valid is None else valid, part)
        assert valid is None or valid.dtype == torch.bool


def test_without_padding_there_is_no_mask():
    assert valid_positions(None, [2, 2]) == ()
    assert valid_positions(torch.ones(4, 3), [2, 2]) == (None, None)
    for shape in [(4,), (4, 1, 3, 3)]:  # not one number a position
        assert valid_positions(torch.zeros(shape), [2, 2]) == ()
    assert Step(0, True).message(1, (), on=True).valid is None
    mask = lengths(8, 8, 8, 3)
    step = Step(0, True, valid=valid_positions(mask, [2, 2]))
    first, second = (step.message(m, (), on=True).valid for m in range(2))
    assert first is None and torch.equal(second, mask[2:])


# -- what is sent ---------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["act", "grad"])
def test_top_k_spends_all_of_k_on_valid_positions(direction):
    """Though what is padded is larger; and each microbatch goes by its own mask."""
    masks = lengths(4, 4, 4, 4), lengths(2, 3, 8, 5, left=True)
    step = step_of(0, *masks)
    link = link_of(TopK(0.1), direction)
    k = 12  # of 120
    for m, mask in enumerate(masks):
        x = tensor_of(0, m)
        x[~mask] *= 1000
        y = carry(link, x, step, m)
        for row in range(ROWS):
            assert y[row].count_nonzero() == k
            assert not y[row, ~mask[row]].any()
            sent = y[row, mask[row]].flatten()
            of = x[row, mask[row]].flatten()
            largest = of.abs().topk(k).indices.sort().values
            assert torch.equal(sent.nonzero().flatten(), largest)
            assert torch.equal(sent[largest], of[largest])


@pytest.mark.parametrize("mode", ["minmax", "maxabs"])
def test_a_quantizers_range_is_that_of_valid_positions_and_zero(mode):
    mask = lengths(4, 2, 8, 1)
    x = tensor_of(0) + 3
    x[~mask] = 1e6
    y = carry(link_of(Quantize(8, mode=mode)), x, step_of(0, mask))
    kept = x[mask]
    low, high = kept.min().clamp(max=0), kept.max().clamp(min=0)
    reach = high - low if mode == "minmax" else 2 * torch.maximum(-low, high)
    step = reach / (255 if mode == "minmax" else 254)
    assert (y - x)[mask].abs().max() <= step / 2 * 1.001
    assert not y[~mask].any()


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("method", slow_but_one_a_class(METHODS), ids=str)
def test_what_is_padded_never_matters(method, dtype):
    """Not to the message, nor to the state; it arrives as zero. The tensor stays as it was."""
    links = link_of(method, seed=3), link_of(method, seed=3)
    for index in range(5):
        masks = mask_of(index), mask_of(index, 1)
        step = step_of(index, *masks, shift=5 * index)
        for m, mask in enumerate(masks):
            x = tensor_of(index, m, dtype)
            other = x.clone()
            other[~mask] = 300
            before = other.clone()
            messages = [link.encode(t, step, m) for link, t in zip(links, (x, other), strict=True)]
            assert same_bits(other, before)
            arrived = [
                link.decode(message, TensorMeta.of(x), step, m)
                for link, message in zip(links, messages, strict=True)
            ]
            if Header.of(messages[0]).kind == DENSE:
                assert same_bits(arrived[1], other)
                continue
            assert same_bits(*messages) and same_bits(*arrived)
            assert arrived[0].dtype == dtype and not arrived[0][~mask].any()
        for link in links:
            link.commit()
    assert_same(state_of(links[0]), state_of(links[1]))


@pytest.mark.parametrize("first", [None, TopK(0.2)], ids=str)
@pytest.mark.parametrize(
    "of",
    [
        lambda inner, first: ErrorFeedback(inner),
        lambda inner, first: EF21(inner, first=first),
        lambda inner, first: AQSGD(inner, first=first),
    ],
    ids=["ef", "ef21", "aqsgd"],
)
@pytest.mark.parametrize("inner", [TopK(0.2), RandomK(0.3), Quantize(2), Sign()], ids=str)
def test_feedback_compresses_zeros_where_it_is_padded(inner, of, first, monkeypatch):
    """Whatever was kept there: residuals and differences too are cut."""
    assert_compresses_zeros(of(inner, first), monkeypatch)


@pytest.mark.parametrize("second", ["residual", "remainder"])
@pytest.mark.parametrize("inner", [TopK(0.2), RandomK(0.4, values=Quantize(2))], ids=str)
def test_both_halves_of_efmixed_compress_zeros_where_it_is_padded(inner, second, monkeypatch):
    """Also where the first half's zeros came back as something else."""
    assert_compresses_zeros(EFMixed(inner, second=second), monkeypatch)


def assert_compresses_zeros(method, monkeypatch):
    seen = []
    for kind in (TopK, RandomK, Quantize, Sign):
        for name, real in (("compress", kind.compress), ("round_trip", kind.round_trip)):

            def noting(self, x, *args, real=real):
                if x.dim() == 3:
                    seen.append(x)
                return real(self, x, *args)

            monkeypatch.setattr(kind, name, noting)
    link = link_of(method)
    carry(link, tensor_of(0), step_of(0))
    link.commit()
    # Half of AQ-SGD's samples are known by now, and half are new.
    mask = lengths(3, 3, 3, 3)
    seen.clear()
    carry(link, tensor_of(1), step_of(1, mask, shift=2))
    assert seen and all(x[:, :3].any() and not x[:, 3:].any() for x in seen)


@pytest.mark.parametrize("method", slow_but_one_a_class(METHODS), ids=str)
def test_a_mask_of_ones_is_no_mask(method):
    plain, masked = link_of(method), link_of(method)
    for index in range(3):
        x = tensor_of(index)
        sent = (
            plain.encode(x, step_of(index), 0),
            masked.encode(x, step_of(index, torch.ones(ROWS, POSITIONS, dtype=torch.bool)), 0),
        )
        assert same_bits(*sent)
        for link, message in zip((plain, masked), sent, strict=True):
            link.decode(message, TensorMeta.of(x), step_of(index), 0)
            link.commit()
    assert_same(state_of(plain), state_of(masked))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("method", [Identity(), TopK(0.1), TopK(1.0), EF21(TopK(0.1))], ids=str)
def test_what_is_not_compressed_is_left_alone(method, dtype):
    """Identity, a warm-up, compression off, and a compressor that would not shrink."""
    mask = lengths(4, 2, 8, 0)
    for step in (
        step_of(0, mask),  # warm-up
        step_of(9, mask, compress_act=False),
        Step(9, False, compress_act=False, valid=(mask,)),
    ):
        link = link_of(method, warmup_steps=5)
        x = tensor_of(0, dtype=dtype)
        x[0, 6] = -0.0
        assert same_bits(carry(link, x, step), x)
    if method in (Identity(), TopK(1.0)):
        assert same_bits(carry(link_of(method), x, step_of(0, mask)), x)


def test_raw_evaluation_is_left_alone():
    step = Step(0, False, valid=(lengths(4, 2, 8, 0),))
    x = tensor_of(0)
    assert same_bits(carry(link_of(EF21(TopK(0.1), eval="raw")), x, step), x)
    y = carry(link_of(EF21(TopK(0.1))), x, step)
    assert y.any() and not y[~step.valid[0]].any()


@pytest.mark.parametrize(
    "shape",
    [
        (ROWS, POSITIONS),  # pooled, and by chance as wide as a sequence is long
        (ROWS, POSITIONS + 1, FEATURES),
        (ROWS - 1, POSITIONS, FEATURES),
        (ROWS * POSITIONS,),
    ],
    ids=str,
)
@pytest.mark.parametrize("method", [TopK(0.3), Quantize(4), EF21(TopK(0.3))], ids=str)
def test_tensors_without_the_masks_positions_are_left_alone(method, shape):
    mask = lengths(4, 2, 8, 0)
    plain, masked = link_of(method), link_of(method)
    for index in range(3):
        x = torch.randn(shape)
        pair = carry(plain, x, step_of(index)), carry(masked, x, step_of(index, mask))
        assert same_bits(*pair)
        plain.commit()
        masked.commit()


def test_more_dimensions_after_the_positions_and_other_strides():
    mask = lengths(4, 2, 8, 1)
    wide = torch.randn(ROWS, POSITIONS, 3, 5)
    transposed = torch.randn(POSITIONS, ROWS, FEATURES).transpose(0, 1)
    for x in (wide, transposed):
        link = link_of(ErrorFeedback(TopK(0.1)))
        y = carry(link, x, step_of(0, mask))
        assert y.shape == x.shape and not y[~mask].any() and y[mask].any()
        flat = x.reshape(SHAPE).clone()
        assert same_bits(y.reshape(SHAPE), carry(link_of(TopK(0.1)), flat, step_of(0, mask)))


def test_channels_last_images_have_no_positions():
    x = torch.randn(ROWS, POSITIONS, 3, 5).contiguous(memory_format=torch.channels_last)
    y = carry(link_of(Quantize(8)), x, step_of(0, lengths(0, 0, 0, 0)))
    assert TensorMeta.of(y).channels_last and torch.allclose(y, x, atol=0.05)


def test_gradients_at_the_activations_elements():
    """SameIndices: what was not sent of the activation is not sent of the gradient."""
    boundary = Boundary(link_of(TopK(0.1)), link_of(SameIndices(), "grad"))
    mask = lengths(4, 2, 8, 1)
    step = step_of(0, mask)
    x, grad = tensor_of(0), tensor_of(1)
    meta = TensorMeta.of(x)
    y = boundary.act.decode(boundary.act.encode(x, step, 0), meta, step, 0)
    g = boundary.grad.decode(boundary.grad.encode(grad, step, 0), meta, step, 0)
    assert torch.equal(g, torch.where(y != 0, grad, 0))
    assert not g[~mask].any()


# -- what is remembered ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", RESIDUALS, ids=str)
def test_error_feedback_loses_no_mass_and_keeps_padded_residuals(method, dtype):
    link = link_of(method)
    meant, sent = torch.zeros(2, *SHAPE), torch.zeros(2, *SHAPE)
    for index in range(12):
        masks = mask_of(index), mask_of(index, 1)
        step = step_of(index, *masks)
        before = [rows_of(link, "sender", step, m) for m in range(2)] if index else None
        for m, mask in enumerate(masks):
            x = tensor_of(index, m, dtype)
            x[~mask] = 100
            meant[m] += torch.where(mask[:, :, None], x.float(), 0)
            sent[m] += carry(link, x, step, m).float()
        link.commit()
        for m, mask in enumerate(masks):
            residual = rows_of(link, "sender", step, m)
            if before is not None:
                assert same_bits(residual[~mask], before[m][~mask])
            if method.storage == "fp32":
                torch.testing.assert_close(sent[m] + residual, meant[m], rtol=0, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", ESTIMATES, ids=str)
def test_estimates_are_equal_at_both_ends_and_stay_where_it_is_padded(method, dtype):
    """Over other masks and, for AQ-SGD, other samples in every step: first visits and later ones.

    The receiver works with the estimate where positions count and with zero elsewhere.
    """
    here, there = link_of(method), link_of(method)
    for index in range(12):
        masks = mask_of(index), mask_of(index, 1)
        step = step_of(index, *masks, shift=5 * index)
        before = [rows_of(there, "receiver", step, m) for m in range(2)] if index else None
        arrived = []
        for m in range(2):
            x = tensor_of(index, m, dtype)
            message = here.encode(x, step, m)
            arrived.append(there.decode(message, TensorMeta.of(x), step, m))
        here.commit()
        there.commit()
        assert_ends_agree(here.endpoint.ends["sender"], there.endpoint.ends["receiver"])
        assert here.endpoint.state_dict()["sample"] == there.endpoint.state_dict()["sample"]
        for m, mask in enumerate(masks):
            estimate = rows_of(there, "receiver", step, m)
            assert not arrived[m][~mask].any()
            if method.storage in EXACT and before is not None:
                assert torch.equal(estimate[~mask], before[m][~mask])
            if method.storage == "fp32" and getattr(method, "cap_bytes", None) is None:
                assert torch.equal(estimate.to(dtype)[mask], arrived[m][mask])
            if index == 0 and method.first is None:  # raw
                assert torch.equal(arrived[m], tensor_of(0, m, dtype) * mask[:, :, None])


@pytest.mark.parametrize("method", BY_ELEMENT, ids=str)
def test_a_dense_send_speaks_of_valid_positions_alone(method):
    """It arrives whole; estimates become it and residuals vanish where positions count.

    Cells of a sketch belong to no one position: feedback/test_conef.py says what becomes of them.
    """
    link = link_of(method)
    for index in range(3):
        carry(link, tensor_of(index), step_of(index, mask_of(index)))
        link.commit()
    mask = lengths(4, 2, 8, 0)
    step = step_of(3, mask, compress_act=False)
    before = rows_of(link, "sender", step)
    x = tensor_of(3)
    assert same_bits(carry(link, x, step), x)
    link.commit()
    after = rows_of(link, "sender", step)
    if method.storage in EXACT:
        assert torch.equal(after[~mask], before[~mask])
    estimated = link.endpoint.ends["sender"].estimate is not None
    if not estimated:
        assert not after[mask].any()
    elif method.storage == "fp32":
        assert torch.equal(after[mask], x[mask])
    if estimated:
        assert same_bits(after, rows_of(link, "receiver", step))


def test_a_dense_first_send_leaves_padded_estimates_at_zero():
    mask = lengths(4, 2, 8, 0)
    link = link_of(EF21(TopK(0.1)), warmup_steps=1)
    step = step_of(0, mask)
    x = tensor_of(0)
    carry(link, x, step)
    link.commit()
    for role in ("sender", "receiver"):
        assert torch.equal(rows_of(link, role, step), x * mask[:, :, None])


@pytest.mark.parametrize("method", FEEDBACK, ids=str)
def test_a_skipped_step_leaves_no_trace(method):
    link, twin = link_of(method), link_of(method)
    for index in range(2):
        for one in (link, twin):
            carry(one, tensor_of(index), step_of(index, mask_of(index)))
            one.commit()
    before = state_of(link)
    for compress in (True, False):
        carry(link, tensor_of(2), step_of(2, mask_of(2), compress_act=compress))
        link.discard()
        assert_same(state_of(link), before)
    step = step_of(3, mask_of(3))
    assert same_bits(carry(link, tensor_of(3), step), carry(twin, tensor_of(3), step))


@pytest.mark.parametrize("method", FEEDBACK, ids=str)
def test_state_under_a_loss_scale_is_that_without(method):
    plain, scaled = link_of(method, "grad"), link_of(method, "grad")
    for index in range(4):
        mask = mask_of(index)
        y = carry(plain, tensor_of(index), step_of(index, mask))
        z = carry(scaled, tensor_of(index) * 1024, step_of(index, mask, loss_scale=1024.0))
        assert same_bits(y * 1024, z)
        plain.commit()
        scaled.commit()
    assert_same(state_of(plain), state_of(scaled))


def test_a_gradient_that_overflowed_arrives_as_nan_everywhere():
    x = tensor_of(0)
    x[0, 0, 0] = torch.inf
    step = step_of(0, lengths(4, 2, 8, 0), scaled=True)
    assert carry(link_of(TopK(0.1), "grad"), x, step).isnan().all()


# -- what is metered ------------------------------------------------------------------------------


@pytest.mark.each_once
@pytest.mark.parametrize("direction", ["act", "grad"])
@pytest.mark.parametrize("method", slow_but_one_a_class(METHODS), ids=str)
def test_fidelity_is_measured_where_positions_count(method, direction):
    """At the sender that does not see what arrives, and where both ends are one."""
    here, there, both = (link_of(method, direction) for _ in range(3))
    expected = Traffic()
    for index, m in itertools.product(range(3), range(2)):
        masks = mask_of(index), mask_of(index, 1)
        step = step_of(index, *masks)
        x = tensor_of(index, m)
        x[~masks[m]] = 1000
        meta = TensorMeta.of(x)
        message = here.encode(x, step, m)
        here.compare_sent(x, message, step, m)
        arrived = there.decode(message, meta, step, m)
        message = both.encode(x, step, m)
        both.decode(message, meta, step, m)
        both.compare_sent(x, message, step, m)
        shown = masks[m][:, :, None]
        expected.compare(torch.where(shown, x, 0), torch.where(shown, arrived, 0))
        if m == 1:
            for link in (here, there, both):
                link.commit()
    energies = None if isinstance(method, Identity) else expected.to_state()["energies"]
    for link in (here, both):
        assert link.meter.train.to_state()["energies"] == energies
