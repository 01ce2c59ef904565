"""What studies of a grid have in common."""

import pytest

from mpcomp.links.build import method_of
from recipes.lab import (
    cifar10_study,
    finetune_study,
    gpt2_study,
    memory_length,
    sorting_study,
    topics_study,
    wikitext_study,
)

GRIDS = [
    *(cifar10_study, finetune_study, gpt2_study, memory_length, sorting_study, topics_study),
    wikitext_study,
]


@pytest.mark.parametrize("study", GRIDS, ids=lambda study: study.__name__.rpartition(".")[2])
def test_rows_are_methods_of_cuts(study):
    for row in study.ROWS.values():
        for argument, given in (("act_comp", row.act), ("grad_comp", row.grad)):
            for method in (given,) if isinstance(given, str) else given:
                method_of(argument, method)
