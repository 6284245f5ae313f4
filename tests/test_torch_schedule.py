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


Made = tuple[Any, list[nn.Parameter], bool, bool]
"""Schedule, what this rank trains, and whether it has the first stage and the last."""


def of_torch(mode: str) -> Made:
    """Torch's own schedule on this rank, as a trainer gets it."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

    rank, all_chunks, device = dist.get_rank(), chunks(), torch.device("cpu")
    loss_fn, last = nn.functional.mse_loss, 2 * N_STAGES - 1
    if mode == "ZBV":
        parts: list[nn.Module] = [all_chunks[c] for c in (rank, last - rank)]
        numbers, n = (rank, last - rank), last + 1
    else:
        parts = [nn.Sequential(*all_chunks[2 * rank : 2 * rank + 2])]
        numbers, n = (rank,), N_STAGES
    stages = [
        PipelineStage(part, number, n, device)
        for part, number in zip(parts, numbers, strict=True)
    ]
    schedule: Any = (
        ScheduleZBVZeroBubble(stages, N_MICROBATCHES, loss_fn)
        if mode == "ZBV"
        else Schedule1F1B(stages[0], N_MICROBATCHES, loss_fn)
    )
    weights = [p for part in parts for p in part.parameters()]
    return schedule, weights, stages[0].is_first, stages[-1].is_last


def of_ours(mode: str, n_stages: int | None = None) -> Made:
    pipeline = zbpp.Pipeline(
        chunks(),
        mode,
        loss_fn=nn.functional.mse_loss,
        optimizer=None,
        n_stages=n_stages,
        n_microbatches=N_MICROBATCHES,
    )
    weights = [p for _, p in pipeline.named_parameters()]
    first, last = pipeline.needs_inputs, pipeline.needs_targets
    return zbpp.TorchSchedule(pipeline), weights, first, last


def train(make: str, mode: str) -> list[Tensor | None]:
    """The loop of such a trainer; it knows nothing of whose schedule it has."""
    made = {"torch": of_torch, "ours": of_ours}[make](mode)
    schedule, weights, first, last = made
    optimizer = torch.optim.AdamW(weights, lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    found: list[Tensor | None] = []
    for step in range(N_STEPS):
        inputs, targets = torch.randn((2, 12, DIM), generator=generator)
        args = (inputs,) if first else ()
        losses: list[Tensor] | None = [torch.ones(())] if last else None
        target = targets if last else None
        outputs = schedule.step(*args, target=target, losses=losses)
        found += told(outputs, losses, [p.grad for p in weights])
        if step > 0:  # plain gradients in one step, clipped by hand in others
            nn.utils.clip_grad_norm_(weights, 0.1)
        optimizer.step()
        optimizer.zero_grad()
    if mode == "ZBV":  # torch's own cannot evaluate: it asserts that it has a backward
        return end(schedule, found)
    with torch.no_grad():
        losses = [] if last else None
        target = targets if last else None
        outputs = schedule.eval(*args, target=target, losses=losses)
    return end(schedule, [*found, *told(outputs, losses, weights)])


def end(schedule: Any, found: list[Tensor | None]) -> list[Tensor | None]:
    if isinstance(schedule, zbpp.TorchSchedule):
        schedule.pipeline.close()
    return found


def told(outputs: Tensor | None, losses: Any, rest: Any) -> list[Tensor | None]:
    """What a rank tells the test: outputs and losses are None where it has none.

    torch's outputs and losses carry graphs; its evaluation and ours differ in dtype.
    """
    joined = torch.stack(losses) if losses else None
    every = (outputs, joined, *rest)
    return [None if x is None else x.detach().float().clone() for x in every]


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["1F1B", "ZBV"])
def test_a_trainer_of_torchs_schedules_trains_by_ours(pool: Pool, mode: str) -> None:
    theirs = pool.run(train, N_STAGES, "torch", mode)
    ours = pool.run(train, N_STAGES, "ours", mode)
    for expected, found in zip(theirs, ours, strict=True):
        torch.testing.assert_close(
            [x for x in found if x is not None],
            [x for x in expected if x is not None],
            rtol=1e-5,
            atol=1e-7,
        )
    last = 0 if mode == "ZBV" else 1
    for rank, (outputs, losses, *_) in enumerate(ours):
        assert (outputs is not None) == (losses is not None) == (rank == last)
    assert ours[last][1].shape == (N_MICROBATCHES,)


def test_gradients_of_several_steps_are_added() -> None:
    """torch's divide those that are there once more, with ``scale_grads=True``."""
    schedule, weights, *_ = of_ours("ZBV", N_STAGES)
    inputs, targets = torch.ones(2, 8, DIM)
    found = []
    for _ in range(2):
        schedule.step(inputs, target=targets)
        found.append([p.grad.clone() for p in weights])
    once, twice = found
    torch.testing.assert_close(twice, [2 * g for g in once], rtol=1e-5, atol=1e-8)


def test_outputs_and_losses_are_kept_only_where_they_are_asked_for() -> None:
    schedule, weights, *_ = of_ours("ZBV", N_STAGES)
    inputs, targets = torch.ones(2, 8, DIM)
    assert schedule.step(inputs, target=targets, return_outputs=False) is None
    outputs = schedule.eval(inputs)  # no target, no loss
    plain = nn.Sequential(*chunks())
    parts = [plain(part) for part in inputs.chunk(N_MICROBATCHES)]
    assert torch.equal(outputs, torch.cat(parts))
    assert weights[0].grad is not None


def test_arguments_with_and_without_names_are_refused() -> None:
    schedule, *_ = of_ours("ZBV", N_STAGES)
    with pytest.raises(RequestError, match="by name, or none: 1 came without one, and"):
        schedule.step(torch.ones(8, DIM), mask=torch.ones(8), target=torch.ones(8, DIM))
    with pytest.raises(RequestError, match="give either the arguments of the batch"):
        schedule.step(torch.ones(8, DIM), arg_mbs=[()], target=torch.ones(8, DIM))
    with pytest.raises(RequestError, match="give either target or target_mbs"):
        schedule.step(torch.ones(8, DIM), target=torch.ones(8, DIM), target_mbs=[])


def scaled_loss(outputs: Tensor, targets: Tensor, *, scale: float = 1.0) -> Tensor:
    return scale * nn.functional.mse_loss(outputs, targets)


class Shifted(nn.Module):
    """A first layer with a second argument."""

    def forward(self, inputs: dict[str, Tensor] | tuple[Tensor, Tensor]) -> Tensor:
        x, shift = inputs.values() if isinstance(inputs, dict) else inputs
        return x + shift


Calls = dict[str, tuple[dict[str, Any], float]]
"""What is passed in place of a whole batch, and what that scales the loss by."""


def cut_calls() -> tuple[tuple[Tensor, Tensor, Tensor], Calls]:
    """A batch, and the same one in parts."""
    x, shift, y = torch.randn((3, 8, DIM), generator=torch.Generator().manual_seed(2))
    xs, shifts, ys = (part.split(2) for part in (x, shift, y))
    named = [{"x": a, "shift": b} for a, b in zip(xs, shifts, strict=True)]
    parts = {"arg_mbs": [*zip(xs, shifts, strict=True)], "target_mbs": [*ys]}
    return (x, shift, y), {
        "arguments": (parts, 1.0),
        "names": ({"kwarg_mbs": named, "target_mbs": [*ys]}, 1.0),
        "both": (parts | {"kwarg_mbs": [{}] * N_MICROBATCHES}, 1.0),
        "loss": (parts | {"loss_kwargs": {"scale": 2.0}}, 2.0),
    }


def run_cut(how: str, n_stages: int | None = None) -> list[Any]:
    """Losses, outputs and gradients of a batch that was cut before, or of a whole."""
    pipeline = zbpp.Pipeline(
        [Shifted(), *chunks()],
        "1F1B",
        loss_fn=scaled_loss,
        optimizer=None,
        n_stages=n_stages,
        n_microbatches=N_MICROBATCHES,
    )
    schedule, (whole, calls) = zbpp.TorchSchedule(pipeline), cut_calls()
    args, more = whole[:2], {"target": whole[2]}
    if how != "whole":
        args, (more, _) = (), calls[how]
    losses: list[Tensor] = []
    outputs = schedule.step(*args, **more, losses=losses)
    gradients = [p.grad.clone() for _, p in pipeline.named_parameters()]
    again: list[Tensor] = []
    assert (schedule.eval(*args, **more, losses=again) is None) == (outputs is None)
    torch.testing.assert_close(again, losses, check_dtype=False)
    pipeline.close()
    return [losses, outputs, gradients]


@pytest.mark.parametrize("how", ["arguments", "names", "both", "loss"])
def test_micro_batches_and_loss_arguments_as_torch_takes_them(how: str) -> None:
    losses, outputs, gradients = run_cut("whole", N_STAGES)
    scale = cut_calls()[1][how][1]
    found = run_cut(how, N_STAGES)
    expected = [[scale * x for x in losses], outputs, [scale * g for g in gradients]]
    torch.testing.assert_close(found, expected)


@pytest.mark.dist
def test_micro_batches_between_processes(pool: Pool) -> None:
    expected = pool.run(run_cut, N_STAGES, "whole")
    torch.testing.assert_close(pool.run(run_cut, N_STAGES, "arguments"), expected)
