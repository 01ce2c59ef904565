"""Freezes what the server of test processes has loaded; to be preloaded last.

Ranks are forked from it: a collection that went over all of its modules would cost each of them the
time, and a copy of the memory. The coder's machine code is among it: a rank takes half a second to
load it.
"""

import gc

from coder import compile_coder

compile_coder()
gc.collect()
gc.freeze()
