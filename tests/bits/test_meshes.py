"""Meshes: the bits do not depend on the mode, the numbers are those of one process."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from allpairspy import AllPairs
from cases import Trace, difference, merged
from meshes import KINDS, MeshCase, plain, reference, run
from pool import Pool

pytestmark = pytest.mark.dist

FACTORS: dict[str, list[Any]] = {
    "kind": list(KINDS),
    "mode": ["ZBV", "ZBH1", "VPP"],
    "stages": [2, 1],
    "uses": ["some", "no layer", "none of one"],
    "weights": ["tied", "frozen", "plain"],
    "optimizer": ["adamw", "sgd", "unknown"],
    "numbers": ["float64", "autocast", "narrow"],
    "validation": ["always", "small buckets", "barrier"],
    "recompute": ["none", "some", "within"],
    "halfway": ["switch", "resume", "elsewhere"],
}
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
        or (stages == 1 and (kind.n_peers == 1 or "group" in kind.options))
        or (kind.wrap and row.get("weights") == "tied")
        # replicas give zeros where one process gives none
        or (
            row.get("uses", "some") != "some"
            and row.get("halfway") == "elsewhere"
            and not kind.sums
        )
        or (row.get("numbers") == "narrow" and kind.wrap in ("", "part"))
        # NAdam divides by small moments, which rounding to 16 bits makes others
        or (row.get("numbers") == "narrow" and row.get("optimizer") == "unknown")
        # pipelines of groups do not know each other
        or ("group" in kind.options and row.get("halfway") in ("resume", "elsewhere"))
    )


ROWS = [
    MeshCase(**dict(zip(FACTORS, row, strict=True)))
    for row in AllPairs([*FACTORS.values()], filter_func=is_possible)
]
"""Any two levels that are possible together meet in one of them."""


def run_all(cases: list[MeshCase], folder: str) -> list[Trace]:
    return [run(case, f"{folder}/{i}") for i, case in enumerate(cases)]


def traces(pool: Pool, cases: Iterable[MeshCase], folder: Path) -> dict[Any, Trace]:
    """The traces of all cases; those of as many ranks run in one launch."""
    found = {}
    by_size: dict[int, list[MeshCase]] = {}
    for case in dict.fromkeys(cases):
        by_size.setdefault(case.n_ranks, []).append(case)
    for n, alike in by_size.items():
        by_rank = pool.run(run_all, n, alike, str(folder / str(n)))
        ranks = zip(*by_rank, strict=True)
        found |= {case: merged(x) for case, x in zip(alike, ranks, strict=True)}
    return found


@cache
def expected(case: MeshCase, *, zeros: bool) -> Trace:
    return plain(case, zeros=zeros)


def assert_as_plain(case: MeshCase, found: Trace) -> None:
    """A trace is that of the plain loop, but for rounding."""
    like = replace(reference(case), kind="none", halfway="nothing")
    wanted = expected(like, zeros=KINDS[case.kind].sums)
    assert wanted.rollbacks > 0
    if case.numbers == "float64":
        assert difference(found, wanted, is_exact=False, rounding=1e-8) is None
        is_late = case.validation != "barrier"
        assert found.rollbacks == (wanted.rollbacks if is_late else 0)
        return
    found, wanted = (
        Trace(x.losses, norms=x.norms, evaluation=x.evaluation) for x in (found, wanted)
    )
    assert difference(found, wanted, is_exact=False, rounding=5e-2) is None


def assert_right(
    pool: Pool, rows: list[MeshCase], folder: Path, *, n_references: int
) -> None:
    """All rows have the plain loop's numbers, and the first the bits of 1F1B."""
    alike = {case: reference(case) for case in rows[:n_references]}
    found = traces(pool, [*rows, *alike.values()], folder)
    for case in rows:
        assert_as_plain(case, found[case])
    for case, other in alike.items():
        assert difference(found[case], found[other]) is None, case


def rows_of(kind: str) -> list[MeshCase]:
    return [case for case in ROWS if case.kind == kind]


@pytest.mark.parametrize(
    "kind",
    ["optimizer", "buffers", "tp dp", "cp"],
)
def test_each_mesh_trains_as_one_process(pool: Pool, tmp_path: Path, kind: str) -> None:
    row = min(
        (case for case in rows_of(kind) if case.n_ranks == 4),
        key=lambda case: case.numbers != "float64",
    )
    assert_right(pool, [row], tmp_path, n_references=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.nightly] * (kind in BY_NIGHT))
        for kind in KINDS
    ],
)
def test_no_setting_changes_the_numbers(pool: Pool, tmp_path: Path, kind: str) -> None:
    assert_right(pool, rows_of(kind), tmp_path, n_references=1)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_setting_changes_a_bit(pool: Pool, tmp_path: Path, kind: str) -> None:
    assert_right(pool, rows_of(kind), tmp_path, n_references=len(ROWS))


@pytest.mark.slow
def test_buffers_change_no_bit(pool: Pool, tmp_path: Path) -> None:
    rows = [
        MeshCase(kind="buffers", mode=mode, recompute=recompute, numbers=numbers)
        for mode, recompute, numbers in (
            ("ZBV", "none", "float64"),
            ("1F1B", "some", "autocast"),
            ("VHalf", "within", "float64"),
            ("ZBH1", "some", "float64"),
        )
    ]
    alike = {case: replace(case, kind="parameters") for case in rows}
    found = traces(pool, [*rows, *alike.values()], tmp_path)
    for case, other in alike.items():
        assert difference(found[case], found[other]) is None, case
