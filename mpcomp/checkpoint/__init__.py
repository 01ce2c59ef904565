"""Checkpoints: everything a run needs to go on exactly, in formats that need no unpickling.

One process writes a folder with three files::

    weights.safetensors   the model under its original names (loads in the plain model)
    state.safetensors     optimizer, links, replicas and torch's generators, as tensors
    checkpoint.json       version, step, the cut and its methods, and all plain numbers

Of several processes each writes such three files, for its own stages, and on its own disk: links
are slow, so no weights or state cross them. Disks may be shared or not; what is there is what the
ranks that use the disk have written::

    rank-00000-of-00002/  its three files
    rank-00001-of-00002/  its three files
    checkpoint.json       what the parts have in common, and which ranks there were

A replica's part has weights and optimizer too, though they are the same on all replicas: so every
rank goes on from its own disk alone, and keeps its own BatchNorm statistics.

The folder is written beside its name and moved into place when all ranks have written their parts;
what it replaces is deleted when it is in place everywhere. So whenever a process is killed, there
is a whole checkpoint, which loading finds. Loading reads and checks everything, on all ranks,
before it changes anything on any. One run at a time writes a folder. No rank waits for another
longer than ``timeout=`` of `mpcomp.pipeline`, also not for one that writes a large part to a slow
disk. `Checkpoints` has all this for a whole training loop.
"""

from mpcomp.checkpoint.finding import exists
from mpcomp.checkpoint.loading import load
from mpcomp.checkpoint.periodic import Checkpoints
from mpcomp.checkpoint.run_state import RunState
from mpcomp.checkpoint.saving import save

__all__ = ["Checkpoints", "RunState", "exists", "load", "save"]
