"""KLT: a basis as it travels, and a message in it."""

import pytest
import torch
from methods import drawn, same_bits
from torch import Tensor

import mpcomp
from mpcomp import AQSGD, ECSQ, KLT, Identity, Quantize, TensorMeta, parse
from mpcomp.compressors.klt import Basis, InBasis
from mpcomp.core.context import Step
from mpcomp.links.build import method_of

WIDTH = 24


def orthonormal(width: int = WIDTH, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    square = torch.randn(width, width, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(square).Q


def correlated(*shape: int, seed: int = 0) -> Tensor:
    """Vectors [..., C] whose variance falls by a half from one direction to the next."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return ((x * 0.5 ** (torch.arange(shape[-1]) / 2)) @ orthonormal(shape[-1])).float()


def coder(inner: mpcomp.Compressor) -> InBasis:
    return KLT(inner).at(Basis.rounded(orthonormal()))


def test_a_basis_travels_as_its_numbers():
    basis = Basis.rounded(orthonormal())
    again = Basis.decoded(basis.coded, WIDTH)
    assert same_bits(again.numbers, basis.numbers) and same_bits(again.rows, basis.rows)
    assert basis.coded.numel() < 0.8 * WIDTH**2  # 5 bits an entry, and tables
    lengths = basis.rows.norm(dim=1)
    assert (lengths - 1).abs().max() < 0.05


def test_coordinates_are_exact():
    """x = y B, although B is rounded, and so not orthonormal."""
    basis, x = Basis.rounded(orthonormal()), torch.randn(50, WIDTH)
    assert torch.allclose(basis.vectors(basis.coordinates(x)), x, atol=1e-5)
    assert not torch.allclose(basis.rows @ basis.rows.T, torch.eye(WIDTH).double(), atol=1e-3)


@pytest.mark.parametrize("step", [0.1, 0.5])
def test_it_takes_the_coding_gain_less(step):
    """As many bits less as the directions' variances say, for the same error."""
    inner, x = ECSQ(step, scale="tensor"), correlated(4, 500, WIDTH)
    meta, numel = TensorMeta.of(x), x.numel()
    (plain,) = inner.compress(x)
    (payload,) = coder(inner).compress(x)
    vectors = x.reshape(-1, WIDTH).double()
    unit = step * float(vectors.square().mean().sqrt())

    def rate(coordinates: Tensor) -> Tensor:
        """Bits an element: of a Gaussian with an error of unit^2 / 12, less where it is small."""
        return 0.5 * (1 + 12 * coordinates.square().mean(0) / unit**2).log2().mean()

    gain = float(rate(vectors) - rate(vectors @ orthonormal().T))
    saved = 8 * (plain.numel() - payload.numel()) / numel
    assert saved == pytest.approx(gain, rel=0.25) and saved > 0.5
    error = (coder(inner).decompress((payload,), meta) - x).square().mean()
    assert error < 1.1 * (inner.decompress((plain,), meta) - x).square().mean()


def spread(by: float, seed: int) -> Tensor:
    """A symmetric matrix, fp64 [C, C], whose eigenvalues fall by a factor each; of mean 1."""
    values = by ** -torch.arange(WIDTH, dtype=torch.float64)
    vectors = orthonormal(seed=seed)
    return (vectors * values) @ vectors.T * WIDTH / values.sum()


def test_a_basis_of_weights_takes_less_for_the_same_cost():
    """As much as the formula says; where errors cost the same in all directions, nothing."""
    x, weights = correlated(4, 4000, WIDTH), spread(1.15, 7)
    vectors = x.reshape(-1, WIDTH).double()
    covariance = vectors.T @ vectors / len(vectors)
    inner, meta = ECSQ(0.02, scale="tensor"), TensorMeta.of(x)
    bits, costs = [], []
    for basis in (Basis.of(covariance), Basis.of(covariance, weights)):
        each = KLT(inner).at(basis)
        (payload,) = each.compress(x)
        error = (each.decompress((payload,), meta) - x).reshape(-1, WIDTH).double()
        bits.append(8 * payload.numel() / x.numel())
        costs.append(float(((error @ weights) * error).sum()))
    values = torch.linalg.eigvalsh(weights)
    gain = float(0.5 * (values.mean().log2() - values.log2().mean()))
    assert bits[0] - bits[1] == pytest.approx(gain, rel=0.15) and gain > 0.15
    assert costs[1] == pytest.approx(costs[0], rel=0.05)

    alike = Basis.of(covariance, 3 * torch.eye(WIDTH).double())
    lengths = alike.rows.norm(dim=1)
    assert (lengths - 1).abs().max() < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 7, WIDTH), (5, WIDTH), (2, WIDTH, 3, 3)])
@pytest.mark.parametrize("inner", [ECSQ(0.1), ECSQ(0.3, rounding="dither"), Quantize(8)], ids=str)
def test_what_arrives_is_like_the_input(shape, dtype, inner):
    x = torch.randn(shape).to(dtype)
    if len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    each, meta = coder(inner), TensorMeta.of(x)
    payload, layout = each.compress(x, drawn()), each.layout(meta)
    for part, of in zip(payload[:-1], layout[:-1], strict=True):
        assert TensorMeta.of(part) == of
    assert payload[-1].numel() <= layout[-1].numel
    y = each.decompress(payload, meta, drawn())
    assert TensorMeta.of(y) == meta
    assert (y.float() - x.float()).norm() < 0.12 * x.float().norm()


def test_without_a_basis_it_is_the_inner_compressor():
    x = correlated(8, WIDTH)
    payload = KLT(ECSQ(0.3)).at(None).compress(x)
    assert same_bits(payload[0], ECSQ(0.3).compress(x)[0])


@pytest.mark.parametrize("value", [1e38, float("inf"), float("nan")])
def test_what_is_too_large_arrives_finite(value):
    x = torch.randn(4, WIDTH)
    x[1, 2] = value
    each = coder(ECSQ(0.3))
    assert each.decompress(each.compress(x), TensorMeta.of(x)).isfinite().all()


def test_damage_is_an_error_or_a_finite_tensor():
    """Of a basis, and of coordinates."""
    x, basis = correlated(64, WIDTH), Basis.rounded(orthonormal(seed=5))
    each, meta = coder(ECSQ(0.3)), TensorMeta.of(x)
    readers = (
        (basis.coded, lambda coded: Basis.decoded(coded, WIDTH).rows),
        (each.compress(x)[0], lambda payload: each.decompress((payload,), meta)),
    )
    outcomes = set()
    for sound, read in readers:
        for place in range(0, sound.numel(), 7):
            damaged = sound.clone()
            damaged[place] ^= 0x55
            for payload in (damaged, damaged[: place + 1]):
                try:
                    y = read(payload)
                except RuntimeError:
                    outcomes.add("error")
                else:
                    outcomes.add("tensor")
                    assert y.isfinite().all()
    assert outcomes == {"error", "tensor"}


def test_settings():
    assert parse("klt+step:0.15:centre=true") == KLT(ECSQ(0.15, centre=True))
    weighted = KLT(ECSQ(0.15), weighted=True)
    assert parse("klt:weighted=true+step:0.15") == parse(str(weighted)) == weighted
    assert str(KLT(ECSQ(0.15))) == str(coder(ECSQ(0.15))) == "klt+step:0.15"
    with pytest.raises(ValueError, match="gains nothing"):
        KLT(Identity())
    memory = parse("klt+aqsgd:first=step/0.3+step:0.4")
    assert memory == KLT(AQSGD(ECSQ(0.4), first=ECSQ(0.3))) and memory.by_sample
    assert str(memory) == "klt+aqsgd:first=step/0.3+step:0.4"
    with pytest.raises(TypeError, match="an adaptive method takes no basis"):
        KLT(parse("adaptive+ef21+topk:0.1"))
    with pytest.raises(ValueError, match="along= goes with no basis"):
        KLT(parse("aqsgd:along=bf16+step:0.4"))
    with pytest.raises(ValueError, match="gains nothing"):
        KLT(parse("aqsgd:first=none+none"))
    with pytest.raises(ValueError, match="goes round a compressor"):
        parse("ef+klt+step:0.5")
    with pytest.raises(ValueError, match="a basis is for cuts"):
        method_of("tie_comp", "klt+step:0.5")
    with pytest.raises(ValueError, match="gradients of an activation, so it is for act_comp"):
        method_of("grad_comp", weighted)


def test_wider_vectors_have_no_basis():
    """They go as they would without one, and a warning says so."""
    links = [
        mpcomp.Link(method, boundary=0, direction="act")
        for method in (KLT(ECSQ(0.15), weighted=True), ECSQ(0.15))
    ]
    wide, meta = torch.randn(2, 5000), TensorMeta((2, 5000))
    for i in range(3):
        step = Step(i, True)
        with pytest.warns(
            UserWarning, match="5000 channels.*at most 4096; they go as with step:0.15"
        ):
            messages = [link.encode(wide, step, 0) for link in links]
        arrived = [
            link.decode(message, meta, step, 0)
            for link, message in zip(links, messages, strict=True)
        ]
        assert same_bits(*arrived) and messages[0].numel() == messages[1].numel()
        links[0].commit()
    assert not links[0].endpoint.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "inner", [ECSQ(0.3), ECSQ(0.5, centre=True), ECSQ(1.0, rounding="dither"), Quantize(4)], ids=str
)
def test_a_sender_knows_what_arrives_without_reading_its_message(inner, dtype):
    """With a basis, and before the first; also of what is left of a tensor."""
    x = correlated(3, 20, WIDTH).to(dtype)
    meta = TensorMeta.of(x)
    for each in (coder(inner), KLT(inner).at(None)):
        for left in (x, x / 8):
            payload, said = each.round_trip(left, x if left is x else 8 * left, meta, drawn)
            other = each.compress_against(left, x if left is x else 8 * left, drawn())
            for part, same in zip(payload, other, strict=True):
                assert same_bits(part, same)
            assert same_bits(said, each.decompress(payload, meta, drawn()))
            assert not same_bits(said, left)  # compressed
