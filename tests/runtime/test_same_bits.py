"""Same bits whatever the mode: one covering array of the features of one process.

Every pair of levels of two factors meets in a run. The reference is FThenB on one stage
with the same `ALIKE`, which change the numbers; the other factors must change no bit.
"""

from collections.abc import Iterator
from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch
from small_model import N_LAYERS, batch, build, make_pipeline
from torch import Tensor

from zbpp.runtime.optim import stage_optimizer

FACTORS: dict[str, dict[str, dict[str, Any]]] = {
    "mode": {m: {} for m in ("1F1B", "VPP", "ZBH1", "ZBH2", "ZBV", "VHalf")},
    "steps": {
        "post-validated": {"post_validation": True},
        "barrier": {"post_validation": False},
        "snapshots": {"snapshots": True, "post_validation": True},
    },
    "recompute": {
        "none": {},
        "all": {"recompute": "all"},
        "some": {"recompute": {1, 4, 7}},
    },
    "stages": {"2": {"n_stages": 2}, "3": {"n_stages": 3}},
    "clipping": {"off": {}, "on": {"clip_grad_norm": 0.5}},
    "loss": {
        "plain": {},
        "scaled": {"loss_scale": 8.0, "weigh": "tokens"},
        "tokens": {"weigh": "tokens"},
    },
    "forward": {
        "plain": {},
        "autocast": {"autocast": torch.bfloat16},
        "dropout": {"model": lambda layers: build(layers, dropout=0.3), "seed": 3},
    },
    "ties": {"none": {}, "ends": {"ties": [((0, "weight"), (N_LAYERS - 1, "weight"))]}},
    "batch": {"even": {}, "ragged": {}},
}
ALIKE = ("clipping", "loss", "forward", "ties", "batch")
Row = tuple[str, ...]
"""A level of each factor."""


def covering_array() -> Iterator[Row]:
    """Rows in which all pairs of levels meet: each takes the most that are left."""
    names = list(FACTORS)
    left = {
        frozenset({(a, x), (b, y)})
        for a, b in combinations(names, 2)
        for x in FACTORS[a]
        for y in FACTORS[b]
    }
    while left:
        row = dict(min(map(sorted, left)))
        for name in (n for n in names if n not in row):
            row[name] = max(
                FACTORS[name],
                key=lambda x, name=name: sum(
                    frozenset({(name, x), pair}) in left for pair in row.items()
                ),
            )
        left -= set(map(frozenset, combinations(row.items(), 2)))
        yield tuple(row[name] for name in names)


ROWS = list(covering_array())


def trained(row: Row, mode: str, names: tuple[str, ...], **more: Any) -> list[Any]:
    """Losses, norms, an evaluation and parameters, with the levels of some factors."""
    levels = dict(zip(FACTORS, row, strict=True))
    for name in names:
        more |= FACTORS[name][levels[name]]
    n_stages = more.pop("n_stages")
    samples = 12 if levels["batch"] == "even" else 11
    with make_pipeline(mode, n_stages, **more) as pipeline:
        results = [pipeline.step(*batch(step, samples)) for step in range(3)]
        found = [x for one in results for x in (one.loss, one.grad_norm)]
        found.append(pipeline.evaluate(*batch(99, samples=7), n_microbatches=3))
        parameters = dict(pipeline.named_parameters())
        return [*found, *(parameters[name].detach() for name in sorted(parameters))]


@cache
def reference(alike: Row) -> list[Any]:
    row = (*ROWS[0][: -len(ALIKE)], *alike)
    return trained(row, "FThenB", ALIKE, n_stages=1, post_validation=False)


def is_same(row: Row) -> bool:
    found, expected = trained(row, row[0], (*FACTORS,)), reference(row[-len(ALIKE) :])
    return all(
        torch.equal(x, y) if isinstance(x, Tensor) else x == y
        for x, y in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_features_change_no_bit(row: Row) -> None:
    assert is_same(row)


def test_a_step_that_is_not_clipped_would_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = next(x for x in ROWS if x[1] == "post-validated" and x[4] == "on")
    assert is_same(row)
    monkeypatch.setattr(stage_optimizer, "multiply_gradients", lambda *_: None)
    assert not is_same(row)
