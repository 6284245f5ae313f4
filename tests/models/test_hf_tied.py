"""Tied models of transformers: an embedding that is the head, first layer and last.

`test_hf_pipelines` has their gradients, under every mode.
"""

import hf_runs
import pytest
import torch
from hf_runs import M, assert_plain, piped
from pool import Pool
from tiny_hf import batch_of, tiny
from torch import nn

import zbpp

pytest.importorskip("transformers")


def test_a_tie_broken_fails(monkeypatch):
    """Negative control: without the tie each holder has its own uses only."""

    def broken(family, n_blocks):
        model = tiny(family, n_blocks)
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        return model

    assert_plain(piped("gpt2", "ZBV", 2, 4), "gpt2", 4)
    monkeypatch.setattr(hf_runs, "tiny", broken)
    found = piped("gpt2", "ZBV", 2, 4)
    with pytest.raises(AssertionError, match="not close"):
        assert_plain(found, "gpt2", 4)


def trained(weights):
    """Three steps of AdamW from weights on meta; parameters of this process."""
    with torch.device("meta"):
        model = tiny("gpt2")
    with zbpp.Pipeline(
        zbpp.cut(model, weights=weights),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        schedule="ZBV",
        n_stages=None if torch.distributed.is_initialized() else 2,
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


@pytest.mark.dist
@pytest.mark.slow  # the workers load transformers
def test_two_processes_make_their_own_layers_of_a_tied_model(pool: Pool):
    losses, expected = trained(3)
    found = {}
    for its, state in pool.run(trained, 2, 3):
        assert its == losses
        found |= state
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
