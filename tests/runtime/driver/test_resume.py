"""A run that is stopped and resumed ends with the bits of one that was not."""

import copy

import pytest
import torch
from small_model import assert_same, batch, build, make_pipeline
from torch import Tensor, nn

from zbpp.pipeline import Pipeline


def dropping(layers: range) -> list[nn.Module]:
    return build(layers, dropout=0.3)


def make(n_stages: int | None, first_step: int = 0) -> Pipeline:
    return make_pipeline(
        "ZBH1", n_stages, model=dropping, seed=7, first_step=first_step,
        clip_grad_norm=0.3,
    )  # fmt: skip


Outcome = tuple[list[float], dict[str, Tensor]]


def run(n_stages: int | None, pause: int | None) -> Outcome:
    pipeline = make(n_stages)
    losses = []
    for step in range(6):
        if step == pause:
            layers = {
                n: copy.deepcopy(m.state_dict()) for n, m in pipeline.named_layers()
            }
            states = [copy.deepcopy(o.state_dict()) for o in pipeline.optimizers]
            n_steps = pipeline.n_steps
            pipeline.close()
            pipeline = make(n_stages, n_steps)
            for name, layer in pipeline.named_layers():
                layer.load_state_dict(layers[name])
            for optimizer, state in zip(pipeline.optimizers, states, strict=True):
                optimizer.load_state_dict(state)
        losses.append(pipeline.step(*batch(step)).loss)
    assert pipeline.n_steps == 6
    return losses, {n: p.detach().clone() for n, p in pipeline.named_parameters()}


@pytest.mark.parametrize("n_stages", [1, 2])
def test_in_one_process(n_stages: int) -> None:
    losses, parameters = run(n_stages, None)
    resumed = run(n_stages, 3)
    assert resumed[0] == losses
    assert_same(resumed[1], parameters)


def test_the_first_step_alone_changes_the_draw() -> None:
    torch.manual_seed(0)
    first, third = (make(1, at).step(*batch(0)).loss for at in (0, 2))
    assert first != third
