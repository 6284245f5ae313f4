"""Reports of a pipeline: what waits for W, and a warning where little does."""

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from split_runs import pipeline_of
from torch import Tensor, nn
from zoo import Square, lin

from zbpp import diagnostics


class Squared(nn.Linear):
    """A weight that is hidden in a function of the user's."""

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = Square.apply(self.weight)
        return nn.functional.linear(x, weight, self.bias)


BATCH = torch.ones(4, 6), torch.zeros(4, 6)


def test_the_report_names_where_each_gradient_comes_from() -> None:
    layers = [lin(), nn.LayerNorm(6), Squared(6, 6), nn.Sequential(lin(), lin())]
    with pipeline_of(layers) as pipeline:
        pipeline.step(*BATCH)
        report = diagnostics.split_report(pipeline)
        summary = diagnostics.split_summary(pipeline)
    waits = {"layers.0.weight", "layers.3.0.weight", "layers.3.1.weight"}
    assert {name for name, text in report.items() if text == "W"} == waits
    assert set(report.values()) == {"W", "B: no product's weight"}
    n, n_w = sum(p.numel() for x in layers for p in x.parameters()), 3 * 36
    assert f"{n_w / n:.1%} of {n} parameters" in summary


def test_a_backward_that_cannot_be_split_warns_once() -> None:
    little = [lin(), *(Squared(6, 6) for _ in range(3))]
    with pipeline_of(little) as pipeline:
        with pytest.warns(UserWarning, match="ZBH1 gains little here"):
            pipeline.step(*BATCH)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipeline.step(*BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for layers, schedule, inputs in (
            ([Squared(6, 6), *(lin() for _ in range(3))], "ZBH1", BATCH[0]),
            ([Squared(6, 6) for _ in range(4)], "1F1B", BATCH[0]),
            ([nn.Embedding(99, 6), lin()], "ZBH1", torch.arange(4)),
        ):
            with pipeline_of(layers, schedule) as pipeline:
                pipeline.step(inputs, BATCH[1])


FIRST_USE = """
import torch
from zbpp.runtime import SplitModule, WeightQueue
state = torch.get_rng_state()
torch.set_default_dtype(torch.float64)
{break_it}
with torch.device("meta"), torch.no_grad():
    SplitModule(torch.nn.Linear(2, 2))
assert torch.equal(torch.get_rng_state(), state)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "is_broken", [pytest.param(False, marks=pytest.mark.nightly), True]
)
def test_the_self_check_finds_a_torch_that_splits_wrongly(is_broken: bool) -> None:
    """Whatever the defaults are, and without a change to them."""
    broken = "WeightQueue.run = lambda *_, **__: None"
    program = FIRST_USE.format(break_it=broken if is_broken else "")
    done: Any = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200
    )
    assert (done.returncode != 0) == is_broken, done.stderr
    words = "the gradient of a weight is not that of a plain backward"
    assert (words in done.stderr) == is_broken
