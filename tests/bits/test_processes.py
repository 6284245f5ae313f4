"""Same bits in several processes: stages in processes of the pool, and a plain loop."""

import pytest
from cases import Case, difference, on_ranks, reference
from pool import Pool

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    ("case", "n"),
    [
        (Case(mode="ZBV", model="nested", clip=0.3, post_validation=True), 2),
        (Case(mode="ZBH1", resume=("ZBV", 2), model="lm tied thrice"), 2),
    ],
)
def test_processes_change_no_bit(pool: Pool, case: Case, n: int) -> None:
    assert difference(on_ranks(pool, case, n), reference(case)) is None
