"""ECSQ: the error that a step sets, the bits that follow, and what is sent of a change."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods import drawn, epsilon, round_trip, same_bits
from models import assert_ends_agree
from torch import Tensor

import mpcomp
from mpcomp import AQSGD, ECSQ, TensorMeta, parse
from mpcomp.compressors.tokens import Tokens
from mpcomp.core.context import MessageContext
from mpcomp.core.randomness import generator_for
from mpcomp.data_parallel.base import check_run
from mpcomp.data_parallel.methods import param_comp_of, replica_method_of
from mpcomp.feedback.memory import Side
from mpcomp.links.endpoints.memory import MemoryPlan, end_of

SETTINGS = [
    ECSQ(0.5),
    ECSQ(0.05),
    ECSQ(3.0),
    ECSQ(0.4, dead_zone=0.75),
    ECSQ(1.0, "tensor", dead_zone=1.0),
    ECSQ(0.3, "tensor"),
    ECSQ(0.35, centre=True),
    ECSQ(0.6, centre=True, spikes=16),
    ECSQ(0.35, "tensor", centre=True, dead_zone=0.6),
    ECSQ(0.5, rounding="dither"),
    ECSQ(0.5, rounding="dither", centre=True),
    ECSQ(2.0, "tensor", rounding="dither"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def num_bytes(compressor: ECSQ, x: Tensor) -> int:
    """Length of the message of ``x``."""
    return compressor.compress(x, drawn())[0].numel()


def units_of(x: Tensor, compressor: ECSQ) -> Tensor:
    """The unit of each element by the formula, in fp64; channels are dim 1 of images, or last."""
    channel = 1 if x.dim() >= 4 else -1
    dims = [channel] if compressor.scale == "token" and x.dim() >= 2 else list(range(x.dim()))
    rms = x.double().square().mean(dims, keepdim=True).sqrt()
    k = (4 * rms.log2()).round()
    units = torch.where(rms > 0, compressor.step * torch.exp2(k / 4), 0)
    if compressor.spikes > 1:
        stands_out = k > k.flatten().sort().values[k.numel() // 2] + 12
        units = torch.where(stands_out, units / compressor.spikes, units)
    return units.expand(x.shape)


def assert_error_is_bounded(x: Tensor, y: Tensor, compressor: ECSQ, whole: Tensor) -> None:
    """|x − y| ≤ max(1/2, dead zone) units of the whole, roundings of the result allowed for."""
    allowed = max(0.5, compressor.dead_zone) * units_of(whole, compressor) * (1 + 1e-5)
    allowed = allowed + 8 * epsilon(x.dtype) * (x.double().abs() + allowed)
    error = (x.double() - y.double()).abs()
    assert (error <= allowed + torch.finfo(x.dtype).tiny).all(), compressor


# -- the error -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("compressor", SETTINGS, ids=str)
def test_error_is_half_a_unit_or_the_dead_zone(compressor, dtype):
    """Of every element, whatever the scales of tokens."""
    for shape in ((5, 40), (3, 4, 30), (2, 9, 4, 5), (2, 3, 2, 4, 5), (50,), (1, 1)):
        size = torch.exp2(torch.randint(-6, 6, shape[:1] + (1,) * (len(shape) - 1)).float())
        x = (torch.randn(shape) * size + 0.5).to(dtype)
        assert_error_is_bounded(x, round_trip(compressor, x), compressor, x)


@given(
    values=st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=60),
    compressor=st.sampled_from(SETTINGS),
    rows=st.integers(1, 3),
)
def test_error_is_bounded_whatever_the_numbers(values, compressor, rows):
    x = torch.tensor(values).repeat(rows, 1)
    largest = x.abs().max()
    if 0 < largest < 2.0**-60:  # the units of normal numbers are normal
        x = x / largest
    x[x.abs() < 2.0**-100] = 0
    assert_error_is_bounded(x, round_trip(compressor, x), compressor, x)


@pytest.mark.parametrize("step", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("scale", ["token", "tensor"])
@pytest.mark.parametrize("rounding", ["nearest", "dither"])
def test_relative_error_is_that_of_a_uniform_quantizer(step, scale, rounding):
    """step^2 / 12 of the energy, where units are the rms."""
    x = torch.randn(400, 512)
    x = x / x.square().mean(1, keepdim=True).sqrt()
    error = (round_trip(ECSQ(step, scale, rounding=rounding), x) - x).square().mean()
    assert error == pytest.approx(step**2 / 12, rel=0.02)


@pytest.mark.parametrize("compressor", SETTINGS, ids=str)
def test_zero_stays_zero(compressor):
    """A tensor and, with units of their own, tokens; with rounding to the nearest each element."""
    assert not round_trip(compressor, torch.zeros(6, 50)).any()
    x = torch.randn(6, 50)
    x[2] = 0
    if compressor.centre:
        return  # the offset of a channel is one of all tokens
    if compressor.scale == "token":
        assert not round_trip(compressor, x)[2].any()
    if compressor.rounding == "nearest":
        x[:, ::3] = 0
        assert not round_trip(compressor, x)[x == 0].any()


def test_the_dead_zone_is_as_wide_as_it_says():
    """Rounded to zero below it; above it q steps are for dead_zone + q - 1 to dead_zone + q."""
    y = torch.tensor([0.0, 0.74, 0.76, 1.74, 1.76, -0.74, -0.76, -1.74, -1.76])
    rest = torch.zeros(100)
    rest[0] = (109 - y.square().sum()).sqrt()  # so that the rms, and the unit, are 1
    x = torch.cat([y, rest])
    got = round_trip(ECSQ(1.0, dead_zone=0.75), x)[:9]
    assert got.tolist() == [0, 0, 1, 1, 2, 0, -1, -1, -2]


# -- the bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0.1, 0.2, 0.35, 0.5, 0.7, 1.0])
def test_bits_of_a_gaussian(step):
    """About log2(4.13 / step) each: its differential entropy, in steps."""
    x = torch.randn(512, 768)
    for scale in ("token", "tensor"):
        bits = 8 * num_bytes(ECSQ(step, scale), x) / x.numel()
        assert bits == pytest.approx(math.log2(4.13 / step), rel=0.03)


def test_a_tensor_that_rounds_to_zero_costs_next_to_nothing():
    x = torch.randn(512, 768)
    assert num_bytes(ECSQ(100.0, "tensor"), x) < 60
    assert num_bytes(ECSQ(0.5, "tensor"), torch.zeros(512, 768)) < 60
    assert num_bytes(ECSQ(0.5), torch.zeros(512, 768)) < 3 * 512  # a scale each at most


def test_a_wider_dead_zone_costs_less():
    x = torch.randn(200, 300)
    sizes = [num_bytes(ECSQ(1.0, dead_zone=zone), x) for zone in (0.5, 0.6, 0.75, 1.0)]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4


def test_one_scale_of_all_spends_bits_where_the_energy_is():
    x = torch.randn(200, 300)
    x[:100] /= 50
    assert num_bytes(ECSQ(1.0, "tensor"), x) < 0.7 * num_bytes(ECSQ(1.0), x)


@pytest.mark.parametrize("compressor", SETTINGS, ids=str)
def test_the_message_of_noise_of_many_bits_fits_its_layout(compressor):
    for x in (torch.randn(30, 40), torch.randn(1, 1), torch.randn(7), torch.zeros(0, 5)):
        assert num_bytes(compressor, x) <= compressor.wire_bytes(TensorMeta.of(x))
    x = torch.rand(64, 64) - 0.5
    assert num_bytes(ECSQ(0.001), x) <= ECSQ(0.001).wire_bytes(TensorMeta.of(x))


# -- tokens, scales and means ----------------------------------------------------------------------


@pytest.mark.parametrize("compressor", SETTINGS, ids=str)
def test_channels_of_images_are_dim_1_and_memory_order_is_not_seen(compressor):
    """An image is the sequence of its pixels; channels-last has the bytes of contiguous."""
    image = torch.randn(2, 24, 5, 6) * torch.exp2(torch.randint(-4, 4, (2, 1, 5, 6)).float())
    pixels = image.permute(0, 2, 3, 1).reshape(60, 24)
    (message,) = compressor.compress(image, drawn())
    last = image.contiguous(memory_format=torch.channels_last)
    assert torch.equal(message, compressor.compress(last, drawn())[0])
    assert torch.equal(message, compressor.compress(pixels, drawn())[0])
    arrived = round_trip(compressor, last)
    assert TensorMeta.of(arrived).channels_last
    assert same_bits(arrived, round_trip(compressor, image))
    assert same_bits(arrived.permute(0, 2, 3, 1).reshape(60, 24), round_trip(compressor, pixels))


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("compressor", SETTINGS, ids=str)
def test_images_take_fewer_bytes_than_their_pixels_in_any_order(compressor, relu):
    """Neighbours are alike; what arrives is the same. At large steps a dither tells more."""
    waves = torch.sin(
        torch.arange(16.0)[:, None] / 3 + torch.arange(16) / (1 + torch.arange(24)[:, None, None])
    )
    image = 3 * waves * torch.exp2(torch.randn(4, 24, 1, 1)) + 0.1 * torch.randn(4, 24, 16, 16)
    image = image.relu() if relu else image
    pixels = image.permute(0, 2, 3, 1).reshape(-1, 24)
    most = 0.9 if compressor.rounding == "nearest" else 1.0
    assert num_bytes(compressor, image) <= most * num_bytes(compressor, pixels)
    arrived = round_trip(compressor, image)
    assert same_bits(arrived.permute(0, 2, 3, 1).reshape(-1, 24), round_trip(compressor, pixels))


@pytest.mark.parametrize("compressor", SETTINGS, ids=str)
def test_equal_numbers_of_any_dtype_are_equal_messages(compressor):
    """Scales are whole numbers, of sums in fp64."""
    x = torch.randn(40, 60).to(torch.bfloat16).to(torch.float16)
    x = torch.where(x.to(torch.bfloat16) == x, x, 0)  # what both half precisions have
    messages = [compressor.compress(x.to(dtype), drawn())[0] for dtype in DTYPES]
    assert all(torch.equal(message, messages[0]) for message in messages)


def test_a_scale_by_a_power_of_two_changes_scales_alone():
    x = torch.randn(20, 60)
    for compressor in (ECSQ(0.3), ECSQ(0.3, centre=True), ECSQ(0.3, "tensor")):
        for octaves in (-40, -3, 5, 60):
            scaled = round_trip(compressor, x * 2.0**octaves)
            assert same_bits(scaled, round_trip(compressor, x) * 2.0**octaves)


@pytest.mark.parametrize("step", [1.5, 3.0])
def test_a_dither_that_both_ends_have_saves_bytes(step, monkeypatch):
    """Fewer of them, and the same tensor at the other end."""
    x = torch.randn(256, 128) * torch.exp2(torch.randn(128))
    compressor = ECSQ(step, rounding="dither")
    few, arrived = num_bytes(compressor, x), round_trip(compressor, x)
    monkeypatch.setattr("mpcomp.entropy.dithered.may_tell", lambda q, sums: False)
    assert few < 0.95 * num_bytes(compressor, x)
    assert same_bits(arrived, round_trip(compressor, x))


def test_offsets_of_channels_cost_next_to_nothing_where_means_are_sent():
    offsets = 3 * torch.randn(200)
    noise = torch.randn(400, 200)
    x = noise + offsets
    unit = float(units_of(x, ECSQ(0.1, "tensor", centre=True)).mean())
    centred = num_bytes(ECSQ(0.1, "tensor", centre=True), x)
    assert centred < 0.9 * num_bytes(ECSQ(0.1, "tensor"), x)
    # No more than the noise costs in the same units, but for the means.
    same_units = ECSQ(unit, "tensor")
    noise = noise / noise.square().mean().sqrt()
    assert centred < 1.02 * num_bytes(same_units, noise) + 2 * 200


def test_a_token_that_stands_out_is_not_shifted_by_means_and_does_not_shift_them():
    x = torch.randn(64, 100) + 3 * torch.randn(100)
    x[5] = 100 * torch.randn(100)
    centred, plain = ECSQ(0.2, centre=True), ECSQ(0.2)
    y = round_trip(centred, x)
    assert same_bits(y[5], round_trip(plain, x)[5])
    assert_error_is_bounded(x, y, centred, x)
    others = x[torch.arange(64) != 5]
    cost = num_bytes(centred, x) - num_bytes(centred, others)
    assert 0 < cost < 2 * 100 + 32
    assert num_bytes(centred, x) < 0.9 * num_bytes(plain, x)


@pytest.mark.parametrize("num_zeros", [90, 110, 300])
@pytest.mark.parametrize("compressor", [ECSQ(0.3, centre=True, spikes=16), ECSQ(0.3, spikes=16)])
def test_tokens_of_zeros_change_nothing_for_the_others(compressor, num_zeros):
    """As of a padded batch, more than half of which may be zeros."""
    x = torch.randn(100, 64) + 3 * torch.randn(64)
    x[5] *= 100
    padded = torch.cat([torch.zeros(num_zeros // 2, 64), x, torch.zeros(num_zeros // 2, 64)])
    found = round_trip(compressor, padded)
    assert same_bits(found[num_zeros // 2 : num_zeros // 2 + 100], round_trip(compressor, x))
    assert found.count_nonzero(1).count_nonzero() == 100
    # What is left are their classes in the entropy coder.
    assert num_bytes(compressor, padded) < 1.15 * num_bytes(compressor, x)


def test_a_token_that_stands_out_may_have_a_finer_step():
    """An error 16 times smaller there, the same elsewhere, for the bits of that token alone."""
    x = torch.randn(256, 100)
    x[5] *= 100
    plain, finer = ECSQ(0.4), ECSQ(0.4, spikes=16)
    errors = [(round_trip(c, x) - x).square().mean(1).sqrt() for c in (plain, finer)]
    assert float(errors[1][5]) == pytest.approx(float(errors[0][5]) / 16, rel=0.3)
    others = torch.arange(256) != 5
    assert torch.equal(errors[0][others], errors[1][others])
    assert num_bytes(plain, x) < num_bytes(finer, x) < num_bytes(plain, x) + 200
    # In a memory the tokens that stand out are those of the whole, not those that changed.
    change = torch.zeros_like(x)
    change[7] = 1e-3
    payload = finer.compress_against(change, x)
    assert not finer.decompress(payload, TensorMeta.of(x)).any()


# -- dither ----------------------------------------------------------------------------------------


def test_dither_is_unbiased():
    """E x^ = x: 20,000 copies of each number, 5 standard deviations. To the nearest it is not."""
    points = torch.tensor([-1.0, -0.77, -0.5, 0.0, 0.013, 0.3, 0.999, 1.7])
    copies = 20_000
    x = points.repeat(copies, 1)
    y = round_trip(ECSQ(2.0, "tensor", rounding="dither"), x, seed=5).double()
    deviation = y.std(dim=0) / copies**0.5
    assert ((y.mean(dim=0) - points.double()).abs() <= 5 * deviation).all()
    nearest = round_trip(ECSQ(2.0, "tensor"), x).double()
    assert (nearest.mean(dim=0) - points.double()).abs().max() > 0.2


@pytest.mark.parametrize("step", [0.5, 2.0])
def test_the_error_of_dither_is_uniform_and_does_not_depend_on_the_tensor(step):
    x = torch.randn(300, 500).double()
    compressor = ECSQ(step, "tensor", rounding="dither")
    error = (round_trip(compressor, x) - x) / units_of(x, compressor)
    quantiles = torch.linspace(0, 1, 21, dtype=torch.float64)
    found = torch.quantile(error.reshape(-1)[:100_000], quantiles)
    torch.testing.assert_close(found, quantiles - 0.5, rtol=0, atol=0.01)
    r = torch.corrcoef(torch.stack([error, error.square(), x, x.square()]).reshape(4, -1))
    assert r[:2, 2:].abs().max() < 5 / x.numel() ** 0.5


def test_both_ends_of_dither_need_equal_generators():
    x = torch.randn(30, 80)  # so small that its dither does not say how it is coded
    compressor = ECSQ(1.0, rounding="dither")
    assert compressor.shares_choice and compressor.is_unbiased
    payload = compressor.compress(x, drawn(1))
    meta = TensorMeta.of(x)
    right, wrong = (compressor.decompress(payload, meta, drawn(seed)) for seed in (1, 2))
    assert (right - x).square().mean() < 0.5 * (wrong - x).square().mean()
    assert same_bits(round_trip(compressor, x, 1), right)
    x = torch.randn(60, 80)
    payload, meta = compressor.compress(x, drawn(1)), TensorMeta.of(x)
    assert same_bits(compressor.decompress(payload, meta, drawn(1)), round_trip(compressor, x, 1))
    with pytest.raises(RuntimeError, match="damaged, or the two ends have different"):
        compressor.decompress(payload, meta, drawn(2))
    plain = ECSQ(1.0)
    assert not plain.shares_choice and not plain.is_unbiased
    assert same_bits(round_trip(plain, x, 1), round_trip(plain, x, 2))


# -- lanes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting", [{}, {"centre": True, "spikes": 16}, {"rounding": "dither"}], ids=str
)
def test_in_lanes_the_same_numbers_take_hardly_more_bytes(setting):
    plain, fast = ECSQ(0.7, **setting), ECSQ(0.7, **setting, lanes=True)
    x = torch.randn(1024, 160) * torch.linspace(-1, 1, 160).exp()
    meta = TensorMeta.of(x)
    before, after = (each.compress(x, drawn()) for each in (plain, fast))
    assert kind_of_elements(plain, meta, before) in (4, 8)
    assert kind_of_elements(fast, meta, after) == 10
    assert len(before[0]) < len(after[0]) <= 1.008 * len(before[0]) + 8
    arrived = plain.decompress(before, meta, drawn())
    for reader in (plain, fast):
        assert same_bits(reader.decompress(after, meta, drawn()), arrived)
    sent, kept = fast.round_trip(x, x, meta, drawn)
    assert torch.equal(sent[0], after[0]) and same_bits(kept, arrived)


def test_few_elements_are_in_no_lanes():
    x = torch.randn(30, 40)
    assert torch.equal(ECSQ(0.5, lanes=True).compress(x)[0], ECSQ(0.5).compress(x)[0])


def kind_of_elements(compressor, meta, payload):
    """The first byte of the last code."""
    return int(compressor._parts(Tokens.of(meta)).parted((payload[0],))[-1][0][0])


# -- what is left of a tensor ----------------------------------------------------------------------


@pytest.mark.parametrize("compressor", SETTINGS, ids=str)
def test_a_small_change_costs_little_and_has_the_unit_of_the_whole(compressor):
    whole = torch.randn(100, 200)
    change = whole.roll(1, 0) * compressor.step / 10
    payload = compressor.compress_against(change, whole, drawn())
    arrived = compressor.decompress(payload, TensorMeta.of(whole), drawn())
    assert_error_is_bounded(change, arrived, compressor, whole)
    if compressor.rounding == "nearest":  # dither of nothing is a bit now and then
        assert payload[0].numel() < 0.1 * num_bytes(compressor, whole) + 400


def test_against_itself_it_is_the_same_message():
    x = torch.randn(30, 40)
    for compressor in SETTINGS:
        against = compressor.compress_against(x, x.clone(), drawn())
        assert torch.equal(against[0], compressor.compress(x, drawn())[0])


class Visits:
    """The two ends of AQ-SGD; a message is planned, coded, decoded and committed at once."""

    def __init__(self, method: AQSGD, x: Tensor) -> None:
        self.method = method
        self.ends = [end_of(method, side, TensorMeta.of(x), x.device) for side in Side]

    def __call__(self, x: Tensor, ids: list[int], step: int) -> tuple[Tensor, int, int]:
        """The tensor that arrives, the bytes of its message, and how many parts of it vary."""
        at = MessageContext(
            step, 0, lambda part: generator_for(step, part), tuple((i,) for i in ids), 1.0
        )
        meta = TensorMeta.of(x)
        sender, receiver = (MemoryPlan(self.method, end, meta, at, x.device) for end in self.ends)
        assert sender.layout == receiver.layout and sender.check == receiver.check
        payload = sender.encode(x)
        y = receiver.decode(payload)
        assert same_bits(sender.arrived(payload), y)
        for end in self.ends:
            end.commit()
        assert_ends_agree(*self.ends)
        return y, payload[-1].numel(), sum(sender._parts.varies)


def test_visits_of_samples_that_have_not_changed():
    """aqsgd: next to nothing from the second visit on, and an error within half a unit."""
    method = parse("aqsgd:first=step/0.3+step:0.3")
    assert method == AQSGD(ECSQ(0.3), first=ECSQ(0.3))
    x = torch.randn(4, 20, 64)
    visit = Visits(method, x)
    y, first, _ = visit(x, [0, 1, 2, 3], 0)
    assert_error_is_bounded(x, y, ECSQ(0.3), x)
    for step in range(1, 6):
        y, later, _ = visit(x, [0, 1, 2, 3], step)
        assert later < 0.1 * first
        assert_error_is_bounded(x, y, ECSQ(0.3), x)


def test_an_estimate_follows_samples_that_change_within_half_a_unit():
    """However many visits: an error is not added to the next."""
    x = torch.randn(4, 20, 64)
    visit = Visits(AQSGD(ECSQ(0.3), first=ECSQ(0.3, centre=True)), x)
    _, first, _ = visit(x, [0, 1, 2, 3], 0)
    for step in range(1, 8):
        x = x + 0.05 * torch.randn(x.shape)
        y, later, _ = visit(x, [0, 1, 2, 3], step)
        assert_error_is_bounded(x, y, ECSQ(0.3), x)
        assert later < 0.6 * first


def test_a_microbatch_of_first_and_later_samples():
    """Two parts that vary in length, each behind its own."""
    data = torch.randn(6, 20, 64)
    visit = Visits(AQSGD(ECSQ(0.3), first=ECSQ(0.3)), data[:4])
    _, first, parts = visit(data[:4], [0, 1, 2, 3], 0)
    assert parts == 1
    for step, ids in enumerate(([2, 4, 3, 5], [5, 0, 4, 1]), 1):
        y, size, parts = visit(data[ids], ids, step)
        assert_error_is_bounded(data[ids], y, ECSQ(0.3), data[ids])
        new = [2, 0][step - 1]
        assert parts == (2 if new else 1)
        assert size < (new / 4 + 0.15) * first


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 0.0, -1, math.nan, math.inf, 1e-9])
def test_a_step_that_is_none(step):
    with pytest.raises(ValueError, match=rf"step={step}: .*0\.25 to 0\.5"):
        ECSQ(step)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scale": "row"}, "scale='row'.*token, tensor"),
        ({"dead_zone": 0.4}, "dead_zone=0.4: 0.5 .* to 1"),
        ({"dead_zone": 1.1}, "dead_zone=1.1: 0.5 .* to 1"),
        ({"dead_zone": math.nan}, "dead_zone=nan"),
        ({"rounding": "up"}, "rounding='up'.*nearest, dither"),
        ({"rounding": "dither", "dead_zone": 0.6}, "dither.*no dead_zone"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        ECSQ(0.5, **settings)


def test_bad_specs():
    for spec in ("step", "step:0", "step:nan", "step:wide", "step:0.5:row", "step:1:centre=maybe"):
        with pytest.raises(ValueError, match="step"):
            parse(spec)


@pytest.mark.parametrize(
    "spec",
    [
        "step:0.5",
        "step:0.25:centre=True",
        "step:0.3:scale=tensor:dead_zone=0.75",
        "step:2.0:scale=tensor:rounding=dither",
        "step:0.5:lanes=True",
        "ef+step:0.5",
        "ef21+step:0.5:dead_zone=0.6",
        "aqsgd:first=step/0.3+step:0.3",
        "aqsgd:first=step/0.3/centre=True+step:0.3:dead_zone=0.6",
    ],
)
def test_spec(spec):
    assert str(parse(spec)) == spec and parse(str(parse(spec))) == parse(spec)


@pytest.mark.parametrize("method", ["step:0.5", "ef+step:0.5"])
def test_between_replicas_it_is_refused(method):
    with pytest.raises(ValueError, match=rf"dp_comp=({method.replace('+', '.')}).*equal lengths"):
        check_run({"w": torch.zeros(64, 64)}, replica_method_of(method), mpcomp.ReplicaNetwork(), 2)


def test_parameters_and_values_of_selections_are_refused():
    with pytest.raises(ValueError, match=r"param_comp=step:0\.5: .*equal lengths"):
        param_comp_of("step:0.5")
    with pytest.raises(ValueError, match=r"values=step:0\.5"):
        mpcomp.TopK(0.1, values=ECSQ(0.5))


# -- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("compressor", SETTINGS, ids=str)
def test_of_damaged_bytes_there_is_an_error_or_a_finite_tensor(compressor, dtype):
    """Flipped bits, runs of one byte, and other lengths; never another exception."""
    x = torch.randn(9, 14).to(dtype)
    meta = TensorMeta.of(x)
    message = compressor.compress(x, drawn())[0].numpy()
    rng = np.random.default_rng(0)
    cut = [message[:end] for end in range(len(message))]
    flipped, overwritten = ([message.copy() for _ in range(60)] for _ in range(2))
    for hurt in flipped:
        hurt[rng.integers(len(hurt), size=2)] ^= np.uint8(1 << rng.integers(8))
    for hurt in overwritten:
        start = rng.integers(len(hurt))
        hurt[start : start + rng.integers(1, 9)] = rng.choice([0, 1, 127, 128, 255])
    for hurt in cut:
        with pytest.raises(RuntimeError):
            compressor.decompress((torch.from_numpy(hurt.copy()),), meta, drawn())
    for hurt in flipped + overwritten:
        try:
            y = compressor.decompress((torch.from_numpy(hurt),), meta, drawn())
        except RuntimeError:
            continue
        assert y.shape == x.shape and y.dtype == dtype and y.isfinite().all()


def test_numbers_that_are_none_arrive_finite():
    x = torch.randn(6, 30)
    x[0, 0], x[1, 1], x[2, 2] = math.nan, math.inf, -math.inf
    for compressor in SETTINGS:
        assert round_trip(compressor, x).isfinite().all()
        if compressor.scale == "token" and not compressor.centre:
            assert_error_is_bounded(x[3:], round_trip(compressor, x)[3:], compressor, x[3:])


@pytest.mark.parametrize("spikes", [0, 65, 2.5, -1])
def test_spikes_that_are_none(spikes):
    with pytest.raises(ValueError, match=rf"spikes={spikes}: a whole number from 1 to 64"):
        ECSQ(0.3, spikes=spikes)


def test_spikes_need_scales_of_tokens():
    with pytest.raises(ValueError, match="spikes=16 with scale='tensor'"):
        ECSQ(0.3, "tensor", spikes=16)
