"""Profiles of models: what is measured and counted, and that the model stays as it is."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stages
from mpcomp.core.loss import CausalLMLoss
from mpcomp.plan.profile import BACKWARD_OVER_FORWARD, count_profile, measure_profile

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 8)
    )


def loss(output: Tensor) -> Tensor:
    return output.square().sum()


def gpt2(device: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=4, n_embd=32, n_head=2, vocab_size=64, n_positions=16)
    with torch.device(device):
        return GPT2LMHeadModel(config)


def test_blocks_are_the_models() -> None:
    model = chain()
    found = measure_profile(model, X, loss, repeats=1)
    assert [block.name for block in found.blocks] == ["0", "1", "2", "3", "4"]
    assert [block.output.shape for block in found.blocks[:2]] == [(4, 32), (4, 32)]
    assert [block.num_parameters for block in found.blocks] == [
        sum(p.numel() for p in child.parameters()) for child in model
    ]
    assert found.num_parameters == sum(p.numel() for p in model.parameters())
    # Names as in the model: blocks that are put together in a stage keep all of theirs.
    named = [name for block in found.blocks for name in block.parameters]
    assert sorted(named) == sorted(dict(model.named_parameters()))
    assert all(block.compute.forward_s > 0 < block.compute.backward_s for block in found.blocks)


def test_blocks_of_a_kind_are_measured_once() -> None:
    found = measure_profile(chain(), X, loss, repeats=1)
    assert found.blocks[2].compute is found.blocks[3].compute
    assert found.blocks[2].compute is not found.blocks[4].compute


def test_the_last_block_is_a_kind_of_its_own() -> None:
    """It has the loss, where all backwards begin."""
    alike = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    found = measure_profile(alike, X, loss, repeats=1)
    assert found.blocks[0].compute is found.blocks[1].compute
    assert found.blocks[2].compute is not found.blocks[1].compute


def test_what_crosses_a_cut_is_the_models_own() -> None:
    """Blocks of different kinds, so that every one is run: activation and gradient are exact."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 20), nn.Linear(20, 8))
    found = measure_profile(model, X, loss, repeats=1)
    middle = model[:2](X).detach().requires_grad_()
    loss(model[2:](middle)).backward()
    sample = found.samples[found.blocks[1].output]
    torch.testing.assert_close(sample.activation, middle.detach())
    assert middle.grad is not None
    torch.testing.assert_close(sample.gradient, middle.grad)


def test_the_model_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 4)).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    measure_profile(model, X, loss, repeats=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not model.training
    assert all(p.grad is None for p in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_model_without_weights_is_measured_like_one_with() -> None:
    tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(0))
    sample, causal = {"input_ids": tokens}, CausalLMLoss()

    def of_tokens(output: Tensor) -> Tensor:
        return causal(output, tokens)

    model = gpt2("meta")
    without = measure_profile(model, sample, of_tokens, repeats=1)
    assert all(p.is_meta for p in model.parameters())
    full = measure_profile(gpt2("cpu"), sample, of_tokens, repeats=1)
    counted = count_profile(model, sample, flops_per_s=1e9)
    for found in (without, counted):
        assert [b.name for b in found.blocks] == [b.name for b in full.blocks]
        assert [b.parameters for b in found.blocks] == [b.parameters for b in full.blocks]
        assert [b.output for b in found.blocks] == [b.output for b in full.blocks]
        assert found.ties == full.ties
        assert list(found.samples) == list(full.samples)
        for each in found.samples.values():
            assert each.activation.isfinite().all() and each.gradient.isfinite().all()
    (tie,) = full.ties
    assert (tie.first, tie.last, tie.meta.shape) == (0, 3, (64, 32)) and tie.by_token
    assert full.num_parameters == sum(p.numel() for p in gpt2("cpu").parameters())


def test_counted_operations_are_those_of_matrix_products() -> None:
    found = count_profile(chain(), X, flops_per_s=1e6)
    assert found.blocks[0].compute.forward_s == pytest.approx(2 * 4 * 16 * 32 / 1e6)
    assert found.blocks[1].compute.forward_s == 0
    assert found.blocks[0].compute.backward_s == pytest.approx(
        BACKWARD_OVER_FORWARD * found.blocks[0].compute.forward_s
    )


class Attention(nn.Module):
    """Attention of four heads, some of them with keys and values that they share."""

    def __init__(self, keys: int, *, causal: bool, mask: bool) -> None:
        super().__init__()
        self._keys, self._causal, self._mask = keys, causal, mask

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
        keys = heads[:, : self._keys]
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool) if self._mask else None
        out = F.scaled_dot_product_attention(
            heads, keys, keys, attn_mask=mask, is_causal=self._causal, enable_gqa=self._keys < 4
        )
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("keys", [4, 2, 1])
@pytest.mark.parametrize(
    ("causal", "mask"),
    [(True, False), (False, False), (False, True)],
    ids=["causal", "all", "mask"],
)
def test_fused_attention_is_counted(keys: int, causal: bool, mask: bool) -> None:
    rows, tokens, width = 2, 16, 32
    net = nn.Sequential(Attention(keys, causal=causal, mask=mask), nn.Linear(width, width))
    found = count_profile(net, torch.randn(rows, tokens, width), flops_per_s=1.0)
    # Two products of all tokens with all, in each head.
    assert found.blocks[0].compute.forward_s == 2 * rows * 2 * tokens**2 * width
    assert found.blocks[1].compute.forward_s == 2 * rows * tokens * width**2


def test_autocast_is_what_crosses() -> None:
    found = measure_profile(chain(), X, loss, autocast=torch.bfloat16, repeats=1)
    assert found.blocks[0].output.dtype == torch.bfloat16


def test_stages_are_blocks_in_order() -> None:
    found = measure_profile(chain(), X, loss, repeats=1)
    assert found.stages([2, 3]) == [slice(0, 2), slice(2, 5)]
    with pytest.raises(ValueError, match=r"\[2, 2\] add up to 4, but the model has 5"):
        found.stages([2, 2])


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="repeats is 0"):
        measure_profile(chain(), X, loss, repeats=0)
    for speed in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="flops_per_s is"):
            count_profile(chain(), X, flops_per_s=speed)


def tied_chain(num_blocks: int = 4) -> nn.Sequential:
    """Embedding, blocks, a norm, and a head with the embedding's weight: 64 x 16."""
    torch.manual_seed(0)
    embedding, head = nn.Embedding(64, 16), nn.Linear(16, 64, bias=False)
    head.weight = embedding.weight
    middle = [nn.Linear(16, 16, bias=False) for _ in range(num_blocks)]
    return nn.Sequential(embedding, *middle, nn.LayerNorm(16), head)


def test_only_of_an_embedding_rows_of_tokens_are_sent() -> None:
    """Of layers that share a weight all rows have a gradient, and of a vector there are none."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8))
    model[2].weight, model[3].weight = model[0].weight, model[1].weight
    ties = count_profile(model, torch.randn(4, 8), flops_per_s=1e9).ties
    assert {(tie.meta.shape, tie.by_token) for tie in ties} == {((8, 8), False), ((1, 8), False)}


TOKENS = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("how", ["counted", "measured"])
@pytest.mark.parametrize("kind", ["chain", "gpt2", "gpt2 on meta"])
def test_both_uses_of_a_weight_on_the_first_host(kind: str, how: str) -> None:
    """Blocks as `stages.split` counts them; what comes from the second use on is a stage more."""
    model = tied_chain() if kind == "chain" else gpt2("meta" if "meta" in kind else "cpu")
    sample: object = TOKENS if kind == "chain" else {"input_ids": TOKENS}
    if how == "counted":
        found = count_profile(model, sample, flops_per_s=1e9, together=True)
    else:
        found = measure_profile(model, sample, loss, repeats=1, together=True)
    plain = count_profile(model, sample, flops_per_s=1e9)
    assert plain.again is None and [tie.by_token for tie in plain.ties] == [True]
    assert found.ties == ()
    assert found.num_blocks == plain.num_blocks == len(stages.blocks(model))
    assert found.num_parameters == plain.num_parameters
    assert found.num_parameters == sum(p.numel() for p in model.parameters())
    assert found.again is not None
    for num_hosts in (2, 3):
        times = [[sum(block.compute) for block in found.blocks]] * num_hosts
        sizes = [block.output.dense_bytes for block in found.blocks]
        for counts in (
            found.balanced(num_hosts, times),
            found.balanced(num_hosts, times, slack=0.5, prices=sizes),
        ):
            cut = stages.split(model, counts, together=True)
            assert cut[0].together and len(cut) == num_hosts + 1
            own = found.stages(counts)
            assert len(own) == num_hosts + 1 and own[-1] == slice(found.again, len(found.blocks))
            names = [{n for b in found.blocks[part] for n in b.parameters} for part in own]
            assert names == [{name for name, _ in stage.named_parameters()} for stage in cut]


def test_what_is_used_again_weighs_on_the_first_host() -> None:
    """The head has as many operations as four blocks: the first host has nothing else."""
    found = count_profile(tied_chain(), TOKENS, flops_per_s=1e9, together=True)
    times = [[sum(block.compute) for block in found.blocks]] * 2
    assert times[0][-1] == pytest.approx(4 * times[0][1])
    counts = found.balanced(2, times)
    first, second, last = found.stages(counts)
    loads = [sum(times[0][own]) for own in (first, second, last)]
    assert loads[0] + loads[2] == loads[1] == pytest.approx(4 * times[0][1])
    plain = count_profile(tied_chain(), TOKENS, flops_per_s=1e9)
    assert plain.balanced(2, times) == stages.partition(times, 2) != counts


def test_cuts_behind_the_second_use_are_refused() -> None:
    found = count_profile(tied_chain(), TOKENS, flops_per_s=1e9, together=True)
    with pytest.raises(ValueError, match=r"\[6, 1\] leave no block .* second use .* in '6'"):
        found.stages([6, 1])
    with pytest.raises(ValueError, match=r"\[2, 4\] add up to 6, but the model has 7"):
        found.stages([2, 4])
