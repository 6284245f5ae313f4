"""Files: what is written is read back, and what is wrong is named.

Schedules and costs that hypothesis makes, a table of mistakes for each kind of file,
and units of memory. Files that are changed at
random: `test_mangled_files.py`; wrong orders: `test_mutants.py`.
"""

import json
import random

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbpp.core import (
    Check,
    Costs,
    LayerCosts,
    Pass,
    PassKind,
    Placement,
    RequestError,
    Schedule,
    ScheduleError,
    Step,
    parse_costs,
    parse_layers,
    parse_memory,
    parse_schedule,
    read_costs,
    read_layers,
    read_schedule,
    schedule_text,
    write_costs,
    write_layers,
    write_schedule,
)
from zbpp.planning import plan

F, B, W, BW = PassKind


# --- schedules ------------------------------------------------------------------------


def random_schedule(seed: int) -> Schedule:
    """Build a schedule that is valid by construction: a random order of its graph.

    Any placement, B with W or BW pass by pass, with or without O and V.
    """
    rng = random.Random(seed)
    n_stages, m = rng.randint(1, 4), rng.randint(1, 5)
    stage_of = [*range(n_stages), *rng.choices(range(n_stages), k=rng.randint(0, 4))]
    rng.shuffle(stage_of)
    before = nx.DiGraph()
    for i in range(m):
        path = [Pass(F, chunk, i) for chunk in range(len(stage_of))]
        for chunk in reversed(range(len(stage_of))):
            path.append(Pass(rng.choice([B, BW]), chunk, i))
            if path[-1].kind is B:
                before.add_edge(path[-1], Pass(W, chunk, i))
        nx.add_path(before, path)
    orders: list[list] = [[] for _ in range(n_stages)]
    for job in nx.lexicographical_topological_sort(before, lambda _: rng.random()):
        orders[stage_of[job.chunk]].append(job)
    if rng.random() < 0.5:
        for stage, order in enumerate(orders):
            order.append(Step(stage))
    if rng.random() < 0.5:
        for stage, order in enumerate(orders):
            kinds = [getattr(job, "kind", None) for job in order]
            n_warm_up = next(i for i, kind in enumerate(kinds) if kind in (B, BW))
            order.insert(rng.randint(0, n_warm_up), Check(stage))
    return Schedule(
        f"random {seed}", Placement(tuple(stage_of)), m, tuple(map(tuple, orders))
    )


@given(seed=st.integers(0, 2**32))
def test_any_valid_schedule_is_accepted_and_read_back_as_it_was(seed):
    schedule = random_schedule(seed)
    assert parse_schedule(schedule_text(schedule)) == schedule


def test_random_schedules_are_of_all_sorts():
    texts = [schedule_text(random_schedule(seed)) for seed in range(60)]
    for part in ('"O"', '"V"', "BW0", "0B0", '"n_stages": 1', '"n_stages": 4'):
        assert 0 < sum(part in text for text in texts) < len(texts), part


def test_schedule_file_has_the_fixed_format(tmp_path):
    rows = tuple((Pass(F, s, 0), Pass(BW, s, 0), Step(s)) for s in range(2))
    schedule = Schedule("1F1B", Placement.single(2), 1, rows)
    write_schedule(schedule, tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text()) == {
        "format": "zbpp-schedule",
        "version": 1,
        "mode": "1F1B",
        "n_stages": 2,
        "n_microbatches": 1,
        "placement": [0, 1],
        "jobs": [["0F0", "0BW0", "O"], ["1F0", "1BW0", "O"]],
    }
    assert read_schedule(tmp_path / "plan.json") == schedule


def test_a_schedule_is_read_with_a_memory_limit():
    text = schedule_text(random_schedule(3))
    costs = Costs(memory_limit=100.0)
    assert parse_schedule(text, costs=costs).costs == costs
    with pytest.raises(ScheduleError, match="over the limit"):
        parse_schedule(text, costs=Costs(memory_limit=0.01))


BASE = json.loads(schedule_text(plan("FThenB", n_stages=4, n_microbatches=5)))
WRONG_KEYS = [
    *(({key: value}, key) for key in BASE for value in (None, {})),
    *(
        ({key: value}, key)
        for key in ("n_stages", "n_microbatches")
        for value in (-1, 0, 2.0, "2", True, [2])
    ),
    ({"format": "plan"}, "format 'plan'"),
    ({"version": 2}, "version 2"),
    ({"n_stages": 5}, "n_stages is"),
    ({"n_stages": 3}, "n_stages is"),
    ({"n_microbatches": 6}, "row 0, column"),
    ({"n_microbatches": 4}, "row 0, column"),
    ({"placement": []}, "placement"),
    ({"placement": [0, 1, 3, 4]}, "placement"),
    ({"placement": [-1, 0, 1, 2]}, r"placement\[0\] is -1"),
    ({"placement": ["0", 1, 2, 3]}, r"placement\[0\] is '0'"),
    ({"placement": [0, 10**15]}, "placement"),
    ({"placement": [0, 1, 2, 3, 3]}, "row 3, column"),
    ({"placement": [1, 0, 2, 3]}, "row 0, column 0"),
    ({"jobs": []}, "0 rows of jobs for 4 stages"),
    ({"jobs": BASE["jobs"][:-1]}, "3 rows of jobs for 4 stages"),
    ({"jobs": [*BASE["jobs"], []]}, "5 rows of jobs for 4 stages"),
    ({"jobs": BASE["jobs"][::-1]}, "row 0, column 0"),
    ({"jobs": ["0F0,0BW0"] * 4}, "jobs is not a list of rows"),
    ({"stages": 4}, "unknown key 'stages'; the keys are format"),
]


@pytest.mark.parametrize(("change", "named"), WRONG_KEYS)
def test_a_wrong_key_of_a_schedule_is_named(change, named):
    with pytest.raises(RequestError, match=f"^my.json: (.|\n)*{named}"):
        parse_schedule(json.dumps(BASE | change), source="my.json")
    parse_schedule(json.dumps(BASE))


@pytest.mark.parametrize("key", BASE)
def test_a_missing_key_of_a_schedule_is_named(key):
    text = json.dumps({k: v for k, v in BASE.items() if k != key})
    with pytest.raises(RequestError, match=f"the key '{key}' is missing"):
        parse_schedule(text)


def test_broken_json_is_located():
    text = schedule_text(plan("ZBH1", n_stages=2, n_microbatches=2))
    for end in range(0, len(text.rstrip()), 7):
        with pytest.raises(RequestError, match=r"line \d+, column \d+: no JSON"):
            parse_schedule(text[:end])


def test_errors_begin_with_the_file(tmp_path):
    missing = tmp_path / "absent.json"
    with pytest.raises(RequestError, match=f"^{missing}: cannot be read"):
        read_schedule(missing)
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
    splits=st.none() | st.lists(st.booleans(), max_size=3).map(tuple),
    reduction=st.none() | values,
    validation=values,
    memory_limit=st.none() | per_chunk,
)
def test_costs_are_read_back_as_they_were(lists, tmp_path_factory, **others):
    path = tmp_path_factory.getbasetemp() / "costs.json"
    costs = Costs(**lists, **others, m_b=2.0)
    write_costs(costs, path)
    assert read_costs(path) == costs


def test_keys_left_out_take_their_defaults_and_those_are_left_out(tmp_path):
    """Files stay readable for those who know the first keys only."""
    assert parse_costs("{}") == Costs() == parse_costs('{"memory_limit": null}')
    costs = parse_costs('{"f": [1, 2.5], "memory_limit": 8, "m_w": 0.366}')
    assert costs == Costs(f=(1, 2.5), m_w=0.366, memory_limit=8)
    first = {"f", "b", "w", "comm", "optimizer", "m_b", "m_w"}
    for more in ({}, {"loss": 1, "splits": (True,)}, {"reduction": 0}):
        write_costs(Costs(**more), tmp_path / "costs.json")
        keys = json.loads((tmp_path / "costs.json").read_text())
        assert set(keys) == first | set(more)


def test_a_layers_file_comes_back_as_it_was(tmp_path):
    path = tmp_path / "layers.json"
    layers = LayerCosts(4, f=(1.0, 2.0, 3.0, 4.0), m_r=1.0, pass_f=0.5, all_gather=2.0)
    write_layers(layers, path)
    assert read_layers(path) == layers
    assert parse_layers('{"f": [1, 2, 3], "memory_limit": "2KiB"}').memory_limit == 2048


NOT_READ = ("loss", "reduction", "validation")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "line 1, column 1: no JSON"),
        ('{"f": 1,}', r"line 1, column [89]: no JSON"),  # 3.13 points at the comma
        ("[1, 2]", "must hold one JSON object"),
        ('{"F": 1}', "unknown key 'F'; the keys are f, b, w, comm, optimizer, loss"),
        ('{"f": "1"}', "f is '1', not a number"),
        ('{"f": true}', "f is True, not a number"),
        ('{"f": [1, null]}', r"f\[1\] is None, not a number"),
        ('{"f": []}', r"f is \[\], not a number"),
        ('{"f": NaN}', "NaN is not a number that JSON knows"),
        ('{"w": -Infinity}', "-Infinity is not a number that JSON knows"),
        ('{"f": 1e999}', "f is inf; it must be finite"),
        ('{"f": 1' + "0" * 400 + "}", r"f is .*(must be finite|at most 1e\+100)"),
        ('{"comm": [1, -2]}', "comm is -2; it must be finite and at least 0"),
        *(
            (f'{{"{x}": [1]}}', f"{x} is a list; it must be one number")
            for x in NOT_READ
        ),
        *((f'{{"{x}": -1}}', f"{x} is -1; it must be finite") for x in NOT_READ),
        ('{"splits": true}', "splits is True, not a list of true or false"),
        ('{"splits": [1, 0]}', r"splits is \[1, 0\], not a list of true or false"),
        ('{"memory_limit": -3}', "memory_limit is -3"),
        ('{"f": ' + "9" * 5000 + "}", "no usable JSON: "),
        ("[" * 10**5, "no usable JSON: "),
        ('{"version": 1}', "unknown key 'version'"),
    ],
)
def test_wrong_costs_are_refused_by_key(text, named):
    with pytest.raises(RequestError, match=f"^my.json: .*{named}"):
        parse_costs(text, source="my.json")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"f": [1, 2, 3], "pass_b": [1, 2, 3]}', "pass_b is a list"),
        ('{"f": [1, 2, 3], "m_b": [1, 2]}', "m_b has 2 entries for 3 layers"),
        ('{"f": 1}', "n_layers is missing, and there is no list to tell it by"),
        ('{"n_layers": 2, "version": 1}', "unknown key 'version'"),
    ],
)
def test_wrong_layers_are_refused_by_key(text, named):
    with pytest.raises(RequestError, match=f"^layers: .*{named}"):
        parse_layers(text)


# --- units ----------------------------------------------------------------------------


def both(**data: object) -> tuple[Costs, LayerCosts]:
    """Costs of chunks and of layers that have the same columns."""
    layers = json.dumps({"n_layers": 2, **data})
    return parse_costs(json.dumps(data)), parse_layers(layers)


def test_a_text_with_a_unit_is_a_number_of_bytes():
    assert [parse_memory(x) for x in ("1.5", "2KiB", "2 kB")] == [1.5, 2048, 2000]
    for costs in both(m_b="20kB", m_w=8000, memory_limit="16GiB"):
        assert (costs.m_b, costs.m_w, costs.memory_limit) == (20000, 8000, 2.0**34)


@pytest.mark.parametrize("limit", ["16GiB", 2**34, ["1MiB", "16GiB"]])
def test_a_limit_of_bytes_is_refused_for_memories_that_are_none(limit):
    in_m_b = {"m_b": [1, 2], "m_w": 0.5, "m_fixed": 1000, "memory_limit": limit}
    for parse, data in ((parse_costs, in_m_b), (parse_layers, in_m_b)):
        with pytest.raises(
            RequestError, match="but the largest memory of the costs is"
        ):
            parse(json.dumps(data))
        parse(json.dumps(data | {"m_fixed": 1024}))  # the control: bytes of a tiny one
        parse(json.dumps(data | {"memory_limit": 1000}))
