"""Same bits whatever the mode: a covering array of the features of one process.

Every two levels of two factors meet in a row. A row must equal a plain loop over the
micro-batches, or one stage alone, of the same numbers (`cases.NUMBERS`) in each bit.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from arrays import (
    INTERLEAVED,
    SINGLE,
    STEPS,
    V_SHAPED,
    cases_of,
    covering_array,
    fits,
)
from cases import Case, difference, make, plain, reference, run

from zbpp.core import Placement, Schedule, parse_job

MODELS = (
    ["lm", "dicts"],
    ["lm tied", "tied thrice"],
    ["draws", "lm dropout", "exchange, dropout"],
    "tuples",
    ["buffers", "norms", "exchange, norms"],
    ["in place", "auxiliary loss", "written mask"],
    ["twice", "expanded", "hooks", "reused memory"],
    "frozen",
    ["exchange", "vectors"],
)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.* gains little here"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
    pytest.mark.filterwarnings("ignore:.*of a Tensor that is not a leaf"),  # in dynamo
]

FACTORS: dict[str, Any] = {
    "model": MODELS,
    "mode": (SINGLE, V_SHAPED, INTERLEAVED),
    "optimizer": ("adamw", "sgd", "several", ["Adam", "AdamW fused"]),
    "n_stages": (2, 1, 3, 4),
    "way": ("", "switch", "resume", "calls"),
    "steps": [*STEPS],
    "recompute": (None, "all", (1, 4, 7)),
    "loss": ("", "scaled", "tokens"),
    "samples": (8, 7, (8, 5, 4)),
    "clip": (None, 0.3),
    "autocast": (False, True),
    "given": ("layers", "builder"),
    "parts": (False, True),
}


def shuffled() -> Schedule:
    """Passes of other orders than those of the micro-batches; some of W with B."""
    rows = (
        "0F2 0F0 0F1 0B2 0B1 0W1 0B0 0W2 0W0 O",
        "1F2 1BW2 1F0 1F1 1B1 1BW0 1W1 O",
    )
    orders = tuple(
        tuple(parse_job(text, stage=stage) for text in row.split())
        for stage, row in enumerate(rows)
    )
    return Schedule("shuffled", Placement.single(2), 3, orders)


OTHERS: dict[str, Case] = {
    "no optimizer": Case(mode="ZBV", optimizer=None),
    "no optimizer, tied": Case(mode="ZBV", model="lm tied", optimizer=None),
    "one micro-batch": Case(mode="ZBH2", n_stages=4, n_microbatches=1),
    "one micro-batch, V": Case(mode="ZBV", n_stages=4, n_microbatches=1),
    "shuffled orders": Case(mode=shuffled(), n_microbatches=3),
    "complex weights": Case(mode="ZBV", model="complex", clip=0.3, recompute="all"),
    "sparse gradients": Case(
        mode="ZBV",
        model="lm sparse",
        optimizer="plain sgd",
        clip=0.3,
        post_validation=True,
    ),
    "uneven split": Case(n_stages=3, split=(1, 5, 2), post_validation=False),
    "more steps": Case(mode="ZBV", model="norms", steps=14, clip=0.9),
    "late rollbacks": Case(model="lm tied", steps=14, clip=2.0, snapshots=True),
    "buffers written by data": Case(mode="ZBV", model="buffers by data", clip=0.1),
    "in place at the head of chunks": Case(mode="ZBH1", model="in place", n_stages=4),
    "no seed": Case(mode="ZBV", model="draws", seed=None, recompute="all"),
    "sums in products": Case(mode="ZBV", exact_sums=False),
    "sums in products, recomputed": Case(
        mode="DualPipeV", model="exchange", exact_sums=False, recompute="all"
    ),
    "16 bits at points": Case(mode="DualPipeV", model="exchange", autocast=True),
    "draws at points": Case(mode="DualPipeV", model="exchange, dropout", clip=0.1),
    "recomputed at points": Case(
        mode="DualPipeV", model="exchange, dropout", n_stages=1, recompute="all"
    ),
    "checkpoints": Case(mode="DualPipeV", model="checkpoints"),
    "reentrant checkpoints": Case(mode="DualPipeV", model="reentrant checkpoints"),
    "recomputed parts": Case(
        mode="ZBV", model="exchange, dropout", parts=True, recompute="all"
    ),
    "parts of one chunk": Case(
        mode="ZB", model="exchange, norms", n_stages=1, parts=True, clip=0.1
    ),
}


COMPILED = {
    "compiled": Case(mode="ZBV", compile="blocks", clip=0.3),
    "compiled, recomputed": Case(compile="blocks", model="lm tied", recompute="all"),
}

CASES = [
    *cases_of(covering_array(FACTORS, fits)),
    *(pytest.param(case, id=name) for name, case in OTHERS.items()),
    *(
        pytest.param(case, id=name, marks=[pytest.mark.slow, pytest.mark.nightly])
        for name, case in COMPILED.items()
    ),
]


@pytest.mark.parametrize("case", CASES)
def test_features_change_no_bit(case: Case) -> None:
    found, expected = run(case), reference(case)
    assert difference(found, expected, rounding=case.rounding) is None


@pytest.mark.parametrize("mode", ["1F1B", "ZBH1", "ZBV"])
def test_autocast_may_begin_around_a_step_or_a_loop(mode: str) -> None:
    """torch casts each weight once in a context; steps and rollbacks change weights."""
    case = Case(mode=mode, model="vectors", clip=0.1, post_validation=True)
    expected = reference(replace(case, autocast=True))
    with torch.autocast("cpu", torch.bfloat16):
        assert difference(run(case), expected) is None
    results = []
    with make(case) as pipeline:
        for step in range(case.steps):
            with torch.autocast("cpu", torch.bfloat16):
                results.append(pipeline.step(*case.batch(step)))
    assert [result.loss for result in results] == expected["losses"]
    assert [result.grad_norm for result in results] == expected["norms"]


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
def test_different_inputs_give_different_bits(other: dict[str, Any]) -> None:
    """The control of all rows: what they compare can differ."""
    assert difference(plain(Case()), plain(Case())) is None
    assert difference(plain(Case(**other)), plain(Case())) is not None
