"""A script finds what it needs in `zbpp` and in its rooms' own names."""

import importlib

import pytest

import zbpp

ROOMS = (
    "core",
    "schedules",
    "simulator",
    pytest.param("runtime", marks=pytest.mark.needs("torch")),
)


@pytest.mark.needs("torch")
def test_the_package_shows_its_names() -> None:
    assert {"Pipeline", "plan", *zbpp.__all__} <= set(dir(zbpp))
    for name in zbpp.__all__:
        assert getattr(zbpp, name) is not None


@pytest.mark.parametrize("room", ROOMS)
def test_all_names_of_a_room_load_and_show(room: str) -> None:
    module = importlib.import_module(f"zbpp.{room}")
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        assert getattr(module, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    for module in (zbpp, importlib.import_module("zbpp.runtime")):
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            _ = module.nothing
