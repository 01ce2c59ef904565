"""The words of an error, by what the transport said."""

import pytest
from torch.distributed import HashStore

from mpcomp.comm.failures import DifferentCalls, Faults, PeerError, Waits, say_that_all_returned


def of_rank(rank, store, size, waits, where=str):
    return Faults(
        *(store, rank, size, 0.5, waits),
        name_of=lambda rank: f"rank {rank}",
        where=where,
        close=lambda: None,
    )


@pytest.mark.parametrize(
    ("reason", "how"),
    [
        ("[pair.cc:536] Connection closed by peer [10.0.0.2]:4711", "is gone"),
        ("[pair.cc:536] Read error [10.0.0.2]:4711: Connection reset by peer", "is gone"),
        ("[pair.cc:375] writev [10.0.0.2]:4711: Broken pipe", "is gone"),
        ("[unbound_buffer.cc:81] Timed out waiting 88000ms for send", "did not answer in time"),
    ],
)
def test_a_closed_connection_is_told_from_a_slow_peer(reason, how):
    waits = Waits()
    faults = of_rank(0, HashStore(), 2, waits)
    with pytest.raises(PeerError) as caught, faults.watch(), waits.on(1, "message 3"):
        raise RuntimeError(reason)
    assert str(caught.value).startswith(f"rank 1 {how}: rank 0 waited for the message 3 (")


def waits_for(what="step 5", *, peer=None, got=(4, "step 4")):
    return what, peer, got


RETURNED, FAILED, SILENT = "returned", "failed", "silent"


@pytest.mark.parametrize(
    ("ends", "kind", "begins"),
    [
        ([waits_for(), waits_for(), waits_for("merge")], DifferentCalls,
         "ranks waited for different things, rank 0 for the step 5, rank 1 for the step 5, rank 2"),
        ([waits_for(), waits_for(got=(5, "step 4")), waits_for("figures")], DifferentCalls,
         "ranks waited for different things"),
        ([waits_for("step 4"), waits_for("step 4"), waits_for("figures")], DifferentCalls,
         "ranks waited for different things"),
        ([waits_for("merge", got=(5, "step 5")), waits_for(), waits_for()], PeerError,
         "another rank did not answer in time: rank 0"),
        ([waits_for(), waits_for("step 4", got=(3, "step 3")), waits_for()], PeerError,
         "another rank did not answer in time: rank 0"),
        ([waits_for(), waits_for(), waits_for()], PeerError, "another rank did not answer in time"),
        ([waits_for(), RETURNED, waits_for()], DifferentCalls,
         "rank 1 ended without an error, and rank 0 waited for the step 5: every rank must make"),
        ([waits_for(peer=2), RETURNED, waits_for(peer=1, what="message 3")], DifferentCalls,
         "rank 1 ended without an error, and rank 2 waited for the message 3"),
        ([waits_for(), RETURNED, waits_for(peer=1, what="message 3")], DifferentCalls,
         "rank 1 ended without an error, and rank 2 waited for the message 3"),
        ([waits_for(), RETURNED, SILENT], PeerError, "rank 2 did not answer in time: rank 0"),
        ([waits_for(peer=2), RETURNED, SILENT], PeerError, "rank 2 did not answer in time: rank 0"),
        ([waits_for(), RETURNED, FAILED], PeerError, "rank 2 failed at stage 2: OSError: full"),
    ],
)  # fmt: skip
def test_ranks_that_make_different_calls_are_told_from_those_that_are_gone(ends, kind, begins):
    """A lost message, and a rank that was killed while another had come to its end, are neither."""
    store, caught = HashStore(), None
    for rank, end in reversed(list(enumerate(ends))):
        if end == SILENT:
            continue
        waits = Waits()
        faults = of_rank(rank, store, len(ends), waits, where=lambda rank=rank: f"stage {rank}")
        if end == RETURNED:
            say_that_all_returned()
        elif end == FAILED:
            with pytest.raises(OSError), faults.watch():
                raise OSError("full")
        else:
            what, peer, got = end
            waits.got = got
            with pytest.raises(PeerError) as caught, faults.watch(), waits.on(peer, what):
                raise RuntimeError("Timed out")
        faults.stop()
    assert type(caught.value) is kind
    assert str(caught.value).startswith(begins)
