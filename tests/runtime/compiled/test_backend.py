"""Compiled modules split: what waits for W, and the bits of all gradients."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import Case
from zoo_cases import CASES
from zoo_runs import ORDERS, Gradients, differences, plainly, split

from zbpp.runtime import SplitGraph
from zbpp.runtime.compiled import backend

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"  # of torch by torch
)
SMALL = ["mlp"]
MORE = [
    "tied weights",
    "conv2d, frozen weight",
    "a weight in three parts",
    "lora",
    "two outputs",
    "experts selected",
    "checkpoint in a checkpoint",
    "autocast attention",
]
"""Compiled, a layer does not always leave the same to W: other parts of a weight, say,
are added up before they reach it."""


def bare(found: Gradients) -> Gradients:
    return {name.replace("_orig_mod.", ""): value for name, value in found.items()}


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend=backend.zbpp)


def built(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.build()


def check(case: Case, monkeypatch: pytest.MonkeyPatch, *, like: Any) -> None:
    """B and W of a compiled module, and one full backward of a compiled copy."""
    module, plain = (built(case) for _ in range(2))
    waiting: set[Tensor] = set()
    report = SplitGraph.report

    def note(graph: SplitGraph, *parameters: Iterable[Tensor]) -> dict[Tensor, str]:
        where = report(graph, *parameters)
        waiting.update(p for p, text in where.items() if text == "W")
        return where

    monkeypatch.setattr(SplitGraph, "report", note)
    ours = compiled(module)
    got = bare(split(case, ours, ORDERS["interleaved"], torch.float32))
    assert {n for n, p in module.named_parameters() if p in waiting} == set(
        case.waits.split()
    )
    whole = bare(plainly(case, like(plain), 4, torch.float32))
    assert differences(got, whole) == []


@pytest.mark.parametrize(
    "name", [*SMALL, *(pytest.param(x, marks=pytest.mark.slow) for x in MORE)]
)
def test_what_waits_in_eager_mode_waits_compiled(
    name: str, plain_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(
        CASES[name], monkeypatch, like=lambda m: torch.compile(m, backend=backend.zbpp)
    )
