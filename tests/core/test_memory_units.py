"""A limit in bytes goes with memories in bytes; nothing is guessed in silence."""

import json

import pytest

from zbpp.core import (
    Costs,
    LayerCosts,
    RequestError,
    parse_costs,
    parse_layers,
    parse_memory,
    read_costs,
    read_layers,
    write_costs,
    write_layers,
)
from zbpp.core.costs.units import check_unit, with_limit

LIMIT = parse_memory("16GiB")
SMALL = {"m_b": 20000, "m_w": 8000}
"""Bytes of a tiny model, or megabytes of a large one."""


def costs(**data: object) -> Costs:
    return parse_costs(json.dumps(data))


@pytest.mark.parametrize(
    "said",
    [
        {**SMALL, "memory_unit": "bytes"},
        {"m_b": "20kB", "m_w": 8000},
        {"m_b": 2**21, "m_w": 1},  # as files before the key: version 1
        {"version": 2, "time_unit": "ms", "m_b": "20kB"},
    ],
)
def test_memories_in_bytes_take_a_limit_in_bytes(said: dict[str, object]) -> None:
    assert with_limit(costs(**said), LIMIT).limit == 2.0**34
    layers = parse_layers(json.dumps({"n_layers": 2, **said}))
    assert with_limit(layers, LIMIT).limit == 2.0**34


def test_version_2_is_not_read_by_the_size_of_its_numbers() -> None:
    numbers = {"version": 2, "time_unit": "ms", "m_b": 2**21}
    for held in (
        costs(**numbers),
        parse_layers(json.dumps({"n_layers": 2, **numbers})),
    ):
        with pytest.raises(RequestError, match='add "memory_unit": "bytes" to the'):
            with_limit(held, LIMIT)


def test_a_unit_of_time_makes_a_file_of_version_2(tmp_path) -> None:
    path = tmp_path / "costs.json"
    for unit, version in ((None, None), ("ms", 2)):
        write_costs(Costs(f=2.0, time_unit=unit), path)
        assert json.loads(path.read_text()).get("version") == version
        assert read_costs(path).time_unit == unit
        write_layers(LayerCosts(n_layers=2, time_unit=unit), path)
        assert json.loads(path.read_text()).get("version") == version
        assert read_layers(path).time_unit == unit


@pytest.mark.parametrize(
    "wrong, named",
    [
        ({"version": 3}, "version is 3; zbpp reads 1 and 2"),
        ({"version": 2}, "time_unit is missing; version 2 names it"),
        ({"time_unit": 5}, "time_unit is 5, not a text"),
    ],
)
def test_a_wrong_version_or_unit_is_named(wrong, named) -> None:
    with pytest.raises(RequestError, match=f"^my.json: {named}"):
        parse_costs(json.dumps(wrong), source="my.json")


def test_a_limit_in_bytes_is_refused_where_the_unit_is_not_known() -> None:
    for held in (costs(**SMALL), parse_layers(json.dumps({"n_layers": 2, **SMALL}))):
        with pytest.raises(RequestError, match='add "memory_unit": "bytes" to the'):
            with_limit(held, LIMIT)
        assert with_limit(held, 2.0**34).limit == 2.0**34, "a number has their unit"
    own = costs(**SMALL, memory_limit="16GiB")
    with pytest.raises(RequestError, match=r"memory_limit is 16\.0 GiB, but nothing"):
        with_limit(own, None)
    assert with_limit(costs(**SMALL, memory_limit=1e30), None).limit == 1e30


def test_a_number_beyond_any_use_is_taken_for_bytes_and_refused() -> None:
    with pytest.raises(RequestError, match="largest is 1;"):
        check_unit(Costs(limit=2.0**34))
    check_unit(Costs(limit=2.0**34, m_b=2.0**18))  # the control: kilobytes


def test_the_unit_is_written_and_read(tmp_path) -> None:
    told, untold = costs(**SMALL, memory_unit="bytes"), costs(**SMALL)
    for memory in (told, untold):
        write_costs(memory, tmp_path / "costs.json")
        text = (tmp_path / "costs.json").read_text()
        assert parse_costs(text) == memory
        assert ("memory_unit" in text) == (memory is told)
    layers = parse_layers(json.dumps({"n_layers": 2, "m_b": "1GiB"}))
    write_layers(layers, tmp_path / "layers.json")
    assert parse_layers((tmp_path / "layers.json").read_text()) == layers
    for parse in (parse_costs, parse_layers):
        with pytest.raises(RequestError, match="memory_unit is 'GB'; write 'bytes'"):
            parse(
                '{"n_layers": 2, "memory_unit": "GB"}'.replace(
                    '"n_layers": 2, ' if parse is parse_costs else "\0", ""
                )
            )
