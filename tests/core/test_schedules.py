"""Rules of a schedule: a table of mistakes, and an oracle for orders changed at random.

The oracle is the judge of plans (tests/support/judge.py), which replays the jobs.
"""

import json
import random
import re
from collections import Counter
from textwrap import dedent

import pytest
from judge import judge

from zbpp.core import (
    Pass,
    PassKind,
    Placement,
    RequestError,
    Schedule,
    ScheduleError,
    Step,
    even_split,
    parse_job,
    parse_schedule,
    schedule_text,
    write_schedule,
)
from zbpp.planning import plan, read_plan

F, B, W, BW = PassKind


def orders_of(*rows: str) -> tuple:
    return tuple(
        tuple(parse_job(cell, stage=stage) for cell in row.split())
        for stage, row in enumerate(rows)
    )


def build(*rows: str, stage_of=None, m: int = 1) -> Schedule:
    placement = Placement(stage_of or tuple(range(len(rows))))
    return Schedule("built", placement, m, orders_of(*rows))


GOOD = ("0F0 0F1 0BW0 0BW1 O", "1F0 1B0 1F1 1W0 1BW1 O")
SHARDED = (
    "0UNSHARD 0F0 V 0B0 0RESHARD 0W0 0REDUCE_GRAD 0REDUCE_WAIT O",
    "1UNSHARD 1F0 V 1BW0 1REDUCE_GRAD 1RESHARD 1REDUCE_WAIT O",
)

# Two lines a case: the rows ("." is the good one), then row, column and reason.
OF_PASSES = """
0F0 0F1 2F0 | .
0 2 2F0: the chunks are 0 to 1
0F0 0F1 0F2 0BW0 | .
0 2 0F2: the micro-batches are 0 to 1
. | 1F0 1B0 0F1
1 2 0F1 is on stage 1, but chunk 0 is on stage 0; move it there
0F0 0F1 0F0 0BW0 0BW1 O | .
0 2 0F0 repeats 0F0 of column 0; remove one
. | 1F0 1B0 1F1 1BW0 1BW1
1 3 1BW0 repeats 1B0 of column 1
. | 1F0 1BW0 1F1 1B0 1BW1
1 3 1B0 repeats 1BW0 of column 1
. | 1F0 1BW0 1F1 1W0 1BW1
1 3 1W0 repeats 1BW0 of column 1
0BW0 0F0 0F1 0BW1 O | .
0 0 0BW0 comes before 0F0; swap them
. | 1F0 1W0 1B0 1F1 1BW1 O
1 1 1W0 comes before 1B0; swap them
0F0 0BW0 O | .
0 3 0F1 is missing
0F0 0F1 0BW0 O | .
0 4 0B1 is missing
. | 1F0 1B0 1F1 1BW1 O
1 5 1W0 is missing
0F0 0F1 0BW0 O 0BW1 | .
0 4 0BW1 comes after O; the optimizer step must be the last job
0F0 0F1 0BW0 0BW1 O O | .
0 5 O repeats O of column 4
. | 1F0 1B0 1F1 1W0 1BW1
1 5 O is missing, though stage 0 has one
0F0 0F1 0BW0 V 0BW1 | V 1F0 1BW0 1F1 1BW1
0 3 V must come before the first backward pass
V 0F0 0F1 0BW0 0BW1 | 1F0 1BW0 1F1 1BW1
1 4 V is missing, though stage 0 has one
0F0 0BW0 0F1 0BW1 | 1F0 1F1 1BW0 1BW1
0 1 deadlock: stage 0 waits at 0BW0 for 1BW0, stage 1 waits at 1F1 for 0F1; no stage
"""
OF_COLLECTIVES = """
. | 1F0 1UNSHARD V 1BW0 1REDUCE_GRAD 1REDUCE_WAIT O
1 0 1F0 needs the gathered parameters of chunk 1; put 1UNSHARD before it
. | 1UNSHARD 1F0 1RESHARD V 1BW0 1REDUCE_GRAD 1REDUCE_WAIT O
1 4 1BW0 needs the gathered parameters
. | 1UNSHARD 1F0 1UNSHARD V 1BW0 O
1 2 1UNSHARD comes after 1UNSHARD without 1RESHARD between
. | 1UNSHARD 1F0 V 1BW0 1RESHARD 1RESHARD O
1 5 1RESHARD needs the gathered parameters
. | 1UNSHARD 1F0 1REDUCE_GRAD V 1BW0 O
1 2 1REDUCE_GRAD needs the gradients of chunk 1; put 1W or 1BW before it
. | 1UNSHARD 1F0 V 1BW0 1REDUCE_GRAD 1REDUCE_WAIT 1REDUCE_GRAD 1REDUCE_WAIT O
1 6 1REDUCE_GRAD needs the gradients
. | 1UNSHARD 1F0 V 1B0 1W0 1REDUCE_GRAD 1REDUCE_GRAD 1REDUCE_WAIT O
1 6 1REDUCE_GRAD needs the gradients
. | 1UNSHARD 1F0 V 1BW0 1REDUCE_WAIT 1REDUCE_GRAD O
1 4 1REDUCE_WAIT needs the sum of gradients of chunk 1; put 1REDUCE_GRAD
. | 1UNSHARD 1F0 V 1BW0 1REDUCE_GRAD O
1 5 1REDUCE_WAIT is missing after 1REDUCE_GRAD
. | 1UNSHARD 1F0 V 1BW0 O
1 5 1REDUCE_GRAD is missing, though chunk 0 has one
. | 1F0 V 1BW0 1REDUCE_GRAD 1REDUCE_WAIT O
1 6 1UNSHARD is missing, though chunk 0 has one
. | 1UNSHARD 1F0 V 1BW0 1REDUCE_GRAD 1REDUCE_WAIT O 1RESHARD
1 7 1RESHARD comes after O
. | 1UNSHARD 1F0 V 0UNSHARD 1BW0 1REDUCE_GRAD 1REDUCE_WAIT O
1 3 0UNSHARD is on stage 1, but chunk 0 is on stage 0; move it there
. | 2UNSHARD 1F0 V 1BW0 O
1 0 2UNSHARD: the chunks are 0 to 1
"""


def cases(text: str, good: tuple[str, str], m: int):
    lines = text.strip().splitlines()
    for rows, place in zip(lines[::2], lines[1::2], strict=True):
        row, column, reason = place.split(maxsplit=2)
        both = zip(rows.split(" | "), good, strict=True)
        orders = [right if given == "." else given for given, right in both]
        yield pytest.param(orders, m, int(row), int(column), reason, id=reason[:40])


@pytest.mark.parametrize(
    ("rows", "m", "row", "column", "reason"),
    [*cases(OF_PASSES, GOOD, 2), *cases(OF_COLLECTIVES, SHARDED, 1)],
)
def test_a_mistake_is_named_and_marked(rows, m, row, column, reason):
    with pytest.raises(ScheduleError) as error:
        build(*rows, m=m)
    first, *picture = str(error.value).splitlines()
    assert first.startswith(f"row {row}, column {column} (counted from 0): {reason}")
    marked, cells = picture[row + 1], rows[row].split()
    at = marked.index("^")
    assert marked.strip(" ^") == "here"
    if column < len(cells):
        assert picture[row][at:].split()[0] == cells[column]
    else:
        assert len(picture[row]) <= at


def test_corrected_twins_of_wrong_orders_are_accepted():
    assert build(*GOOD, m=2).n_stages == 2
    assert build(*SHARDED).orders == orders_of(*SHARDED)


def test_the_whole_error_message():
    with pytest.raises(ScheduleError) as error:
        build("0F0 0BW0 0F1 0BW1", "1F0 1BW0 1BW1 1F1", m=2)
    assert str(error.value) == dedent("""\
        row 1, column 2 (counted from 0): 1BW1 comes before 1F1; swap them
        stage 0 | 0F0  0BW0 0F1  0BW1
        stage 1 | 1F0  1BW0 1BW1 1F1
                            ^^^^ here""")


def test_counts_are_checked_first():
    with pytest.raises(RequestError, match="n_microbatches is 0; it must be at least"):
        build("", m=0)
    with pytest.raises(RequestError, match="1 rows of jobs for 2 stages"):
        build("0F0 0BW0", stage_of=(0, 1))


def test_gradients_are_summed_after_the_last_w():
    row, sums = "0F0 0F1 0B0 0B1 0W1 {} 0W0 {} O", "0REDUCE_GRAD 0REDUCE_WAIT"
    build(row.format("", sums), m=2)
    build(row.format(sums, sums), m=2)
    with pytest.raises(ScheduleError, match=r"0REDUCE_GRAD is missing after 0W0"):
        build(row.format(sums, ""), m=2)
    with pytest.raises(ScheduleError, match="without 0REDUCE_WAIT between"):
        build(row.format("0REDUCE_GRAD", sums), m=2)


@pytest.mark.parametrize("stage_of", [(), (1,), (0, 2), (-1, 0), (0, 10**12)])
def test_a_stage_without_a_chunk_is_refused(stage_of):
    with pytest.raises(RequestError, match="must have at least one chunk") as error:
        Placement(stage_of)
    assert str(list(stage_of)) in str(error.value)
    Placement((0, 1, 0))  # stages may hold different numbers


def test_the_three_placements():
    assert Placement.single(4).stage_of == (0, 1, 2, 3)
    assert Placement.interleaved(3, 2).stage_of == (0, 1, 2, 0, 1, 2)
    assert Placement.wave(3).stage_of == (0, 1, 2, 2, 1, 0)
    assert Placement.wave(2, 3).stage_of == (0, 1, 1, 0, 0, 1)
    assert Placement.wave(2, 3).chunks_of == ((0, 3, 4), (1, 2, 5))


# --- orders changed at random ---------------------------------------------------------

CELL = re.compile("(0|[1-9][0-9]*)(F|BW|B|W)(0|[1-9][0-9]*)")


def is_valid(data: dict) -> bool:
    """Judge the jobs of a file whose keys and types are right."""
    rows = data["jobs"]
    if any(len({cell in row for row in rows}) > 1 for cell in ("O", "V")):
        return False
    try:
        judge(data, {})
    except ValueError:
        return False
    return all(map(_tidy, rows))


def _tidy(row: list[str]) -> bool:
    """O once and last; V once and before all but F."""
    first_back = next((k for k, cell in enumerate(row) if re.search("B|W", cell)), 0)
    return ("O" not in row[:-1]) and (
        "V" not in row or (row.count("V") == 1 and row.index("V") < first_back)
    )


def spoilt(data: dict, rng: random.Random) -> dict:
    """Drop, double or move a cell, or exchange two micro-batches."""
    data = json.loads(json.dumps(data))
    row = rng.choice([row for row in data["jobs"] if row])
    column = rng.randrange(len(row))
    match rng.choice(("drop", "double", "move", "swap", "later", "exchange")):
        case "drop":
            del row[column]
        case "double":
            row.insert(rng.randint(0, len(row)), row[column])
        case "move":
            target = rng.choice(data["jobs"])
            target.insert(rng.randint(0, len(target)), row.pop(column))
        case "swap":
            other = rng.randrange(len(row))
            row[column], row[other] = row[other], row[column]
        case "later":
            row.insert(column + rng.randint(1, 8), row.pop(column))
        case "exchange":  # one kind of one chunk, in two micro-batches
            if found := CELL.fullmatch(row[column]):
                chunk, kind, i = found.groups()
                j = rng.randrange(data["n_microbatches"])
                names = {f"{chunk}{kind}{i}": f"{chunk}{kind}{j}"}
                names |= {new: old for old, new in names.items()}
                row[:] = [names.get(cell, cell) for cell in row]
    return data


SIZES = ((1, 2), (2, 1), (2, 3), (3, 2), (3, 6), (4, 5))
BASES = [
    json.loads(schedule_text(plan(mode, n_stages=p, n_microbatches=m, effort="fast")))
    for mode in ("FThenB", "1F1B", "VPP", "ZBH1", "ZBV", "DualPipeV")
    for p, m in SIZES
]


def verdict(data: dict) -> str:
    """Compare the parser with the oracle; what it said."""
    valid = is_valid(data)
    try:
        parse_schedule(json.dumps(data))
    except RequestError as error:
        assert not valid, f"refused a valid file: {error}"
        place = re.search(r"row (\d+), column (\d+) \(counted from 0\): ", str(error))
        assert place and "here" in str(error), error
        return "deadlock" if "deadlock" in str(error) else "refused"
    assert valid, f"accepted {data}"
    return "accepted"


def test_every_wrong_order_is_refused_and_no_right_one():
    rng = random.Random(5)
    said = Counter(verdict(spoilt(base, rng)) for base in BASES for _ in range(20))
    assert min(said["deadlock"], said["accepted"]) >= 20, said
    assert said["refused"] >= 300, said


# --- files ----------------------------------------------------------------------------


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
    assert read_plan(tmp_path / "plan.json").schedule == schedule


BASE = json.loads(schedule_text(plan("FThenB", n_stages=4, n_microbatches=5)))
WRONG_KEYS = [
    *(({key: value}, key) for key in BASE for value in (None, {})),
    *(
        ({key: value}, key)
        for key in ("n_stages", "n_microbatches")
        for value in (-1, 0, 2.0, "2", True, [2])
    ),
    ({"format": "plan"}, "format is 'plan', not 'zbpp-schedule'"),
    ({"version": 2}, "version is 2, not 1"),
    ({"n_stages": 5}, "n_stages is"),
    ({"n_microbatches": 6}, "row 0, column"),
    ({"placement": [-1, 0, 1, 2]}, r"placement\[0\] is -1"),
    ({"placement": ["0", 1, 2, 3]}, r"placement\[0\] is '0'"),
    ({"placement": [0, 10**15]}, "placement"),
    ({"jobs": BASE["jobs"][:-1]}, "3 rows of jobs for 4 stages"),
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


@pytest.mark.parametrize("n_chunks", range(2, 9))
def test_even_chunks_have_as_many_blocks_without_embedding_and_head(
    n_chunks: int,
) -> None:
    first, *inner, last = even_split(3 * n_chunks + 2, n_chunks)
    assert {first - 1, *inner, last - 1} == {3}
    for n_layers in range(n_chunks, 3 * n_chunks):
        split = even_split(n_layers, n_chunks)
        assert sum(split) == n_layers
        assert max(split) - min(split) <= 1
