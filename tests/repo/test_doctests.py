"""Every example in a docstring runs; modules are found by import name, not by path."""

import doctest
import importlib
import pkgutil

import pytest

PACKAGES = ("zbpp", "zbpp.core", "zbpp.schedules", "zbpp.simulator")
MODULES = sorted(
    f"{package}.{module.name}"
    for package in PACKAGES
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__)
    if not module.ispkg and module.name != "__main__"
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_examples_are_found_and_a_wrong_one_fails():
    finder = doctest.DocTestFinder()
    modules = map(importlib.import_module, MODULES)
    assert sum(len(test.examples) for m in modules for test in finder.find(m)) > 5

    def wrong():
        """
        >>> 1 + 1
        3
        """

    (test,) = finder.find(wrong, "wrong", globs={})
    assert doctest.DocTestRunner(verbose=False).run(test, out=lambda _: None).failed
