"""Same bits in several processes: a covering array of stages in workers of the pool.

A row must equal what `test_one_process` compares with. All ranks must agree on losses,
norms and evaluations, and on what two of them hold.
"""

from typing import Any

import pytest
from arrays import (
    INTERLEAVED,
    SINGLE,
    V_SHAPED,
    cases_of,
    covering_array,
    fits,
)
from cases import Case, difference, on_ranks, reference
from pool import Pool

MODELS = (
    ["lm", "dicts"],
    ["lm tied", "tied thrice"],
    ["exchange, dropout", "buffers"],
    "tuples",
    ["twice", "hooks", "auxiliary loss"],
)
FACTORS: dict[str, Any] = {
    "model": MODELS,
    "n_stages": (2, 4),
    "mode": (SINGLE, V_SHAPED, INTERLEAVED),
    "way": ("", "switch", "resume", "calls"),
    "steps": ("", "post-validated", "snapshots"),
    "samples": (8, 7, (8, 5, 4)),
    "loss": ("", "tokens"),
    "recompute": (None, "all"),
    "optimizer": ("adamw", "several"),
    "clip": (None, 0.3),
    "autocast": (False, True),
    "given": ("layers", "builder"),
    "parts": (False, True),
}


@pytest.mark.dist
@pytest.mark.parametrize("case", cases_of(covering_array(FACTORS, fits)))
def test_processes_change_no_bit(pool: Pool, case: Case) -> None:
    found, expected = on_ranks(pool, case, case.n_stages), reference(case)
    assert difference(found, expected, rounding=case.rounding) is None
