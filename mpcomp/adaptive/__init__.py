"""Compression ratios that follow what they cost and what they save: GraVAC's search, `Adaptive`.

search        the rule of GraVAC, for links at cuts here and for replicas in `mpcomp.data_parallel`
clock         the time of a step that it decides by, measured or modelled
method        `Adaptive`, the value that users write, and what it may hold
gains         how much of a tensor a ratio keeps
states        what a link has come to: the search of GraVAC's rule
budget        or its share of the bytes that a budget allows
adaptation    all links of a pipeline, told the same sums at the end of each step
losses        the gain that is measured by extra forward passes
"""
