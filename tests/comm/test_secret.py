"""Ranks that show each other a secret over a store, and strangers that have none or another.

Ranks are threads here, on one store: before the handshake they have nothing else in common.
"""

import json
import random
import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from mpcomp.comm.failures import PeerError, _record
from mpcomp.comm.handshake import announcing_failure, exchange, shake_hands, show_secret
from mpcomp.comm.secret import Secret, given_secret

WORD, OTHER = "correct horse battery staple", "another secret of some length"
CONFIG = {"chunks": 4, "methods": [["topk:0.1", "none"]]}


def mesh_of(store, rank, size, timeout_s=30.0):
    return SimpleNamespace(store=store, rank=rank, num_ranks=size, timeout_s=timeout_s, secret=None)


def together(work, meshes):
    """What each rank's ``work`` returns, or the error that it raises."""
    found = [None] * len(meshes)

    def run(i):
        try:
            found[i] = work(meshes[i])
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(meshes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def shown(words, timeout_s=30.0, store=None):
    """What comes of a handshake of ranks with these secrets; and the store."""
    store = store or dist.HashStore()
    meshes = [mesh_of(store, rank, len(words), timeout_s) for rank in range(len(words))]

    def work(mesh):
        word = words[mesh.rank]
        show_secret(mesh, {} if word is None else {"MPCOMP_SECRET": word})
        shake_hands(mesh, CONFIG)
        return mesh.secret

    return together(work, meshes), store


def test_ranks_of_one_secret_have_a_key_for_their_run():
    (a, b, c), store = shown([WORD] * 3)
    assert a.code("x") == b.code("x") == c.code("x") != Secret(WORD.encode()).code("x")
    again, _ = shown([WORD] * 3)
    assert again[0].code("x") != a.code("x")
    seen = "".join(store.get(f"{what}/{rank}").decode() for what in WHAT for rank in range(3))
    assert WORD not in seen and "correct" not in repr(a)
    assert shown([None, None])[0] == [None, None]


WHAT = ("secret/number", "secret/code", "hello")


@pytest.mark.parametrize(
    "words, named",
    [
        ([WORD, None, WORD], {0: "rank 1 showed no", 1: "rank 1 showed no", 2: "rank 1 showed no"}),
        ([None, WORD], {0: "rank 0 showed no", 1: "rank 0 showed no"}),
        (
            [WORD, WORD, OTHER],
            {0: "rank 2 showed an", 1: "rank 2 showed an", 2: "rank 0, 1 showed"},
        ),
        ([WORD, OTHER], {0: "rank 1 showed another", 1: "rank 0 showed another"}),
        (
            [WORD, "short"],
            {0: "rank 1 cannot take part: MPCOMP_SECRET has 5", 1: "MPCOMP"},
        ),
    ],
    ids=["one has none", "one has one", "one has another", "two", "too short"],
)
def test_who_has_none_or_another_is_named_on_every_rank(words, named):
    found, store = shown(words)
    for rank, start in named.items():
        assert isinstance(found[rank], ValueError) and str(found[rank]).startswith(start), found
        assert WORD not in str(found[rank]) and OTHER not in str(found[rank])
        assert not store.check([f"hello/{rank}"]), "nothing was said to a stranger"


def test_a_rank_that_does_not_come_is_named_within_the_timeout():
    begin = time.monotonic()
    with pytest.raises(PeerError, match="rank 1 did not come to the handshake within 0.3 s"):
        show_secret(mesh_of(dist.HashStore(), 0, 2, 0.3), {"MPCOMP_SECRET": WORD})
    assert time.monotonic() - begin < 30


def test_what_was_shown_in_one_run_is_of_no_use_in_another():
    """A stranger repeats all that rank 1 has said before, or says what rank 0 says."""
    _, before = shown([WORD, WORD])
    for source in (1, 0):
        store = dist.HashStore()
        for what in WHAT:
            store.set(f"{what}/1", before.get(f"{what}/{source}"))
        with pytest.raises(ValueError, match="rank 1 showed another secret"):
            show_secret(mesh_of(store, 0, 2), {"MPCOMP_SECRET": WORD})


def test_what_is_said_later_has_a_code_of_rank_purpose_and_words():
    key = Secret(WORD.encode()).for_run(["1", "2"])
    store = dist.HashStore()
    mesh, other = mesh_of(store, 0, 2), mesh_of(store, 1, 2)
    mesh.secret = other.secret = key
    for forged in (
        b" [1]",
        b"0 [1]",
        f"{key.code('times', '1', '[2]')} [1]".encode(),
        f"{key.code('times', '0', '[1]')} [1]".encode(),
        f"{key.code('hello', '1', '[1]')} [1]".encode(),
    ):
        store.set("times/1", forged)
        with pytest.raises(ValueError, match="rank 1 says .*not come from somebody who has the se"):
            exchange(mesh, "times", [1])
    store.set("times/1", f"{key.code('times', '1', '[1]')} [1]")
    assert exchange(mesh, "times", [3]) == [[3], [1]]
    with pytest.raises(KeyError), announcing_failure(other):
        raise KeyError("x")
    with pytest.raises(ValueError, match="rank 1 cannot take part: KeyError: 'x'"):
        exchange(mesh, "hello", {})


def test_where_a_secret_comes_from(tmp_path):
    file = tmp_path / "secret"
    file.write_text(WORD + "\n")
    same = given_secret({"MPCOMP_SECRET_FILE": str(file)})
    assert same.code("x") == given_secret({"MPCOMP_SECRET": WORD}).code("x")
    assert given_secret({}) is None
    for environment, words in [
        ({"MPCOMP_SECRET": ""}, "MPCOMP_SECRET has 0 characters: expected 16 or more"),
        ({"MPCOMP_SECRET": WORD, "MPCOMP_SECRET_FILE": "x"}, "both set"),
        ({"MPCOMP_SECRET_FILE": str(tmp_path / "none")}, "cannot be read"),
    ]:
        with pytest.raises(ValueError, match=words):
            given_secret(environment)


# -- hostile words ---------------------------------------------------------------------------------


def hostile(seed):
    """Bytes that a stranger may write where a rank's words are expected."""
    chance = random.Random(seed)
    honest = json.dumps(CONFIG).encode()
    kind = seed % 8
    if kind == 0:
        return b" " + bytes(chance.randrange(256) for _ in range(chance.randrange(60)))
    if kind == 1:
        return b" " + b"[" * 100_000
    if kind == 2:
        return b" " + b'{"a":' * 5000 + b"1" + b"}" * 5000
    if kind == 3:
        return b" " + chance.choice(
            [b"null", b"3", b"[]", b'"x"', b"1e999", b"NaN", b"-" + b"9" * 5000]
        )
    if kind == 4:
        return b" " + honest[: chance.randrange(len(honest))]
    if kind == 5:
        spoilt = bytearray(honest)
        spoilt[chance.randrange(len(spoilt))] ^= 1 << chance.randrange(8)
        return b" " + bytes(spoilt)
    if kind == 6:
        return b""
    return b" " + json.dumps({chance.choice(["chunks", "methods", "x"]): [{}, None]}).encode()


def test_hostile_words_are_errors_that_name_the_rank():
    for seed in range(400):
        store = dist.HashStore()
        store.set("hello/1", hostile(seed))
        try:
            shake_hands(mesh_of(store, 0, 2), CONFIG)
        except ValueError as error:
            assert "rank 1 " in str(error) and len(str(error)) < 1000, (seed, error)
        else:
            assert json.loads(hostile(seed).partition(b" ")[2]) == CONFIG


def test_hostile_records_of_failures_blame_nobody():
    for seed in range(400):
        record = _record(1, 4, hostile(seed).partition(b" ")[2])
        assert record is None
    good = {"rank": 3, "where": "stage 1", "reason": "boom", "peer": 2, "waited": True}
    good |= {"returned": False, "num_got": 4, "last_got": "step 4"}
    assert _record(1, 4, json.dumps(good).encode()).rank == 1
    for peer in (99, -1, "2", None, True, [2]):
        assert _record(1, 4, json.dumps({**good, "peer": peer}).encode()).peer is None
    for key, value in (
        *(("where", 3), ("reason", None), ("waited", 1)),
        *(("returned", "no"), ("num_got", "4"), ("last_got", [])),
    ):
        assert _record(1, 4, json.dumps({**good, key: value}).encode()) is None
