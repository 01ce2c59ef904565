"""Compression ratios that follow what they cost and what they save: GraVAC's search, `Adaptive`.

search        the rule of GraVAC, for links at cuts here and for replicas in `mpcomp.data_parallel`
clock         the time of a step that it decides by, measured or modelled
method        `Adaptive`, the value that users write, and what it may hold
gain          the energy that a ratio keeps of a tensor
link_policy   the state of a link: the search of GraVAC's rule
budget        or its share of the bytes that a budget allows

All links of a pipeline are told the same sums at the end of each step in
`mpcomp.links.adaptation`.
"""
