"""Rivals that change the model: what their papers say of them holds of what is made here."""

from __future__ import annotations

import pytest
import torch

from recipes.decoder import decoder, token_batch, token_loss
from recipes.lab.rivals import learned_basis, subspace
from recipes.lab.rivals.learned_basis import LearnedBasisDecoder, polar
from recipes.lab.rivals.subspace import SubspaceDecoder
from recipes.lab.rivals.wire import crossing

SIZES = {"num_blocks": 3, "width": 32, "num_heads": 2, "vocab": 50, "context": 16}
RANK = 8


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return token_batch(batch=4, context=16, vocab=50)


def test_a_crossing_rounds_to_bf16_both_ways() -> None:
    z = torch.randn(5, 7, requires_grad=True)
    arrived = crossing(z)
    back = torch.randn(5, 7)
    arrived.backward(back)
    assert arrived.dtype == torch.float32
    assert torch.equal(arrived, z.bfloat16().float())
    assert z.grad is not None
    assert torch.equal(z.grad, back.bfloat16().float())


def test_the_stream_of_a_subspace_network_is_the_table_and_what_crosses(monkeypatch) -> None:
    """With exact messages a cut changes nothing beyond rounding: no part is outside of U."""
    model = SubspaceDecoder(**SIZES, rank=RANK, seed=0)
    x, _ = batch()
    sent = []

    def exact(z):
        sent.append(z)
        return z

    monkeypatch.setattr(subspace, "crossing", exact)
    with_cuts = model(x)
    fixed = model.tables[x]
    stream = fixed + (model.token(x) + model.position[: x.shape[1]]) @ model.basis.T
    for block in model.blocks:
        stream = block(stream)
    torch.testing.assert_close(with_cuts, model.head(stream), rtol=1e-4, atol=1e-5)
    assert [z.shape for z in sent] == [(4, 16, RANK)] * 2
    assert model.numbers_sent == RANK


def test_a_subspace_network_has_as_many_weights_as_the_plain_decoder() -> None:
    sizes = {**SIZES, "width": 128, "num_heads": 4}
    plain = decoder(**sizes)
    model = SubspaceDecoder(**sizes, rank=20, seed=0)
    own, other = (
        sum(
            p.numel() for name, p in each.named_parameters() if "blocks" in name or name[0] in "123"
        )
        for each in (model, plain)
    )
    assert own == pytest.approx(other, rel=0.01)


def test_a_learned_basis_stays_orthonormal_and_moves() -> None:
    model = LearnedBasisDecoder(**SIZES, rank=RANK, seed=0, rate=0.05)
    before = [basis.detach().clone() for basis in model.bases]
    x, y = batch()
    for _ in range(3):
        token_loss(model(x), y).backward()
        model.after_step()
    for basis, old in zip(model.bases, before, strict=True):
        torch.testing.assert_close(basis.T @ basis, torch.eye(RANK), rtol=0, atol=1e-5)
        assert (basis - old).abs().max() > 0.01
        assert basis.grad is None
    assert all(id(basis) not in map(id, model.parameters()) for basis in model.bases)


def test_bases_go_where_the_module_goes() -> None:
    model = LearnedBasisDecoder(**SIZES, rank=RANK, seed=0).double()
    x, y = batch()
    token_loss(model(x), y).backward()
    model.after_step()
    assert all(basis.dtype == torch.float64 and basis.requires_grad for basis in model.bases)


def test_a_learned_basis_descends() -> None:
    """Of the bases alone: every other weight stays as it is."""
    model = LearnedBasisDecoder(**SIZES, rank=RANK, seed=0, rate=0.02)
    x, y = batch()
    first = token_loss(model(x), y)
    loss = first
    for _ in range(20):
        loss.backward()
        model.after_step()
        loss = token_loss(model(x), y)
    assert loss < first


def test_what_ranks_know_from_the_ids_is_not_sent(monkeypatch) -> None:
    model = LearnedBasisDecoder(**SIZES, rank=RANK, seed=0)
    with torch.no_grad():
        for table in model.tables:
            table.normal_()
    sent = []
    monkeypatch.setattr(learned_basis, "crossing", lambda z: sent.append(z) or z)
    x, _ = batch()
    model(x)
    stream = model.blocks[0](model.embedding(x))
    known = model.tables[0][x] @ model.offsets[0]
    torch.testing.assert_close(sent[0], (stream - known) @ model.bases[0])


def test_polar_is_the_nearest_orthonormal_matrix() -> None:
    matrix = torch.randn(9, 4)
    nearest = polar(matrix)
    torch.testing.assert_close(nearest.T @ nearest, torch.eye(4), rtol=0, atol=1e-5)
    distance = (matrix - nearest).norm()
    for _ in range(20):
        other = torch.linalg.qr(nearest + 0.1 * torch.randn(9, 4)).Q
        assert (matrix - other).norm() > distance
