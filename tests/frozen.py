"""Freezes what the server of test processes has loaded; to be preloaded last.

Ranks are forked from it: a collection that went over all of its modules would cost each of them the
time, and a copy of the memory.
"""

import gc

gc.collect()
gc.freeze()
