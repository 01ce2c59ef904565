"""The help of the recipes: options stand in groups that one can read at a glance."""

import argparse

import pytest

from recipes import cifar10, wikitext
from recipes.command import GROUPS

RECIPES = {"cifar10": cifar10, "wikitext": wikitext}
#: Options of a group.
MOST = 12


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_each_option_stands_in_a_small_group(recipe):
    parser = recipe._parser()
    found = {group.title: group._group_actions for group in parser._action_groups}
    options = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    grouped = [action for title in GROUPS for action in found[title]]
    assert sorted(map(id, options)) == sorted(map(id, grouped))
    assert {
        title: len(found[title]) for title in GROUPS if not 1 <= len(found[title]) <= MOST
    } == {}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_help_has_the_groups_in_their_order(recipe):
    lines = recipe._parser().format_help().splitlines()
    assert [line[:-1] for line in lines if line[:-1] in GROUPS] == list(GROUPS)
