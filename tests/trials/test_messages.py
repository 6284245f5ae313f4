"""What waits to be read stays as it was: batches refilled, buffers reused, memory."""

import gc
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import zbpp

M = 4


class Slow(nn.Module):
    """Between processes it is late: messages wait in their sender's memory for long."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if dist.is_initialized():
            time.sleep(0.01)
        return self.linear(x)


class Masked(nn.Module):
    """Hands the batch's mask on; learns nothing."""

    def forward(self, value: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"x": value["x"] * 2, "mask": value["mask"]}


class Unmasks(nn.Module):
    def forward(self, value: dict[str, Tensor]) -> Tensor:
        return value["x"] * value["mask"]


class Doubles(nn.Module):
    """Writes to the batch, as inplace=True does."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class Buffer(nn.Module):
    """Returns the same memory for every micro-batch; ``way``: with a graph or not."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 2.0))
        self.way = way
        self.memory = torch.zeros(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale
        if self.way == "detached":
            return self.memory.copy_(y.detach())
        if self.way == "data":
            self.memory.data.copy_(y)
            return self.memory
        self.memory = self.memory.detach_().copy_(y)
        return self.memory


def optimizer_of(parameters: Any) -> Any:
    parameters = list(parameters)  # stages that learn nothing have none
    return torch.optim.SGD(parameters, lr=0.1) if parameters else []


def make(name: str) -> list[nn.Module]:
    torch.manual_seed(0)
    if name == "mask":
        return [Masked(), Masked(), Unmasks(), Slow()]
    if name == "in place":
        return [Doubles(), nn.Identity(), Slow(), nn.Linear(8, 8)]
    if name.startswith("last"):
        return [nn.Linear(8, 8) for _ in range(3)] + [Buffer(name.split()[1])]
    if name != "batch":
        return [nn.Linear(8, 8), Buffer(name), Slow(), nn.Linear(8, 8)]
    return [nn.Identity(), nn.Identity(), Slow(), nn.Linear(8, 8)]


def batch(step: int, name: str) -> tuple[Any, Tensor]:
    x, y = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(step))
    return ({"x": x, "mask": (x > 0).float()} if name == "mask" else x), y


def part(inputs: Any, i: int) -> Any:
    if isinstance(inputs, dict):
        return {key: x.tensor_split(M)[i].clone() for key, x in inputs.items()}
    return inputs.tensor_split(M)[i].clone()


def plain(name: str, steps: int = 3) -> tuple[list[float], list[Tensor]]:
    """Losses and outputs of a loop over micro-batches."""
    model = nn.Sequential(*make(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, outputs = [], []
    for step in range(steps):
        x, y = batch(step, name)
        each = []
        for i in range(M):
            found = model(part(x, i))
            each.append(mse_loss(found, y.tensor_split(M)[i]))
            outputs.append(found.detach().clone())
            (each[-1] / M).backward()
        losses.append(sum(loss.item() for loss in each) / M)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for step in range(steps):
            x, _ = batch(step, name)
            outputs += [model(part(x, i)).clone() for i in range(M)]
    return losses, outputs


def refilled(name: str, mode: str, n_stages: int | None) -> Any:
    """The same by a pipeline whose caller refills one batch for all calls."""
    pipeline = zbpp.Pipeline(
        make(name), mode, loss_fn=mse_loss, optimizer=optimizer_of,
        n_stages=n_stages, n_microbatches=M,
        step=zbpp.StepPolicy(post_validation=mode == "ZBH1" or None),
        execution=zbpp.Execution(timeout_s=60.0),
    )  # fmt: skip
    schedule = zbpp.TorchSchedule(pipeline)
    results, outputs = [], []
    x, y = batch(0, name)
    tensors = [*x.values()] if isinstance(x, dict) else [x]
    for call in range(6):
        new, targets = batch(call % 3, name)
        for old, other in zip(
            tensors, new.values() if isinstance(new, dict) else [new], strict=True
        ):
            old.copy_(other)
        y.copy_(targets)
        if call < 3:
            result = pipeline.step(x, y, return_outputs=True)
            results.append(result)  # to read its loss would wait for the last stage
            found = result.outputs
        else:
            found = pipeline.predict(x) if call % 2 else schedule.eval(x)
        for old in (*tensors, y):
            old.fill_(float("nan"))
        if found is not None:
            outputs.append(found.clone())
    losses = [result.loss for result in results]
    pipeline.close()
    return losses, torch.cat(outputs) if outputs else None


def check(found: Any, expected: Any) -> None:
    losses, outputs = found
    assert losses == pytest.approx(expected[0], rel=1e-5)
    if outputs is not None:
        torch.testing.assert_close(outputs, torch.cat(expected[1]))


NAMES = ["mask", "batch", "in place", "detached", "data", "graph"]


@pytest.mark.parametrize("mode", ["FThenB", "ZBV"])
@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_a_plain_loop(name: str, mode: str) -> None:
    check(refilled(name, mode, 2), plain(name))


def test_so_are_outputs_that_share_memory() -> None:
    check(refilled("last graph", "1F1B", 2), plain("last graph"))


def test_memory_that_a_backward_still_needs_is_refused_by_its_layers() -> None:
    with pytest.raises(RuntimeError, match="inplace") as info:
        refilled("last graph", "FThenB", 2)
    assert "in chunk 1, layers 2 to 3" in "".join(info.value.__notes__)


def refilled_in_turn(mode: str) -> list[Any]:
    return [refilled(name, mode, None) for name in NAMES]


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["ZBH1", "ZBV"])
def test_so_they_are_between_processes(pool: Pool, mode: str) -> None:
    for found in pool.run(refilled_in_turn, 2, mode):
        for name, of_name in zip(NAMES, found, strict=True):
            check(of_name, plain(name))


def count_tensors(mode: str) -> list[int]:
    """Outputs of layers that are alive after an evaluation and after a prediction."""
    layers = [nn.Linear(8, 12), *(nn.Linear(12, 12) for _ in range(3))]
    pipeline = zbpp.Pipeline(
        layers, mode, loss_fn=mse_loss, optimizer=optimizer_of,
        n_microbatches=M, execution=zbpp.Execution(timeout_s=60.0),
    )  # fmt: skip
    x, y = torch.ones(8, 8), torch.ones(8, 12)
    counts = []
    for call in (partial(pipeline.evaluate, x, y), partial(pipeline.predict, x)):
        call()
        gc.collect()
        counts.append(
            sum(isinstance(x, Tensor) and x.shape == (2, 12) for x in gc.get_objects())
        )
    pipeline.close()
    return counts


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["1F1B", "VPP"])
def test_no_message_outlives_its_call(pool: Pool, mode: str) -> None:
    n_targets = M  # the last stage keeps them until the next call
    assert pool.run(count_tensors, 2, mode) == [[0, 0], [n_targets, 0]]
