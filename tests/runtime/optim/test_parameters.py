"""Parameters are stepped, counted in the norm, cleared as in a plain torch loop."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_model import N_LAYERS, batch, build, loss_fn, make_pipeline
from torch import nn

CLIP = 0.5  # below most norms
Thaw = Callable[[int, nn.Sequential], None]


def matrices_and_rest(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """As Muon is used: one optimizer for the matrices, another one for the rest."""
    return [
        torch.optim.SGD([p for p in parameters if p.dim() > 1], lr=0.1, momentum=0.9),
        torch.optim.AdamW([p for p in parameters if p.dim() < 2], lr=1e-2),
    ]


def one(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(parameters, lr=1e-2)]


def bits(model: nn.Sequential) -> dict[str, Any]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def plain(make: Any, change: Thaw, n_steps: int) -> tuple[list[float], dict[str, Any]]:
    """The loop without zbpp, all parameters given to the optimizers."""
    model = nn.Sequential(*build(range(N_LAYERS)))
    change(-1, model)
    optimizers = make(list(model.parameters()))
    norms = []
    for step in range(n_steps):
        change(step, model)
        inputs, targets = (x.tensor_split(6) for x in batch(step))
        for x, y in zip(inputs, targets, strict=True):
            (loss_fn(model(x), y) / 6).backward()
        owned = [p for o in optimizers for g in o.param_groups for p in g["params"]]
        norms.append(float(nn.utils.clip_grad_norm_(owned, CLIP)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return norms, bits(model)


def piped(
    mode: str, make: Any, change: Thaw, n_steps: int, **more: Any
) -> tuple[list[float], dict[str, Any]]:
    model = nn.Sequential(*build(range(N_LAYERS)))
    change(-1, model)
    with make_pipeline(
        mode, 2, model=model, optimizer=make, clip_grad_norm=CLIP, **more
    ) as pipeline:
        norms = []
        for step in range(n_steps):
            change(step, model)
            norms.append(pipeline.step(*batch(step)).grad_norm)
            assert all(p.grad is None for p in model.parameters())
    return norms, bits(model)


def unchanged(step: int, model: nn.Sequential) -> None:
    """All parameters learn all the time."""


def thaws(step: int, model: nn.Sequential) -> None:
    """One layer is frozen before step 2, another one from step 3 on."""
    model[2].requires_grad_(step >= 2)
    model[5].requires_grad_(step < 3)


@pytest.mark.parametrize(
    ("mode", "change", "make"),
    [
        ("1F1B", thaws, matrices_and_rest),
        ("ZBH1", thaws, one),
        ("ZBV", unchanged, one),
        ("ZBV", thaws, matrices_and_rest),
    ],
)
def test_as_in_a_plain_loop(mode: str, change: Thaw, make: Any) -> None:
    norms, expected = plain(make, change, 5)
    found, parameters = piped(mode, make, change, 5)
    assert found == pytest.approx(norms, rel=1e-5)
    for name, value in expected.items():
        torch.testing.assert_close(parameters[name], value, rtol=1e-4, atol=1e-6)


def weights_only(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.dim() > 1], lr=0.0)


def test_what_no_optimizer_steps_is_named_once_and_does_not_count() -> None:
    model = nn.Sequential(*build(range(N_LAYERS)))
    before = bits(model)
    pipeline = make_pipeline(
        "ZBV", 2, model=model, optimizer=weights_only, clip_grad_norm=CLIP
    )
    with pytest.warns(UserWarning, match="no optimizer steps them") as said:
        norms = [pipeline.step(*batch(0)).grad_norm for _ in range(4)]
    pipeline.close()
    assert len(set(norms)) == 1  # nothing has moved or piled up
    assert all(torch.equal(p, before[name]) for name, p in bits(model).items())
    (warning,) = said
    assert "(1.norm.weight, 1.norm.bias, 1.up.bias" in str(warning.message)


def test_optimizers_of_a_list_are_found_by_schedulers_and_hooks() -> None:
    pipeline = make_pipeline("ZBH1", 2, optimizer=matrices_and_rest)
    kinds = [type(optimizer).__name__ for optimizer in pipeline.optimizers]
    assert kinds == ["SGD", "AdamW"] * 2
    groups = [group for one in pipeline.optimizers for group in one.param_groups]
    stepped = {id(p) for group in groups for p in group["params"]}
    assert stepped == {id(p) for _, p in pipeline.named_parameters()}
