"""A script finds all names in `zbpp` and its public packages."""

import importlib
import inspect

import pytest

import zbpp

ROOMS = (
    "zbpp.core",
    "zbpp.schedules",
    "zbpp.simulator",
    *(
        pytest.param(name, marks=pytest.mark.needs("torch"))
        for name in ("zbpp", "zbpp.runtime")
    ),
)


@pytest.mark.parametrize("name", ROOMS)
def test_all_public_names_load_and_are_listed(name):
    module = importlib.import_module(name)
    assert set(module.__all__) <= set(dir(module))
    for inner in module.__all__:
        assert getattr(module, inner) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing


@pytest.mark.needs("torch")
def test_the_pipeline_has_twelve_parameters_and_no_ancestors():
    assert len(inspect.signature(zbpp.Pipeline).parameters) == 12
    assert zbpp.Pipeline.__mro__ == (zbpp.Pipeline, object)
