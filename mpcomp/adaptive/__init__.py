"""Compression ratios at cuts that follow what they cost and what they save: `Adaptive`.

method        the value that users write, and what it may hold
gains         how much of a tensor a ratio keeps
states        what a link has come to: the search of GraVAC's rule
budget        or its share of the bytes that a budget allows
adaptation    all links of a pipeline, told the same sums at the end of each step
losses        the gain that is measured by extra forward passes
"""
