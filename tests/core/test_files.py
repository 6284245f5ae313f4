"""Files: what is written is read back, and what is wrong is named."""

import json
import random

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbpp.core import (
    Check,
    Costs,
    Pass,
    PassKind,
    Placement,
    RequestError,
    Schedule,
    ScheduleError,
    Step,
    parse_costs,
    parse_schedule,
    read_costs,
    read_schedule,
    schedule_text,
    write_costs,
    write_schedule,
)

F, B, W, BW = PassKind


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
    placement = Placement.single(2)
    rows = tuple((Pass(F, s, 0), Pass(BW, s, 0), Step(s)) for s in range(2))
    schedule = Schedule("1F1B", placement, 1, rows)
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
    costs = Costs(limit=100.0)
    assert parse_schedule(text, costs=costs).costs == costs
    with pytest.raises(ScheduleError, match="over the limit"):
        parse_schedule(text, costs=Costs(limit=0.01))


def test_errors_begin_with_the_file(tmp_path):
    missing = tmp_path / "absent.json"
    with pytest.raises(RequestError, match=f"^{missing}: cannot be read"):
        read_schedule(missing)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(RequestError, match=f"^{binary}: cannot be read"):
        read_costs(binary)


values = st.floats(1e-99, 1e6) | st.integers(0, 10**6)
per_chunk = values | st.lists(values, min_size=1, max_size=4).map(tuple)


@given(
    times=st.fixed_dictionaries(
        {},
        optional={
            k: per_chunk
            for k in ("f", "b", "w", "optimizer", "all_gather", "reduce_scatter")
        },
    ),
    comm=per_chunk,
    loss=values,
    splits=st.none() | st.lists(st.booleans(), max_size=3).map(tuple),
    reduction=st.none() | values,
    validation=values,
    limit=st.none() | per_chunk,
)
def test_costs_are_read_back_as_they_were(
    times, comm, loss, splits, reduction, validation, limit, tmp_path_factory
):
    path = tmp_path_factory.getbasetemp() / "costs.json"
    later = {"splits": splits, "reduction": reduction, "validation": validation}
    costs = Costs(**times, comm=comm, loss=loss, **later, m_b=2.0, limit=limit)
    write_costs(costs, path)
    assert read_costs(path) == costs


def test_keys_left_out_take_their_defaults():
    assert parse_costs("{}") == Costs()
    assert parse_costs('{"memory_limit": null}') == Costs()
    costs = parse_costs('{"f": [1, 2.5], "memory_limit": 8, "m_w": 0.366}')
    assert costs == Costs(f=(1, 2.5), m_w=0.366, limit=8)


def test_keys_that_say_nothing_new_are_left_out(tmp_path):
    """Files stay readable for those who know the first keys only."""
    write_costs(Costs(), tmp_path / "costs.json")
    keys = json.loads((tmp_path / "costs.json").read_text())
    assert set(keys) == {"f", "b", "w", "comm", "optimizer", "m_b", "m_w"}
    write_costs(Costs(loss=1, splits=(True,)), tmp_path / "costs.json")
    assert {"loss", "splits"} < set(json.loads((tmp_path / "costs.json").read_text()))
    write_costs(Costs(reduction=0), tmp_path / "costs.json")
    assert "reduction" in json.loads((tmp_path / "costs.json").read_text())


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "line 1, column 1: no JSON"),
        ('{"f": 1,}', "line 1, column 9: no JSON"),
        ("[1, 2]", "must hold one JSON object"),
        ('{"F": 1}', "unknown key 'F'; the keys are f, b, w, comm, optimizer, loss"),
        ('{"f": "1"}', "f is '1', not a number"),
        ('{"f": true}', "f is True, not a number"),
        ('{"f": [1, null]}', r"f\[1\] is None, not a number"),
        ('{"f": []}', r"f is \[\], not a number"),
        ('{"f": NaN}', "NaN is not a number that JSON knows"),
        ('{"w": -Infinity}', "-Infinity is not a number that JSON knows"),
        ('{"f": 1e999}', "f is inf; it must be finite"),
        ('{"b": -1}', "b is -1; it must be finite and at least 0"),
        ('{"comm": [1, "2"]}', r"comm\[1\] is '2', not a number"),
        ('{"comm": [1, -2]}', "comm is -2; it must be finite and at least 0"),
        ('{"loss": [1]}', "loss is a list; it must be one number"),
        ('{"reduction": [1]}', "reduction is a list; it must be one number"),
        ('{"reduction": -1}', "reduction is -1; it must be finite and at least 0"),
        ('{"validation": [1]}', "validation is a list; it must be one number"),
        ('{"validation": -1}', "validation is -1; it must be finite and at least 0"),
        ('{"loss": -1}', "loss is -1; it must be finite and at least 0"),
        ('{"splits": true}', "splits is True, not a list of true or false"),
        ('{"splits": [1, 0]}', r"splits is \[1, 0\], not a list of true or false"),
        ('{"memory_limit": -3}', "memory_limit is -3"),
        ('{"f": ' + "9" * 5000 + "}", "no usable JSON: "),
        ("[" * 10**5, "no usable JSON: "),
    ],
)
def test_wrong_costs_are_refused_by_key(text, named):
    with pytest.raises(RequestError, match=f"^my.json: .*{named}"):
        parse_costs(text, source="my.json")
