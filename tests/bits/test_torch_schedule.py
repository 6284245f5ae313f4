"""A trainer that takes a schedule of torch trains by ours as by theirs."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import zbpp
from zbpp.core import RequestError

N_STAGES, M, DIM = 2, 4, 6


def chunks() -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))
        for _ in range(2 * N_STAGES)
    ]


Schedule = tuple[Any, list[nn.Parameter], bool, bool]
"""A schedule, this rank's weights, and whether it has the first stage and the last."""


def of_torch(mode: str) -> Schedule:
    """Torch's schedule on this rank, as a trainer gets it."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

    rank, parts = dist.get_rank(), chunks()
    numbers, make = (rank, 3 - rank), ScheduleZBVZeroBubble
    if mode == "1F1B":
        parts = [nn.Sequential(*parts[2 * i : 2 * i + 2]) for i in range(N_STAGES)]
        numbers, make = (rank,), lambda stages, *more: Schedule1F1B(stages[0], *more)
    cpu = torch.device("cpu")
    stages = [PipelineStage(parts[i], i, len(parts), cpu) for i in numbers]
    weights = [p for i in numbers for p in parts[i].parameters()]
    return make(stages, M, mse_loss), weights, stages[0].is_first, stages[-1].is_last


def of_ours(mode: str, n_stages: int | None = None) -> Schedule:
    pipeline = zbpp.Pipeline(
        chunks(), mode, loss_fn=mse_loss, optimizer=None, n_stages=n_stages,
        n_microbatches=M,
    )  # fmt: skip
    weights = [p for _, p in pipeline.named_parameters()]
    first, last = pipeline.needs_inputs, pipeline.needs_targets
    return zbpp.TorchSchedule(pipeline), weights, first, last


def train(make: str, mode: str) -> list[Tensor | None]:
    """The loop of such a trainer; it knows nothing of whose schedule it has."""
    schedule, weights, first, last = {"torch": of_torch, "ours": of_ours}[make](mode)
    optimizer = torch.optim.AdamW(weights, lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    found: list[Any] = []
    for step in range(3):
        inputs, targets = torch.randn((2, 12, DIM), generator=generator)
        args, target = (inputs,) if first else (), targets if last else None
        losses: list[Tensor] | None = [torch.ones(())] if last else None
        outputs = schedule.step(*args, target=target, losses=losses)
        found += [outputs, torch.stack(losses) if losses else None]
        found += [p.grad for p in weights]
        if step > 0:  # plain gradients in one step, clipped by hand in others
            nn.utils.clip_grad_norm_(weights, 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step > 0)
    if mode != "ZBV":  # torch's cannot evaluate: it asserts that it has a backward
        with torch.no_grad():
            losses = [] if last else None
            outputs = schedule.eval(*args, target=target, losses=losses)
        found += [outputs, torch.stack(losses) if losses else None, *weights]
    if isinstance(schedule, zbpp.TorchSchedule):
        schedule.pipeline.close()
    return [None if x is None else x.detach().float().clone() for x in found]


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.slow  # to import torch's schedules takes seconds in each process
@pytest.mark.dist
@pytest.mark.parametrize("mode", ["1F1B", "ZBV"])
def test_a_trainer_for_torch_schedules_runs_ours(pool: Pool, mode: str) -> None:
    theirs = pool.run(train, N_STAGES, "torch", mode)
    ours = pool.run(train, N_STAGES, "ours", mode)
    last = 0 if mode == "ZBV" else 1
    for rank, (found, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert [x is None for x in found] == [x is None for x in expected]
        assert (found[0] is not None) == (found[1] is not None) == (rank == last)
        close(
            [x for x in found if x is not None], [x for x in expected if x is not None]
        )


def test_gradients_of_several_steps_are_added() -> None:
    """torch's divide those that are there once more, with ``scale_grads=True``."""
    schedule, weights, *_ = of_ours("ZBV", N_STAGES)
    inputs, targets = torch.ones(2, 8, DIM)
    assert schedule.step(inputs, target=targets, return_outputs=False) is None
    once = [p.grad.clone() for p in weights]
    schedule.step(inputs, target=targets)
    close([p.grad for p in weights], [2 * g for g in once])


class Shifted(nn.Module):
    """A first layer with a second argument."""

    def forward(self, inputs: dict[str, Tensor] | tuple[Tensor, Tensor]) -> Tensor:
        x, shift = inputs.values() if isinstance(inputs, dict) else inputs
        return x + shift


def scaled_loss(outputs: Tensor, targets: Tensor, *, scale: float = 1.0) -> Tensor:
    return scale * mse_loss(outputs, targets)


X, SHIFT, Y = torch.randn((3, 8, DIM), generator=torch.Generator().manual_seed(2))
XS, SHIFTS, YS = (part.split(2) for part in (X, SHIFT, Y))
PARTS = {"arg_mbs": [*zip(XS, SHIFTS, strict=True)], "target_mbs": [*YS]}
NAMED = [{"x": x, "shift": shift} for x, shift in zip(XS, SHIFTS, strict=True)]
CALLS: dict[str, Any] = {
    "whole": ((X, SHIFT), {"target": Y}, 1.0),
    "arguments": ((), PARTS, 1.0),
    "names": ((), {"kwarg_mbs": NAMED, "target_mbs": [*YS]}, 1.0),
    "both": ((), PARTS | {"kwarg_mbs": [{}] * M}, 1.0),
    "loss": ((), PARTS | {"loss_kwargs": {"scale": 2.0}}, 2.0),
}
"""Arguments and named ones of a call, and what that scales the loss by."""


def call(how: str, n_stages: int | None = None) -> list[Any]:
    """Losses, outputs and gradients of one batch."""
    pipeline = zbpp.Pipeline(
        [Shifted(), *chunks()], "1F1B", loss_fn=scaled_loss, optimizer=None,
        n_stages=n_stages, n_microbatches=M,
    )  # fmt: skip
    schedule, (args, more, _) = zbpp.TorchSchedule(pipeline), CALLS[how]
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
    losses, outputs, gradients = call("whole", N_STAGES)
    scale = CALLS[how][2]
    expected = [[scale * x for x in losses], outputs, [scale * g for g in gradients]]
    close(call(how, N_STAGES), expected)


@pytest.mark.dist
def test_micro_batches_between_processes(pool: Pool) -> None:
    expected = pool.run(call, N_STAGES, "whole")
    close(pool.run(call, N_STAGES, "arguments"), expected)


@pytest.mark.parametrize(
    ("args", "more", "words"),
    [
        ((Y,), {"mask": Y[:, 0], "target": Y}, "by name, or none: 1 came"),
        (
            (Y,),
            {"arg_mbs": [()], "target": Y},
            "give either the arguments",
        ),
        ((Y,), {"target": Y, "target_mbs": []}, "give either target or target_mbs"),
    ],
)
def test_a_call_that_torch_would_not_take_is_refused(
    args: Any, more: Any, words: str
) -> None:
    schedule, *_ = of_ours("ZBV", N_STAGES)
    with pytest.raises(RequestError, match=words):
        schedule.step(*args, **more)
