"""Hundreds of spoilt schedule files: each wrong one is refused, no right one is.

What is right is decided by an oracle that shares no code with zbpp: it splits the cells
by hand and asks networkx whether "must come before" has a cycle.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import permutations, product

import networkx as nx

from zbpp.core import RequestError, Schedule, parse_schedule, schedule_text
from zbpp.planning import MODES, plan

CELL = re.compile("(0|[1-9][0-9]*)(F|BW|B|W)(0|[1-9][0-9]*)")
PAIR = re.compile(r"\((\d+F\d+);(\d+BW?\d+)\)OVERLAP_F_B")
PLACE = re.compile(r"row (\d+), column (\d+) \(counted from 0\): ")
Data = dict


# --- the oracle -----------------------------------------------------------------------


def is_valid(data: Data) -> bool:
    """Judge the jobs of a file whose keys and types are right."""
    stage_of, rows, m = data["placement"], data["jobs"], data["n_microbatches"]
    if len(rows) != len(set(stage_of)) or not all(_tidy(row) for row in rows):
        return False
    if any(len({cell in row for row in rows}) > 1 for cell in ("O", "V")):
        return False
    before, home, node = nx.DiGraph(), {}, {}
    for stage, row in enumerate(rows):
        jobs = [_passes(cell) for cell in row if cell not in ("O", "V")]
        if None in jobs:
            return False
        keys = [key for job in jobs for key in job]
        if len(set(keys)) < len(keys):
            return False
        home.update(dict.fromkeys(keys, stage))
        node.update({key: job for job in jobs for key in job})
        nx.add_path(before, jobs)
    wanted = list(product(range(len(stage_of)), range(m)))
    if {(c, i) for c, _, i in home} != set(wanted):
        return False
    for c, i in wanted:
        kinds = {kind for kind in ("F", "B", "W", "BW") if (c, kind, i) in home}
        if kinds not in ({"F", "BW"}, {"F", "B", "W"}):
            return False
        if any(home[c, kind, i] != stage_of[c] for kind in kinds):
            return False
        back = "BW" if "BW" in kinds else "B"
        before.add_edge(node[c, "F", i], node[c, back, i])
        if back == "B":
            before.add_edge(node[c, "B", i], node[c, "W", i])
        if c > 0:
            upper = "BW" if (c - 1, "BW", i) in home else "B"
            before.add_edge(node[c - 1, "F", i], node[c, "F", i])
            before.add_edge(node[c, back, i], node[c - 1, upper, i])
    return nx.is_directed_acyclic_graph(before)


def _passes(cell: str) -> tuple[tuple[int, str, int], ...] | None:
    """Chunk, kind and micro-batch of each pass of a cell: two of a pair."""
    pair = PAIR.fullmatch(cell)
    jobs = [CELL.fullmatch(text) for text in (pair.groups() if pair else [cell])]
    if None in jobs:
        return None
    return tuple((int(job[1]), job[2], int(job[3])) for job in jobs)


def _tidy(row: list[str]) -> bool:
    """O once and last; V once and before all but F."""
    first_back = next((k for k, cell in enumerate(row) if re.search("B|W", cell)), 0)
    return ("O" not in row[:-1]) and (
        "V" not in row or (row.count("V") == 1 and row.index("V") < first_back)
    )


# --- mutations: each gives the spoilt file, and the rows that it touched --------------

Mutation = Callable[[Data, random.Random], tuple[Data, set[int]]]


def drop(data: Data, rng: random.Random) -> tuple[Data, set[int]]:
    row, column = _place(data, rng)
    del data["jobs"][row][column]
    return data, {row}


def double(data: Data, rng: random.Random) -> tuple[Data, set[int]]:
    row, column = _place(data, rng)
    cells = data["jobs"][row]
    cells.insert(rng.randint(0, len(cells)), cells[column])
    return data, {row}


def move_to_another_stage(data: Data, rng: random.Random) -> tuple[Data, set[int]]:
    row, column = _place(data, rng)
    target = rng.randrange(len(data["jobs"]))
    cell = data["jobs"][row].pop(column)
    cells = data["jobs"][target]
    cells.insert(rng.randint(0, len(cells)), cell)
    return data, {row, target}


def swap(data: Data, rng: random.Random) -> tuple[Data, set[int]]:
    row, column = _place(data, rng)
    cells = data["jobs"][row]
    other = rng.randrange(len(cells))
    cells[column], cells[other] = cells[other], cells[column]
    return data, {row}


def move_later(data: Data, rng: random.Random) -> tuple[Data, set[int]]:
    """Pick a forward and let it run 2 to 8 places later."""
    row, _ = _place(data, rng)
    cells = data["jobs"][row]
    column = rng.choice([k for k, cell in enumerate(cells) if "F" in cell])
    cell = cells.pop(column)
    cells.insert(column + rng.randint(2, 8), cell)
    return data, {row}


def exchange_microbatches(data: Data, rng: random.Random) -> tuple[Data, set[int]]:
    """Let one kind of one chunk run two micro-batches in the other order."""
    row, _ = _place(data, rng)
    cells = data["jobs"][row]
    passes = [match for match in map(CELL.fullmatch, cells) if match]
    chunk, kind, i = rng.choice(passes).groups()
    j = rng.randrange(data["n_microbatches"])
    names = {f"{chunk}{kind}{i}": f"{chunk}{kind}{j}"}
    names |= {new: old for old, new in names.items()}
    data["jobs"][row] = [names.get(cell, cell) for cell in cells]
    return data, {row}


def mistype(data: Data, rng: random.Random) -> tuple[Data, set[int]]:
    row, column = _place(data, rng)
    cell = data["jobs"][row][column]
    spoilt = [cell.lower(), f" {cell}", f"{cell}0", f"1{cell}", cell[1:], cell[:-1]]
    spoilt += [cell.replace("F", "B"), cell.replace("W", ""), cell.replace("B", "BW")]
    data["jobs"][row][column] = rng.choice([s for s in spoilt if s != cell])
    return data, {row}


def replace_cell_by_no_text(data: Data, rng: random.Random) -> tuple[Data, set[int]]:
    row, column = _place(data, rng)
    data["jobs"][row][column] = rng.choice([None, 7, 1.5, True, [], ["0F0"], {}])
    return data, {row}


def _place(data: Data, rng: random.Random) -> tuple[int, int]:
    row = rng.randrange(len(data["jobs"]))
    return row, rng.randrange(len(data["jobs"][row]))


MUTATIONS: tuple[Mutation, ...] = (
    drop,
    double,
    move_to_another_stage,
    swap,
    move_later,
    exchange_microbatches,
    mistype,
    replace_cell_by_no_text,
)
SIZES = ((1, 2), (2, 1), (2, 3), (3, 2), (3, 6), (4, 5))
BASES = [
    (mode, json.loads(schedule_text(plan(mode, n_stages=p, n_microbatches=m))))
    for mode in MODES
    for p, m in SIZES
]


def mutants() -> Iterator[tuple[str, Data, set[int]]]:
    rng = random.Random(5)
    for _, base in BASES:
        for mutation in MUTATIONS:
            for _ in range(4):
                data, rows = mutation(json.loads(json.dumps(base)), rng)
                if data != base:
                    yield mutation.__name__, data, rows


def judge(parse: Callable[[str], Schedule]) -> Counter[tuple[str, bool]]:
    """Compare a parser with the oracle; count mutations by name and validity."""
    counts: Counter[tuple[str, bool]] = Counter()
    for name, data, rows in mutants():
        texts = all(isinstance(cell, str) for row in data["jobs"] for cell in row)
        valid = texts and is_valid(data)
        counts[name, valid] += 1
        try:
            parse(json.dumps(data))
        except RequestError as error:
            assert not valid, f"{name}: refused a valid file: {error}"
            place = PLACE.search(str(error))
            assert place and "here" in str(error), error
            if "deadlock" in str(error):
                counts["deadlock", False] += 1
            elif " is missing, though" not in str(error):
                assert int(place[1]) in rows, error
        else:
            assert valid, f"{name}: accepted {data}"
    return counts


def test_every_wrong_file_is_refused_and_no_right_one():
    counts = judge(parse_schedule)
    assert counts["deadlock", False] >= 40, counts
    for mutation in MUTATIONS:
        assert counts[mutation.__name__, False] >= 30, counts
    for harmless in (swap, exchange_microbatches):
        assert counts[harmless.__name__, True] >= 10, counts
    del counts["deadlock", False]
    assert sum(n for (_, valid), n in counts.items() if not valid) >= 700, counts
    assert sum(n for (_, valid), n in counts.items() if valid) >= 80, counts


def test_oracle_and_parser_agree_on_all_orders_of_two_stages():
    """2 stages, 2 micro-batches: all 24 x 24 orders; V placement: all 24 of 1 x 1."""
    single = {"placement": [0, 1], "n_stages": 2, "n_microbatches": 2}
    rows = [[f"{s}{job}" for job in ("F0", "F1", "BW0", "BW1")] for s in (0, 1)]
    valid = 0
    for orders in product(*(map(list, permutations(row)) for row in rows)):
        valid += agree(single | {"jobs": list(orders)})
    assert valid == 26  # of 36 with each F before its BW; 10 deadlock
    fold = {"placement": [0, 0], "n_stages": 1, "n_microbatches": 1}
    both = permutations(["0F0", "0BW0", "1F0", "1BW0"])
    assert sum(agree(fold | {"jobs": [list(row)]}) for row in both) == 1


def agree(data: Data) -> bool:
    data |= {"format": "zbpp-schedule", "version": 1, "mode": "all"}
    try:
        parse_schedule(json.dumps(data))
        accepted = True
    except RequestError:
        accepted = False
    assert accepted == is_valid(data), data
    return accepted


def test_the_oracle_accepts_the_bases_and_knows_each_rule():
    assert all(is_valid(base) for _, base in BASES)
    up, down = ["0F0", "0B0", "0W0", "O"], ["1F0", "1BW0", "O"]
    tiny = {"placement": [0, 1], "n_microbatches": 1}
    assert is_valid(tiny | {"jobs": [up, down]})
    assert is_valid(tiny | {"jobs": [["V", *up], ["1F0", "V", "1BW0", "O"]]})
    for wrong in (
        [["0B0", "0F0", "0W0", "O"], down],
        [["0F0", "0W0", "0B0", "O"], down],
        [["0F0", "0B0", "O", "0W0"], down],
        [["0F0", "0B0", "O"], down],
        [up[:-1], down],
        [["V", *up], down],
        [["V", *up], ["1F0", "1BW0", "V", "O"]],
        [up, ["1F0", "1BW0", "1W0", "O"]],
        [up, ["1F0", "1F0", "1BW0", "O"]],
        [up, down, []],
        [down, up],
    ):
        assert not is_valid(tiny | {"jobs": wrong}), wrong
