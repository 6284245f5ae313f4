"""Every example in a docstring runs; modules are found by import name, not by path."""

import doctest
import importlib.util
import pkgutil

import pytest

import zbpp

pytestmark = pytest.mark.needs("torch")

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(zbpp.__path__, "zbpp.")
    if ">>>" in importlib.util.find_spec(module.name).loader.get_source(module.name)
)
"""Every module that has an example; others, some with dear imports, are left alone."""


def test_examples_run():
    finder, n_examples = doctest.DocTestFinder(), 0
    for module in map(importlib.import_module, MODULES):
        assert not doctest.testmod(module).failed, module
        n_examples += sum(len(test.examples) for test in finder.find(module))
    assert n_examples > 40
