"""Tests of the laboratory are slow ones: what it finds is on pages, not in what a user runs."""

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.slow)
