"""Same bits whatever the mode: a covering array of the features of one process.

Every two levels of two factors meet in a row. A row must equal a plain loop over the
micro-batches, or one stage alone, of the same numbers (`cases.NUMBERS`) in each bit.
"""

from typing import Any

import pytest
from arrays import (
    INTERLEAVED,
    SINGLE,
    STEPS,
    V_SHAPED,
    Row,
    case_of,
    covering_array,
    fits,
    label,
)
from cases import Case, difference, plain, reference, run

MODELS = (
    ["lm", "dicts"],
    ["lm tied", "lm tied thrice"],
    ["lm dropout", "exchange, dropout", "dropout"],
    ["named tuple", "dataclass", "frozen dataclass", "registered class"],
    ["OrderedDict", "ModelOutput", "nested", "tuples"],
    ["norms", "exchange, norms"],
    ["in place", "auxiliary loss"],
    ["twice", "expanded"],
    ["convolutions", "experts"],
    ["frozen", "adapted"],
    ["exchange", "vectors"],
)
MARKS = {
    "ModelOutput": [pytest.mark.needs("transformers"), pytest.mark.xdist_group("hf")]
}
FACTORS: dict[str, Any] = {
    "model": MODELS,
    "mode": (SINGLE, V_SHAPED, INTERLEAVED),
    "optimizer": ("adamw", "sgd", "several", ["amsgrad", "fused"]),
    "n_stages": (2, 1, 3, 4),
    "way": ("", "switch", "resume", "calls"),
    "steps": [*STEPS],
    "recompute": (None, "all", (1, 4, 7)),
    "loss": ("", "scaled", "tokens"),
    "samples": (8, 7, (8, 3, 1)),
    "clip": (None, 0.3),
    "autocast": (False, True),
    "given": ("layers", "builder"),
    "parts": (False, True),
}


ROWS = [
    pytest.param(row, id=label(row), marks=MARKS.get(row["model"], ()))
    for row in covering_array(FACTORS, fits)
]


@pytest.mark.parametrize("row", ROWS)
def test_features_change_no_bit(row: Row) -> None:
    case = case_of(row)
    is_exact = case.of.oracle != "close"
    assert difference(run(case), reference(case), is_exact=is_exact) is None


@pytest.mark.parametrize(
    "other",
    [
        {"clip": 0.3},
        {"weigh": "tokens"},
        {"autocast": True},
        {"optimizer": "sgd"},
        {"n_microbatches": 3},
        {"calls": 2},
        {"steps": 2},
    ],
    ids=str,
)
def test_other_numbers_have_other_bits(other: dict[str, Any]) -> None:
    """The control of all rows: what they compare can differ."""
    assert difference(plain(Case()), plain(Case())) is None
    assert difference(plain(Case(**other)), plain(Case())) is not None
