"""Freezes what the server of test processes has loaded; to be preloaded last.

Ranks are forked from it: a collection that went over all of its modules would cost each of them the
time, and a copy of the memory. The coder's machine code is among it, which a rank takes half a
second to load, and the shapes of `runs`, if a test has it preloaded.
"""

import gc
import sys

from mpcomp.compressors.compiling import compile_coder

compile_coder()
if "runs" in sys.modules:
    sys.modules["runs"].infer_shapes()
gc.collect()
gc.freeze()
