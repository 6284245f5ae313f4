"""Meshes: the bits do not depend on the mode, the numbers are those of one process."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from allpairspy import AllPairs
from cases import Shown, difference, merged, plain, run
from meshes import KINDS, MeshCase, reference
from pool import Pool

pytestmark = pytest.mark.dist

FACTORS: dict[str, list[Any]] = {
    "kind": list(KINDS),
    "mode": ["ZBV", "ZBH1", "VPP"],
    "stages": [2, 1],
    "uses": ["some", "no layer", "none of one"],
    "weights": ["tied", "frozen", "plain"],
    "optimizer": ["adamw", "sgd", "NAdam"],
    "numbers": ["float64", "autocast", "narrow"],
    "validation": ["always", "small buckets", "barrier"],
    "recompute": ["none", "some", "within"],
    "halfway": ["switch", "resume", "elsewhere"],
}
BY_DEFAULT = {"optimizer", "buffers", "tp dp", "cp"}
BY_NIGHT = {
    *("dp ep", "cp ep", "ep optimizer", "gradients", "none"),
    *("fsdp in part", "fsdp of one"),
}
"""Kinds of which CI runs no row: others have each of their parts."""


def is_possible(values: list[Any]) -> bool:
    row = dict(zip(FACTORS, values, strict=False))
    kind, stages = KINDS[row["kind"]], row.get("stages")
    return not (
        (stages == 2 and kind.n_peers == 4)
        or (stages == 1 and kind.n_peers == 1)
        or (kind.wrap and row.get("weights") == "tied")
        # replicas give zeros where one process gives none
        or (
            row.get("uses", "some") != "some"
            and row.get("halfway") == "elsewhere"
            and not kind.sums
        )
        or (row.get("numbers") == "narrow" and kind.wrap in ("", "part"))
        # NAdam divides by small moments, which rounding to 16 bits makes others
        or (row.get("numbers") == "narrow" and row.get("optimizer") == "NAdam")
    )


def case_of(row: dict[str, Any]) -> MeshCase:
    """The case of a row; zbpp does not know the class of NAdam."""
    row, names = dict(row), ("stages", "validation", "recompute", "halfway")
    n_stages, validation, recompute, halfway = (row.pop(name) for name in names)
    is_switched = halfway == "switch"
    return MeshCase(
        **row,
        n_stages=n_stages,
        halfway="nothing" if is_switched else halfway,
        clip=3.4 if row["weights"] == "tied" else 2.7,
        autocast=row["numbers"] == "autocast",
        snapshots=row["optimizer"] == "NAdam",
        post_validation=validation != "barrier",
        buckets=validation == "small buckets",
        recompute=(1, 3, 6) if recompute == "some" else None,
        within=recompute == "within",
        switch=row["mode"] if is_switched else None,
    )


ROWS = [
    case_of(dict(zip(FACTORS, row, strict=True)))
    for row in AllPairs([*FACTORS.values()], filter_func=is_possible)
]
"""Any two levels that are possible together meet in one of them."""


def run_all(cases: list[MeshCase]) -> list[Shown]:
    return [run(case) | {"each": None} for case in cases]


def shown_by(pool: Pool, cases: Iterable[MeshCase]) -> dict[MeshCase, Shown]:
    """What all cases show; those of as many ranks run in one launch."""
    found = {}
    by_size: dict[int, list[MeshCase]] = {}
    for case in dict.fromkeys(cases):
        by_size.setdefault(case.n_ranks, []).append(case)
    for n, alike in by_size.items():
        ranks = zip(*pool.run(run_all, n, alike), strict=True)
        found |= {case: merged(x) for case, x in zip(alike, ranks, strict=True)}
    return found


@cache
def expected(case: MeshCase, *, zeros: bool) -> Shown:
    return plain(case, zeros=zeros) | {"each": None}


def assert_as_plain(case: MeshCase, found: Shown) -> None:
    """The numbers are those of the plain loop, but for rounding."""
    like = replace(reference(case), kind="none", halfway="nothing")
    wanted = expected(like, zeros=KINDS[case.kind].sums)
    assert wanted["rollbacks"] > 0
    if case.numbers == "float64":
        assert difference(found, wanted, rounding=1e-8) is None
        is_late = case.post_validation
        assert found["rollbacks"] == (wanted["rollbacks"] if is_late else 0)
        return
    names = ("losses", "norms", "evaluation")
    found, wanted = ({name: x[name] for name in names} for x in (found, wanted))
    assert difference(found, wanted, rounding=5e-2) is None


def assert_right(pool: Pool, rows: list[MeshCase], *, n_references: int) -> None:
    """All rows have the plain loop's numbers, and the first the bits of 1F1B."""
    alike = {case: reference(case) for case in rows[:n_references]}
    found = shown_by(pool, [*rows, *alike.values()])
    for case in rows:
        assert_as_plain(case, found[case])
    for case, other in alike.items():
        assert difference(found[case], found[other]) is None, case


def rows_of(kind: str) -> list[MeshCase]:
    return [case for case in ROWS if case.kind == kind]


def marks_of(kind: str) -> list[Any]:
    slow = [pytest.mark.slow] * (kind not in BY_DEFAULT)
    return slow + [pytest.mark.nightly] * (kind in BY_NIGHT)


@pytest.mark.parametrize("kind", [pytest.param(x, marks=marks_of(x)) for x in KINDS])
def test_each_mesh_gives_the_bits_of_one_process(pool: Pool, kind: str) -> None:
    """One row of each kind; of those that are slow also its bits."""
    row = min(rows_of(kind), key=lambda x: (x.n_ranks != 4, x.numbers != "float64"))
    assert_right(pool, [row], n_references=int(kind not in BY_DEFAULT))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_setting_changes_a_bit(pool: Pool, kind: str) -> None:
    assert_right(pool, rows_of(kind), n_references=len(ROWS))


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"recompute": (1, 3, 6), "autocast": True, "numbers": "autocast"},
        pytest.param({"mode": "VHalf", "within": True}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_buffers_change_no_bit(pool: Pool, more: dict[str, Any]) -> None:
    case = MeshCase(kind="buffers", clip=2.7, **more)
    other = replace(case, kind="parameters")
    found = shown_by(pool, [case, other])
    assert difference(found[case], found[other]) is None
