"""The words of an error, by what the transport said."""

import pytest
from torch.distributed import HashStore

from mpcomp.comm.failures import Faults, PeerError, Waits


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
    faults = Faults(
        *(HashStore(), 0, 2, 0.5, waits),
        name_of=lambda rank: f"rank {rank}",
        where=str,
        close=lambda: None,
    )
    with pytest.raises(PeerError) as caught, faults.watch(), waits.on(1, "message 3"):
        raise RuntimeError(reason)
    assert str(caught.value).startswith(f"rank 1 {how}: rank 0 waited for the message 3 (")
