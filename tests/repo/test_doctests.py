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


def test_examples():
    failed = [n for n in MODULES if doctest.testmod(importlib.import_module(n)).failed]
    assert not failed


def test_examples_are_found_and_a_wrong_one_fails():
    finder = doctest.DocTestFinder()
    modules = map(importlib.import_module, MODULES)
    assert sum(len(test.examples) for m in modules for test in finder.find(m)) > 40

    def wrong():
        """
        >>> 1 + 1
        3
        """

    (test,) = finder.find(wrong, "wrong", globs={})
    assert doctest.DocTestRunner(verbose=False).run(test, out=lambda _: None).failed
