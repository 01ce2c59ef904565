"""Tokenizers, blocks that lose no token, batches that depend on seed, epoch and replica alone."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, PreTrainedTokenizerFast

import mpcomp
from recipes import hub
from recipes.text import load_text
from recipes.tokens import (
    END_OF_TEXT,
    IGNORED,
    Blocks,
    TokenLoader,
    blocks_of,
    check_vocabulary,
    tokenizer_of,
)

GPT2 = Path(__file__).parents[3] / "shared" / "data" / "gpt2-tokenizer"
needs_gpt2 = pytest.mark.skipif(
    not GPT2.is_dir(), reason="GPT-2's tokenizer does not lie beside the checkout"
)
ODD = " leading  spaces,\ttabs \r\n don't , . <unk> ? Ünïcode 日本 \N{ROCKET}\n"


@pytest.fixture(scope="module")
def articles() -> list[str]:
    return load_text("python-docs", train_limit=12).train


@pytest.fixture(scope="module")
def tokenizer(articles):
    return tokenizer_of("bpe", articles, vocab_size=400)


def numbers(num_blocks: int = 10, *, padded: bool = False) -> Blocks:
    """Blocks of 4 tokens: block i holds 10 i, 10 i + 1, ..."""
    ids = 10 * torch.arange(num_blocks)[:, None] + torch.arange(4)
    return Blocks(ids, ids, torch.ones_like(ids) if padded else None)


# -- tokenizers -------------------------------------------------------------------------------


def test_trained_tokenizer_gives_every_text_back(tokenizer, articles):
    for text in (*articles[:3], ODD, ""):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == 400
    assert tokenizer.eos_token == tokenizer.bos_token == END_OF_TEXT
    assert len(tokenizer(articles[0])["input_ids"]) < 0.6 * len(articles[0])


def test_saved_tokenizer_is_the_same(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    GPT2Config(vocab_size=400, bos_token_id=0, eos_token_id=0).save_pretrained(tmp_path)
    for again in (
        AutoTokenizer.from_pretrained(tmp_path),
        tokenizer_of(str(tmp_path), [], vocab_size=1),
    ):
        assert again(ODD)["input_ids"] == tokenizer(ODD)["input_ids"]
        assert again.decode(again(ODD)["input_ids"]) == ODD
        assert again.eos_token_id == tokenizer.eos_token_id


@pytest.mark.slow
def test_training_does_not_depend_on_the_process(tokenizer):
    code = (
        "from recipes.text import load_text\n"
        "from recipes.tokens import tokenizer_of\n"
        "texts = load_text('python-docs', train_limit=12).train\n"
        "print(tokenizer_of(None, texts, vocab_size=400).backend_tokenizer.to_str())"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", code]
    other = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == tokenizer.backend_tokenizer.to_str()


def test_too_small_a_vocabulary(articles):
    with pytest.raises(ValueError, match="vocab_size is 256; .* pass at least 257"):
        tokenizer_of(None, articles, vocab_size=256)
    bytes_only = tokenizer_of(None, articles, vocab_size=257)
    assert bytes_only.decode(bytes_only(ODD)["input_ids"]) == ODD


@needs_gpt2
def test_gpt2_tokenizer_from_its_folder():
    gpt2 = tokenizer_of(str(GPT2), [], vocab_size=1)
    assert (len(gpt2), gpt2.eos_token_id) == (50257, 50256)
    assert gpt2("Hello world")["input_ids"] == [15496, 995]


def test_missing_folder():
    with pytest.raises(ValueError, match=r"no folder \./nowhere; pass --tokenizer bpe"):
        tokenizer_of("./nowhere", [], vocab_size=1)


@pytest.mark.parametrize("content", [None, "{", '{"version": "1.0", "model": {}}'])
def test_a_folder_without_a_tokenizer(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match="cannot load the tokenizer .*pass --tokenizer bpe"):
        tokenizer_of(str(tmp_path), [], vocab_size=1)


def test_a_folder_with_a_model_but_no_vocabulary(tmp_path):
    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="knows no words, its vocabulary is missing; pass"):
        tokenizer_of(str(tmp_path), [], vocab_size=1)


def test_a_tokenizer_without_an_end_of_text(tokenizer, tmp_path):
    PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no end-of-text token .* between articles; pass"):
        tokenizer_of(str(tmp_path), [], vocab_size=1)


def test_hub_name_without_network_says_what_to_pass(monkeypatch):
    monkeypatch.setattr(hub, "_answers", lambda name, kind: False)
    with pytest.raises(ValueError) as caught:
        tokenizer_of("nobody/there-is-no-such-tokenizer", [], vocab_size=1)
    assert "\n" not in str(caught.value)
    assert "--tokenizer bpe, which trains one on the text and needs no" in str(caught.value)


def test_vocabulary_of_the_model(tokenizer):
    check_vocabulary(tokenizer, 400)
    with pytest.raises(ValueError, match="tokenizer has 400 tokens, the model embeddings for 399"):
        check_vocabulary(tokenizer, 399)


# -- blocks -----------------------------------------------------------------------------------


def test_blocks_are_the_articles_joined_by_the_end_of_text(tokenizer, articles):
    eos = tokenizer.eos_token_id
    expected: list[int] = []
    for article in articles:
        expected += [*([eos] if expected else []), *tokenizer(article)["input_ids"]]
    blocks = blocks_of(articles, tokenizer, 32, keep_tail=False)
    assert blocks.input_ids.dtype == torch.int64
    assert blocks.input_ids.shape == (len(expected) // 32, 32)
    assert blocks.input_ids.flatten().tolist() == expected[: len(expected) // 32 * 32]
    assert torch.equal(blocks.labels, blocks.input_ids)
    assert blocks.attention_mask is None


def test_the_tail_is_padded_and_not_predicted(tokenizer, articles):
    whole = blocks_of(articles[:2], tokenizer, 10_000, keep_tail=True)
    assert len(whole) == 1
    num_tokens = int(whole.attention_mask.sum())
    seq_len = 7 if num_tokens % 7 > 1 else 9
    blocks = blocks_of(articles[:2], tokenizer, seq_len, keep_tail=True)
    counts = blocks.attention_mask.bool()
    assert blocks.input_ids.shape == (-(-num_tokens // seq_len), seq_len)
    assert torch.equal(blocks.input_ids[counts], whole.input_ids[0, :num_tokens])
    assert torch.equal(blocks.labels[counts], blocks.input_ids[counts])
    assert blocks.labels[~counts].eq(IGNORED).all()
    assert blocks.num_predicted == num_tokens - len(blocks)
    assert not counts[-1, -1] and counts[-1, 0] and counts[:-1].all()


@pytest.mark.parametrize("num_left", [0, 1])
def test_nothing_is_padded_for_less_than_two_tokens(tokenizer, articles, num_left):
    whole = blocks_of(articles[:1], tokenizer, 10_000, keep_tail=True)
    num_tokens = int(whole.attention_mask.sum())
    blocks = blocks_of(articles[:1], tokenizer, num_tokens - num_left, keep_tail=True)
    assert (len(blocks), blocks.attention_mask) == (1, None)
    assert torch.equal(blocks.input_ids, whole.input_ids[:, : num_tokens - num_left])


@pytest.mark.parametrize("keep_tail", [True, False])
def test_limit_keeps_the_first_blocks(tokenizer, articles, keep_tail):
    every = blocks_of(articles, tokenizer, 32, keep_tail=keep_tail)
    few = blocks_of(articles, tokenizer, 32, keep_tail=keep_tail, limit=3)
    assert torch.equal(few.input_ids, every.input_ids[:3])
    assert few.attention_mask is None
    all_of_them = blocks_of(articles, tokenizer, 32, keep_tail=keep_tail, limit=10**6)
    assert torch.equal(all_of_them.input_ids, every.input_ids)


def test_many_articles_are_joined_as_few_are(tokenizer, articles):
    """More articles than are tokenized at once."""
    lines = [line for article in articles for line in article.splitlines() if line][:600]
    blocks = blocks_of(lines, tokenizer, 2, keep_tail=True)
    separators = blocks.input_ids[blocks.labels != IGNORED].eq(tokenizer.eos_token_id)
    assert separators.sum() == len(lines) - 1


def test_too_little_text(tokenizer):
    with pytest.raises(ValueError, match="has 2 tokens, fewer than one block of 8; pass a smaller"):
        blocks_of(["a", ""], tokenizer, 8, keep_tail=False)
    with pytest.raises(ValueError, match="has 1 tokens, and none can be predicted from another"):
        blocks_of(["a"], tokenizer, 8, keep_tail=True)
    with pytest.raises(ValueError, match="has 0 tokens"):
        blocks_of([], tokenizer, 8, keep_tail=True)


def test_lengths_and_limits_of_nothing(tokenizer):
    with pytest.raises(ValueError, match="seq_len is 1; pass at least 2"):
        blocks_of(["text"], tokenizer, 1, keep_tail=False)
    with pytest.raises(ValueError, match="limit is 0 blocks; pass at least 1"):
        blocks_of(["text"], tokenizer, 2, keep_tail=False, limit=0)


# -- batches ----------------------------------------------------------------------------------


def test_epoch_visits_each_block_once_and_drops_the_rest():
    dropping = TokenLoader(blocks=numbers(), batch_size=4)
    assert [len(ids) for _, ids, _ in dropping.epoch(0)] == [4, 4]
    assert len(dropping) == 2
    keeping = TokenLoader(blocks=numbers(), batch_size=4, drop_last=False)
    ids = torch.cat([ids for _, ids, _ in keeping.epoch(0)])
    assert sorted(ids.tolist()) == list(range(10))
    assert len(keeping) == 3


def test_ids_belong_to_the_blocks_and_the_next_ones_follow():
    loader = TokenLoader(blocks=numbers(), batch_size=4)
    batches = list(loader.epoch(0))
    for batch, ids, _ in batches:
        assert batch.keys() == {"input_ids", "labels"}
        assert torch.equal(batch["input_ids"][:, 0], 10 * ids)
        assert torch.equal(batch["labels"], batch["input_ids"])
    assert torch.equal(batches[0][2], batches[1][1])
    assert batches[-1][2] is None


def test_order_is_a_function_of_seed_and_epoch():
    def order(epoch, **chosen):
        loader = TokenLoader(blocks=numbers(), batch_size=4, **chosen)
        return torch.cat([ids for _, ids, _ in loader.epoch(epoch)]).tolist()

    assert order(3) == order(3)
    assert len({tuple(o) for o in (order(3), order(4), order(3, seed=1), order(0))}) == 4


def test_replicas_share_every_block():
    """Each block stays on its replica, and all have as many."""
    pipes = [SimpleNamespace(replica=i, num_replicas=2) for i in (0, 1)]
    both = [TokenLoader(blocks=numbers(11), batch_size=4).of(pipe) for pipe in pipes]
    for replica, loader in enumerate(both):
        seen = set()
        for epoch in range(8):
            batches = [ids for _, ids, _ in loader.epoch(epoch)]
            assert [len(ids) for ids in batches] == [2] * len(loader) == [2, 2]
            seen |= set(torch.cat(batches).tolist())
        assert seen == set(mpcomp.ReplicaSampler(range(11), (replica, 2), shuffle=False))


def test_evaluation_visits_every_block_in_order():
    loader = TokenLoader(blocks=numbers(), batch_size=4)
    firsts = [(batch["input_ids"][:, 0] // 10).tolist() for batch in loader]
    assert firsts == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    both = [TokenLoader(blocks=numbers(), batch_size=4, replica=i, num_replicas=2) for i in (0, 1)]
    shares = [[(batch["input_ids"][:, 0] // 10).tolist() for batch in one] for one in both]
    assert shares == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]


def test_the_mask_comes_where_there_is_padding():
    loader = TokenLoader(blocks=numbers(padded=True).to(torch.device("cpu")), batch_size=4)
    assert all(batch.keys() == {"input_ids", "labels", "attention_mask"} for batch in loader)
    assert next(loader.epoch(0))[0]["attention_mask"].shape == (4, 4)


def test_global_generator_is_left_alone(global_rng_untouched):
    with global_rng_untouched():
        list(TokenLoader(blocks=numbers(), batch_size=4).epoch(0))


def test_batches_that_cannot_be_filled_or_shared():
    with pytest.raises(ValueError, match="batch_size is 5, replicas is 2; .* a multiple of 2"):
        TokenLoader(blocks=numbers(), batch_size=5, num_replicas=2)
    with pytest.raises(ValueError, match="batch_size is 11, but there are 10 blocks of training"):
        next(TokenLoader(blocks=numbers(), batch_size=11).epoch(0))
    with pytest.raises(ValueError, match="last batch of 9 blocks has 1, fewer than replicas"):
        next(iter(TokenLoader(blocks=numbers(9), batch_size=4, num_replicas=2)))
