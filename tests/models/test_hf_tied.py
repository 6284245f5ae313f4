"""Tied models of transformers: an embedding that is the head, first layer and last.

`test_hf_pipelines` has their gradients, under every mode.
"""

import pytest
import torch
from hf_runs import M
from tiny_hf import batch_of, tiny

import zbpp

pytest.importorskip("transformers")


def trained(weights):
    """Three steps of AdamW from weights on meta; parameters of this process."""
    with torch.device("meta"):
        model = tiny("gpt2")
    with zbpp.Pipeline(
        zbpp.cut(model, weights=weights),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        schedule="ZBV",
        n_stages=2,
        n_microbatches=M,
        clip_grad_norm=1.0,
    ) as pipeline:
        losses = [
            pipeline.step(batch_of("gpt2", 2 * M, seed=seed)).loss for seed in range(3)
        ]
        state = pipeline.state_dict()["model"]
    return losses, {name: tensor.clone() for name, tensor in state.items()}


def test_a_tied_model_on_meta_stays_tied():
    losses, state = trained(3)
    assert torch.equal(state["transformer.wte.weight"], state["lm_head.weight"])
    assert losses[-1] < losses[0]
