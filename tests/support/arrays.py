"""Covering arrays: rows in which every two levels of two factors meet, as cases."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest
from allpairspy import AllPairs
from cases import Case

__all__ = [
    "INTERLEAVED",
    "SINGLE",
    "STEPS",
    "V_SHAPED",
    "Row",
    "case_of",
    "cases_of",
    "covering_array",
    "fits",
]

SINGLE = ["ZBH1", "1F1B", "ZB", "FThenB", "ZBH2"]
V_SHAPED = ["ZBV", "DualPipeV", "VHalf", "ZBVPP", "VMin"]
INTERLEAVED = ["VPP", "Combined1F1B"]

STEPS: dict[str, dict[str, Any]] = {
    "": {},
    "post-validated": {"post_validation": True},
    "snapshots": {"post_validation": True, "snapshots": True},
    "buckets": {"post_validation": True, "buckets": True},
}

WRITES_TO_INPUT = {"in place", "auxiliary loss", "written mask"}

Row = dict[str, Any]
"""A level of each factor."""


def covering_array(
    factors: Mapping[str, Sequence[Any]], fits: Callable[[Row], bool] = lambda row: True
) -> list[Row]:
    """Rows of levels, such that each pair of levels is in some row.

    Args:
        factors: levels by name. A level that is a list stands for its members: the
            rows take them in turn.
        fits: False for rows that cannot be; it is asked about beginnings of rows too.
    """
    names = [*factors]
    levels = [[*range(len(factors[name]))] for name in names]
    members: Counter[tuple[str, int]] = Counter()

    def level(name: str, number: int) -> Any:
        found = factors[name][number]
        if isinstance(found, list):
            return found[members[name, number] % len(found)]
        return found

    def is_possible(numbers: Sequence[int]) -> bool:
        pairs = zip(names, numbers, strict=False)
        return fits({name: factors[name][number] for name, number in pairs})

    table = [*map(list, AllPairs(levels, filter_func=is_possible))]
    _mix(table, levels, is_possible)
    rows = []
    for numbers in table:
        rows.append({n: level(n, x) for n, x in zip(names, numbers, strict=True)})
        members.update(zip(names, numbers, strict=True))
    return rows


def _mix(
    table: list[list[int]],
    levels: Sequence[Sequence[int]],
    is_possible: Callable[[Sequence[int]], bool],
) -> None:
    """Draw levels that no pair needs: else the last rows would have them all alike."""
    draw = random.Random(0)
    pairs = Counter(pair for row in table for pair in combinations(enumerate(row), 2))
    for _ in range(40 * len(table)):
        row, factor = draw.choice(table), draw.randrange(len(levels))
        changed = [*row[:factor], draw.choice(levels[factor]), *row[factor + 1 :]]
        pairs.subtract(combinations(enumerate(row), 2))
        lost = (x for x in combinations(enumerate(row), 2) if pairs[x] < 1)
        if all((factor, row[factor]) not in x for x in lost) and is_possible(changed):
            row[:] = changed
        pairs.update(combinations(enumerate(row), 2))


def cases_of(rows: Sequence[Row]) -> list[Any]:
    """Rows as parameters of a test; slow ones have only levels of rows before them."""
    seen: set[tuple[str, str]] = set()
    found = []
    for row in rows:
        levels = {(name, str(level)) for name, level in row.items()}
        marks = [pytest.mark.slow] if levels <= seen else []
        seen |= levels
        label = " ".join(str(x) for x in row.values() if x not in (None, "", False))
        found.append(pytest.param(case_of(row), id=label, marks=marks))
    return found


def fits(row: Row) -> bool:
    """Costs of parts are for equal stages; calls of one step have equal batches.

    Layers that write to their input cannot be recomputed.
    """
    models = row["model"] if isinstance(row["model"], list) else [row["model"]]
    if row.get("recompute") and not WRITES_TO_INPUT.isdisjoint(models):
        return False
    if row.get("parts") and row["n_stages"] == 3:
        return False
    is_even = row.get("samples", 8) == 8 and row.get("loss") != "tokens"
    return row.get("way") != "calls" or is_even


def case_of(row: Row) -> Case:
    """The settings of a row."""
    row = dict(row)
    way, loss, mode = row.pop("way"), row.pop("loss"), row["mode"]
    more: dict[str, Any] = STEPS[row.pop("steps")]
    if way == "switch":
        (group,) = (x for x in (SINGLE, V_SHAPED, INTERLEAVED) if mode in x)
        more = more | {"switch": group[group.index(mode) - 1]}
    elif way == "resume":
        n = 2 if row["parts"] else 3
        more = more | {"resume": ("ZBV" if mode in SINGLE else "1F1B", n)}
    elif way == "calls":
        more = more | {"calls": 2}
    if loss == "scaled":
        more = more | {"loss_scale": 8.0}
    elif loss == "tokens":
        more = more | {"weigh": "tokens"}
    return Case(**row, **more)
