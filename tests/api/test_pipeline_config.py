"""Arguments of `mpcomp.pipeline` and the configuration they become are the same things."""

import dataclasses
import inspect
from typing import get_type_hints

import pytest

import mpcomp
from mpcomp.api.config import PipelineConfig

PARAMETERS = dict(inspect.signature(mpcomp.pipeline).parameters)
del PARAMETERS["model"]
FIELDS = {field.name: field for field in dataclasses.fields(PipelineConfig)}


def config(**given):
    defaults = {
        name: parameter.default
        for name, parameter in PARAMETERS.items()
        if parameter.default is not inspect.Parameter.empty
    }
    return PipelineConfig(**{"chunks": 2, **defaults, **given})


def test_each_argument_is_a_field():
    assert list(PARAMETERS) == list(FIELDS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_each_argument_is_documented(name):
    assert f"\n        {name}: " in mpcomp.pipeline.__doc__


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_is_compared_over_ranks_or_says_why_not(name):
    """An option that is added is thought about: ranks that differ in it must not begin."""
    about = FIELDS[name].metadata
    assert ("same" in about) != bool(about.get("of_rank"))


@pytest.mark.parametrize("name", sorted({*PARAMETERS} - {"param_comp"}))  # a spec, read later
def test_types_are_the_same(name):
    assert get_type_hints(mpcomp.pipeline)[name] == get_type_hints(PipelineConfig)[name]


def test_what_ranks_compare():
    compared = config(dp_comp="topk:0.10", replicas=2).compared()
    assert compared["dp_comp"] == "topk:0.1"  # the method, however it was written
    assert compared["loss"] == "NoneType" and compared["loss scaler"] is False
    assert compared.keys() == {
        FIELDS[name].metadata["name"] or name for name in FIELDS if "same" in FIELDS[name].metadata
    }
