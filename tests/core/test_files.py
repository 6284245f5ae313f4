"""Files of costs and layers: what is written is read back, what is wrong is named."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbpp.core import (
    Costs,
    LayerCosts,
    RequestError,
    parse_memory,
    read_costs,
    read_layers,
    write_costs,
)
from zbpp.planning import read_plan


def test_errors_begin_with_the_file(tmp_path):
    missing = tmp_path / "absent.json"
    with pytest.raises(RequestError, match=f"^{missing}: cannot be read"):
        read_plan(missing)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(RequestError, match=f"^{binary}: cannot be read"):
        read_costs(binary)


# --- costs ----------------------------------------------------------------------------

values = st.floats(1e-99, 1e6) | st.integers(0, 10**6)
per_chunk = values | st.lists(values, min_size=1, max_size=4).map(tuple)
PER_CHUNK = ("f", "b", "w", "comm", "optimizer", "all_gather", "reduce_scatter")


@given(
    lists=st.fixed_dictionaries({}, optional=dict.fromkeys(PER_CHUNK, per_chunk)),
    loss=values,
    splits=st.none() | st.lists(st.booleans(), min_size=1, max_size=3).map(tuple),
    reduction=st.none() | values,
    validation=values,
    memory_limit=st.none() | per_chunk,
    speed=st.none() | st.floats(0.1, 10),
)
def test_costs_are_read_back_unchanged(lists, tmp_path_factory, **others):
    path = tmp_path_factory.getbasetemp() / "costs.json"
    costs = Costs(**lists, **others, m_b=2.0)
    write_costs(costs, path)
    assert read_costs(path) == costs


def test_missing_keys_are_defaults_and_defaults_are_not_written(tmp_path):
    """Files stay readable for those who know the first keys only."""
    assert read_costs({}) == Costs() == read_costs({"memory_limit": None})
    costs = read_costs({"f": [1, 2.5], "memory_limit": 8, "m_w": 0.366})
    assert costs == Costs(f=(1, 2.5), m_w=0.366, memory_limit=8)
    first = {"f", "b", "w", "comm", "optimizer", "m_b", "m_w"}
    for more in ({}, {"loss": 1, "splits": (True,)}, {"reduction": 0}):
        write_costs(Costs(**more), tmp_path / "costs.json")
        keys = json.loads((tmp_path / "costs.json").read_text())
        assert set(keys) == first | set(more)


def test_a_layers_file_is_read_back_unchanged(tmp_path):
    path = tmp_path / "layers.json"
    layers = LayerCosts(4, f=(1.0, 2.0, 3.0, 4.0), m_r=1.0, pass_f=0.5, all_gather=2.0)
    write_costs(layers, path)
    assert read_layers(path) == layers
    assert read_layers({"n_layers": 3, "memory_limit": "2KiB"}).memory_limit == 2048


NOT_READ = ("loss", "reduction", "validation")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "line 1, column 1: no JSON"),
        ('{"f": 1,}', r"line 1, column [89]: no JSON"),  # 3.13 points at the comma
        ("[1, 2]", "must contain one JSON object"),
        ('{"F": 1}', "unknown key 'F'; the keys are f, b, w, comm, optimizer, loss"),
        ('{"f": "1"}', "f is '1', not a number"),
        ('{"f": true}', "f is True, not a number"),
        ('{"f": [1, null]}', r"f\[1\] is None, not a number"),
        ('{"f": NaN}', "NaN is not a number that JSON knows"),
        ('{"f": 1' + "0" * 400 + "}", r"f is .*(must be finite|at most 1e\+100)"),
        ('{"comm": [1, -2]}', r"comm\[1\] is -2; it must be finite and at least 0"),
        *(
            (f'{{"{x}": [1]}}', f"{x} is a list; it must be one number")
            for x in NOT_READ
        ),
        ('{"splits": [1, 0]}', r"splits\[0\] is 1, not true or false"),
        ('{"memory_limit": -3}', "memory_limit is -3"),
        ('{"f": ' + "9" * 5000 + "}", "no usable JSON: "),
        ('{"version": 1}', "unknown key 'version'"),
    ],
)
def test_wrong_costs_are_refused_by_key(text, named, tmp_path):
    (path := tmp_path / "my.json").write_text(text)
    with pytest.raises(RequestError, match=f"^{path}: .*{named}"):
        read_costs(path)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"n_layers": 3, "pass_b": [1, 2, 3]}', "pass_b is a list"),
        ('{"n_layers": 3, "m_b": [1, 2]}', "m_b has 2 entries for 3 layers"),
        ('{"f": 1}', "n_layers is missing"),
        ('{"n_layers": 2, "version": 1}', "unknown key 'version'"),
    ],
)
def test_wrong_layers_are_refused_by_key(text, named):
    with pytest.raises(RequestError, match=f"^layers: .*{named}"):
        read_layers(json.loads(text))


# --- units ----------------------------------------------------------------------------


def both(**data: object) -> tuple[Costs, LayerCosts]:
    """Costs of chunks and of layers that have the same columns."""
    return read_costs(data), read_layers({"n_layers": 2, **data})


def test_a_text_with_a_unit_is_a_number_of_bytes():
    assert [parse_memory(x) for x in ("1.5", "2KiB", "2 kB")] == [1.5, 2048, 2000]
    for costs in both(m_b="20kB", m_w=8000, memory_limit="16GiB"):
        assert (costs.m_b, costs.m_w, costs.memory_limit) == (20000, 8000, 2.0**34)
