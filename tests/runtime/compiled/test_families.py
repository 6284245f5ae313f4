"""Compiled blocks of transformers: W holds what it holds without a compiler."""

from typing import Any

import pytest
import torch
from flat import flat_pipeline
from tiny_hf import batch_of, tiny
from torch import Tensor

from zbpp import diagnostics
from zbpp.runtime.compiled import backend

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of torch and transformers by themselves
]


def stepped(**how: Any) -> tuple[set[str], dict[str, Tensor]]:
    """The parameters that wait for W, and the gradients of a step."""
    batch = batch_of("gpt2", 4)
    with flat_pipeline(
        tiny("gpt2", 2), optimizer=None, schedule="ZBH1", n_stages=2, n_microbatches=2,
        **how,
    ) as pipeline:  # fmt: skip
        pipeline.step(batch)
        waits = {
            n for n, text in diagnostics.split_report(pipeline).items() if text == "W"
        }
        return waits, {n: p.grad.clone() for n, p in pipeline.named_parameters()}


def test_blocks_leave_to_w_what_they_leave_uncompiled(
    plain_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = stepped()
    waits, gradients = stepped(compile="blocks")
    assert waits == plain and len(waits) > 4
    torch._dynamo.reset()
    monkeypatch.setattr(backend, "cut_weights", lambda *_: [])
    fewer, whole = stepped(compile="blocks")
    assert len(fewer) < len(waits)
    assert all(torch.equal(gradients[name], whole[name]) for name in whole)
