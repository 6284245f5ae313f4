"""State taken and loaded in the middle of a run, against a plain loop of torch."""

from typing import Any

import pytest
import torch
from flat import flat_pipeline
from torch import Tensor, nn

import zbpp
from zbpp.checkpoint import load

N_MICROBATCHES, CLIP, STEPS, SAVED_AFTER = 4, 20.0, 10, 5


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    """It has its state from the start on, and counts steps in it."""
    return torch.optim.Adagrad(parameters, lr=0.01, lr_decay=0.1)


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Large in every third step: its gradient is clipped, so its step is undone."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 8, generator=generator)
    return x, 900 * x if step % 3 == 1 else x.roll(1, 1)


def pipeline_of(modules: list[nn.Module]) -> zbpp.Pipeline:
    return flat_pipeline(
        modules,
        loss_fn=nn.functional.mse_loss,
        optimizer=adagrad,
        schedule="ZBV",
        n_stages=4,
        n_microbatches=N_MICROBATCHES,
        clip_grad_norm=CLIP,
        post_validation=True,
    )


def plain(n_steps: int) -> dict[str, Any]:
    """Parameters and optimizer state after a plain loop, by name."""
    model = nn.Sequential(*layers())
    optimizer = adagrad(model.parameters())
    for step in range(n_steps):
        inputs, targets = batch(step)
        halves = zip(
            inputs.chunk(N_MICROBATCHES), targets.chunk(N_MICROBATCHES), strict=True
        )
        for x, y in halves:
            (nn.functional.mse_loss(model(x), y) / N_MICROBATCHES).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    named = dict(model.named_parameters())
    return {
        **{name: p.detach() for name, p in named.items()},
        **{
            f"{name}/{key}": value
            for name, p in named.items()
            for key, value in optimizer.state[p].items()
        },
    }


def held(pipeline: zbpp.Pipeline) -> dict[str, Any]:
    state = pipeline.state_dict()
    entries = {
        f"{name}/{key}": value
        for name, (entry,) in state["optimizer"].items()
        for key, value in entry["state"].items()
    }
    return {**state["model"], **entries}


def reload_here(pipeline: zbpp.Pipeline) -> zbpp.Pipeline:
    pipeline.load_state_dict(pipeline.state_dict())
    return pipeline


def reload_elsewhere(pipeline: zbpp.Pipeline) -> zbpp.Pipeline:
    other = pipeline_of(layers())
    other.load_state_dict(pipeline.state_dict())
    pipeline.close()
    return other


@pytest.mark.parametrize("reload", [reload_here, reload_elsewhere])
def test_the_state_goes_on_as_in_a_plain_loop(reload):
    pipeline = pipeline_of(layers())
    n_rollbacks = 0
    for step in range(STEPS):
        if step == SAVED_AFTER:
            pipeline = reload(pipeline)
        n_rollbacks += pipeline.step(*batch(step)).rollbacks
    ours, theirs = held(pipeline), plain(STEPS)
    pipeline.close()
    assert n_rollbacks > 0
    renamed = {f"layers.{key}": value for key, value in theirs.items()}
    assert ours.keys() == renamed.keys()
    differing = [
        key
        for key in ours
        if not torch.allclose(ours[key], renamed[key], rtol=1e-5, atol=1e-7)
        or (key.endswith("/step") and ours[key] != renamed[key])
    ]
    assert not differing
    other = plain(STEPS - 1)  # the control: a step less is seen
    assert any(not torch.allclose(renamed[f"layers.{k}"], v) for k, v in other.items())


@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (False, "cpu")])
def test_a_fused_optimizer_has_its_counters_where_it_computes(fused, device, tmp_path):
    """``meta`` stands for a GPU; others count on the host."""
    with pipeline_of(layers()) as pipeline:
        pipeline.step(*batch(0))
        pipeline.save(tmp_path, wait=True)
    model = nn.Sequential(*layers()).to("meta")
    optimizer = adagrad(model.parameters())
    optimizer.param_groups[0]["fused"] = fused
    load(tmp_path, model, optimizers=[optimizer], own_name="layers.{}".format)
    assert {x["step"].device.type for x in optimizer.state.values()} == {device}
    assert {x["sum"].device.type for x in optimizer.state.values()} == {"meta"}
