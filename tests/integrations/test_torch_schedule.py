"""A trainer that takes a schedule of torch trains by ours as by theirs."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn

import zbpp
from zbpp.core import RequestError

N_STAGES, N_MICROBATCHES, DIM, N_STEPS = 2, 4, 6, 3


def chunks() -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))
        for _ in range(2 * N_STAGES)
    ]


def of_torch() -> tuple[Any, list[nn.Parameter], bool, bool]:
    """Torch's own ZBV on this rank, as a trainer gets it from ``pipelining_fn``."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

    rank, n = dist.get_rank(), 2 * N_STAGES
    parts = {c: chunks()[c] for c in (rank, n - 1 - rank)}
    device = torch.device("cpu")
    stages = [PipelineStage(part, c, n, device) for c, part in parts.items()]
    schedule = ScheduleZBVZeroBubble(stages, N_MICROBATCHES, nn.functional.mse_loss)
    weights = [p for part in parts.values() for p in part.parameters()]
    return schedule, weights, rank == 0, rank == 0


def of_ours(n_stages: int | None = None) -> tuple[Any, list[nn.Parameter], bool, bool]:
    pipeline = zbpp.Pipeline(
        chunks(),
        "ZBV",
        loss_fn=nn.functional.mse_loss,
        optimizer=None,
        n_stages=n_stages,
        n_microbatches=N_MICROBATCHES,
    )
    weights = [p for _, p in pipeline.named_parameters()]
    first, last = pipeline.needs_inputs, pipeline.needs_targets
    return zbpp.TorchSchedule(pipeline), weights, first, last


def train(make: str) -> list[Any]:
    """The loop of such a trainer; it knows nothing of whose schedule it has."""
    schedule, weights, first, last = {"torch": of_torch, "ours": of_ours}[make]()
    optimizer = torch.optim.AdamW(weights, lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    found: list[Any] = []
    for step in range(N_STEPS):
        inputs, targets = torch.randn((2, 12, DIM), generator=generator)
        args = (inputs,) if first else ()
        for _ in range(2):  # gradients are added
            losses: list[Tensor] | None = [torch.ones(())] if last else None
            target = targets if last else None
            outputs = schedule.step(*args, target=target, losses=losses)
        found += [outputs, losses, [p.grad.clone() for p in weights]]
        if step > 0:  # plain gradients in one step, clipped by hand in others
            nn.utils.clip_grad_norm_(weights, 0.1)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses = [] if last else None
        target = targets if last else None
        outputs = schedule.eval(*args, target=target, losses=losses)
    return [*found, outputs, losses, [p.detach().clone() for p in weights]]


@pytest.mark.dist
def test_a_trainer_of_torchs_schedules_trains_by_ours(pool: Pool) -> None:
    theirs = pool.run(train, N_STAGES, "torch")
    ours = pool.run(train, N_STAGES, "ours")
    for rank, (expected, found) in enumerate(zip(theirs, ours, strict=True)):
        assert (found[0] is None) == (rank > 0)
        torch.testing.assert_close(
            as_float(found), as_float(expected), rtol=1e-6, atol=1e-7
        )
    assert not torch.allclose(ours[0][0], ours[0][3])  # it has learned


def as_float(found: list[Any]) -> list[Tensor]:
    """All tensors of a rank in their order; losses of an evaluation are in float64."""
    flat = [x for one in found for x in (one if isinstance(one, list) else [one])]
    return [x.float() for x in flat if x is not None]


def test_outputs_and_losses_are_kept_only_where_they_are_asked_for() -> None:
    schedule, weights, *_ = of_ours(N_STAGES)
    inputs, targets = torch.ones(2, 8, DIM)
    assert schedule.step(inputs, target=targets, return_outputs=False) is None
    outputs = schedule.eval(inputs)  # no target, no loss
    whole = nn.Sequential(*chunks())
    assert torch.equal(outputs, whole(inputs))
    assert weights[0].grad is not None


def test_arguments_with_and_without_names_are_refused() -> None:
    schedule, *_ = of_ours(N_STAGES)
    with pytest.raises(RequestError, match="by name, or none: 1 came without one, and"):
        schedule.step(torch.ones(8, DIM), mask=torch.ones(8), target=torch.ones(8, DIM))
