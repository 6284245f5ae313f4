"""Small trainings on the simulated device, and the same ones by FThenB on one stage.

A scenario is what a user's script does beside its steps: it changes its batches as
soon as a step has begun, makes them on the GPU, evaluates, reads times or gradients.
What the host must not wait for is watched: from the fourth step on a call that holds it
up is an error, and `Outcome.waits` notes where it has waited for events.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu_waits import waits_are_errors
from small_model import N_LAYERS, batch, build, loss_fn, make_pipeline
from torch import Tensor, nn

import simgpu
import zbpp
from zbpp import diagnostics

__all__ = ["ONE_PROCESS", "TWO_PROCESSES", "Outcome", "Scenario", "differences"]

N_STEPS = 5
WARM_UP = 3
"""Steps in which the host may wait: buffers are watched."""


@dataclass
class Outcome:
    """What a training leaves; of several processes the union."""

    numbers: dict[str, Any] = field(default_factory=dict)
    """All of it must be equal to the last bit."""
    waits: set[tuple[str, str, str]] = field(default_factory=set)
    """After the warm-up: for what the host has waited, in which job and where."""

    def add(self, other: "Outcome") -> None:
        """Take in what another process has found."""
        self.numbers |= other.numbers
        self.waits |= other.waits


@dataclass(frozen=True)
class Scenario:
    """A training with a mode, beside the same with FThenB on one stage.

    Args:
        name: of the scenario.
        train: called with a mode, a number of stages and settings of the pipeline.
        mode: of the schedule.
        how: settings that must change no bit.
        alike: settings of the reference as well.
        n_processes: that train; 1: all stages are in one.
        is_own_reference: several processes add up in another order than one: the
            reference is the same training, where everything runs at once.
    """

    name: str
    train: Callable[..., Outcome]
    mode: str
    how: Mapping[str, Any] = field(default_factory=dict)
    alike: Mapping[str, Any] = field(default_factory=dict)
    n_processes: int = 1
    is_own_reference: bool = False

    def run(self) -> Outcome:
        """Train, in each of the processes."""
        stages = None if self.n_processes > 1 else 2
        return self.train(self.mode, stages, **self.alike, **self.how)

    def reference(self) -> Outcome:
        """Train in one process, on one stage and stream."""
        if self.is_own_reference:
            return self.run()
        return self.train("FThenB", 1, **self.alike)


def differences(outcome: Outcome, reference: Outcome) -> list[str]:
    """Names of the numbers that differ."""
    names = outcome.numbers.keys() | reference.numbers.keys()
    return sorted(
        name
        for name in names
        if not _is_same(outcome.numbers.get(name), reference.numbers.get(name))
    )


def _is_same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    return repr(left) == repr(right)  # NaN is NaN


@contextmanager
def steady(outcome: Outcome) -> Iterator[None]:
    """Within this no call may hold up the host, and its waits are noted."""
    before, copies = simgpu.waits(), _copies_in_vain()
    with waits_are_errors():
        yield
    outcome.waits |= {
        (what, job, site.partition(":")[0] + " " + site.rpartition(" ")[2])
        for what, job, site in simgpu.waits_since(before)
    }
    if _copies_in_vain() > copies:
        outcome.waits.add(("a copy of memory that is not pinned", "", ""))


def _copies_in_vain() -> int:
    return sum(n for name, n in simgpu.counts().items() if "not pinned" in name)


def foreach(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, foreach=True)


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-1, momentum=0.9)


def pipeline(mode: str, n_stages: int | None, **more: Any) -> zbpp.Pipeline:
    """A pipeline of the small model, with steps that are rolled back."""
    settings: dict[str, Any] = {
        "device": "cuda",
        "optimizer": foreach,
        "clip_grad_norm": 0.7,
        "n_microbatches": 4,
        "post_validation": True,
        "timeout_s": 30.0,
        "first_timeout_s": 20.0,
    }
    return make_pipeline(mode, n_stages, **(settings | more))


def note_results(outcome: Outcome, results: list[Any]) -> None:
    for step, result in enumerate(results):
        outcome.numbers[f"step {step}"] = result.loss, result.grad_norm


def note_parameters(outcome: Outcome, trained: zbpp.Pipeline) -> None:
    """By the caller's stream, which the host then waits for, and no other."""
    for name, parameter in trained.named_parameters():
        outcome.numbers[name] = parameter.detach().cpu()


# ---- What scripts do.


def from_host(
    mode: str, n_stages: int | None, *, pins: bool = False, **more: Any
) -> Outcome:
    """Batches of the host, overwritten as soon as a step has begun; an evaluation."""
    outcome, trained = Outcome(), pipeline(mode, n_stages, **more)
    results = []
    for step in range(N_STEPS):
        x, y = (t.pin_memory() if pins else t for t in batch(step))
        if step < WARM_UP:
            results.append(trained.step(x, y))
        else:
            with steady(outcome):
                results.append(trained.step(x, y))
        x.zero_()
        y.zero_()
    note_results(outcome, results)
    x, y = batch(99, samples=7)
    outcome.numbers["validation"] = trained.evaluate(x, y, n_microbatches=3)
    note_parameters(outcome, trained)
    trained.close()
    return outcome


class Mixing(nn.Module):
    """Makes batches on the GPU: what the caller's stream has to do takes long."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = (x * 3 + 1) % 11
        return x


def from_gpu(mode: str, n_stages: int | None, **more: Any) -> Outcome:
    """Batches that the caller's stream makes before a step, and drops after it."""
    outcome, trained = Outcome(), pipeline(mode, n_stages, **more)
    mixing, results, kept = Mixing(), [], []
    raw = [tuple(t.cuda() for t in batch(step)) for step in range(N_STEPS)]
    for step, (x, y) in enumerate(raw):
        inputs, targets = mixing(x), mixing(y)
        if step < WARM_UP:
            results.append(trained.step(inputs, targets))
        else:
            with steady(outcome):
                results.append(trained.step(inputs, targets))
        inputs.fill_(step)  # as the caller's stream comes to it
        kept.append(inputs)
        del inputs, targets
    note_results(outcome, results)
    outcome.numbers["what the caller has kept"] = torch.stack(kept).cpu()
    note_parameters(outcome, trained)
    trained.close()
    return outcome


def own_optimizer(mode: str, n_stages: int | None, **more: Any) -> Outcome:
    """The caller's stream adds up gradients, and takes the optimizer step."""
    settings: dict[str, Any] = {"optimizer": None, "clip_grad_norm": None}
    outcome, trained = Outcome(), pipeline(mode, n_stages, **(settings | more))
    parameters = dict(trained.named_parameters())
    optimizer = momentum([*parameters.values()])
    results = []
    for step in range(N_STEPS):
        results.append(trained.step(*batch(step)))
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    note_results(outcome, results)
    for name, parameter in parameters.items():
        grad = parameter.grad
        outcome.numbers[f"gradient of {name}"] = None if grad is None else grad.cpu()
    note_parameters(outcome, trained)
    trained.close()
    return outcome


def with_times(mode: str, n_stages: int | None, **more: Any) -> Outcome:
    """Steps whose times are read at once, before their results are."""
    outcome, trained = Outcome(), pipeline(mode, n_stages, **more)
    results = []
    for step in range(N_STEPS):
        results.append(trained.step(*batch(step)))
        slots = [slot for row in diagnostics.timeline(trained).rows for slot in row]
        outcome.numbers[f"no time runs backwards in step {step}"] = all(
            slot.end >= slot.start for slot in slots
        )
        for executor in trained.stages.executors.values():
            executor.times.norm_seconds()
    note_results(outcome, results)
    note_parameters(outcome, trained)
    trained.close()
    return outcome


class Overflowing:
    """The loss, times a factor that the host changes."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return loss_fn(outputs, targets) * self.factor


def scaled(mode: str, n_stages: int | None, **more: Any) -> Outcome:
    """A loss scale, and a step whose gradients overflow."""
    loss = Overflowing()
    trained = pipeline(mode, n_stages, loss_fn=loss, loss_scale=8.0, **more)
    outcome, results = Outcome(), []
    for step in range(N_STEPS):
        loss.factor = float("inf") if step == 2 else 1.0
        results.append(trained.step(*batch(step)))
    note_results(outcome, results)
    note_parameters(outcome, trained)
    trained.close()
    return outcome


class Both(nn.Module):
    """Layers that hand on two tensors of one shape."""

    def __init__(self, inner: nn.Module, index: int) -> None:
        super().__init__()
        self.inner, self.index = inner, index

    def forward(self, given: Any) -> Any:
        if self.index == 0:
            return self.inner(given), 0.5 * self.inner(given)
        x, y = given
        if self.index == N_LAYERS - 1:
            return self.inner(x + 0.1 * y)
        return self.inner(x), y


def with_two_tensors(layers: range) -> list[nn.Module]:
    return [Both(layer, i) for i, layer in zip(layers, build(layers), strict=True)]


class Talking(nn.Module):
    """A layer that communicates twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        sent = zbpp.overlap_point(swapped, x)
        return x + zbpp.overlap_point(swapped, self.inner(sent))


def swapped(x: Tensor) -> Tensor:
    return x.sin().flip(0)  # keeps x for its backward


def talking(layers: range) -> list[nn.Module]:
    return [
        Talking(layer) if 0 < i < N_LAYERS - 1 else layer
        for i, layer in zip(layers, build(layers), strict=True)
    ]


def dropping(layers: range) -> list[nn.Module]:
    return build(layers, dropout=0.3)


def on_mesh(mode: str, n_stages: int | None, *, size: int = 1, **more: Any) -> Outcome:
    """Two replicas, each with its share of the batch, that hold parts of all layers."""
    mesh = zbpp.mesh(stages=size, data_parallel=2)
    settings: dict[str, Any] = {"mesh": mesh, "model": build(range(N_LAYERS))}
    outcome, trained = Outcome(), pipeline(mode, n_stages, **(settings | more))
    replica, results = mesh.get_local_rank("dp"), []
    for step in range(N_STEPS):
        x, y = (t.tensor_split(2)[replica] for t in batch(step, samples=24))
        if step < WARM_UP:
            results.append(trained.step(x, y))
        else:
            with steady(outcome):
                results.append(trained.step(x, y))
    note_results(outcome, results)
    for name, parameter in trained.named_parameters():
        own = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        outcome.numbers[f"{name} of replica {replica}"] = own.detach().cpu()
    trained.close()
    return outcome


def closed_at_once(mode: str, n_stages: int | None, **more: Any) -> Outcome:
    """A pipeline that is closed while its last step is under way."""
    trained = pipeline(mode, n_stages, **more)
    parameters = dict(trained.named_parameters())
    for step in range(N_STEPS):
        trained.step(*batch(step))
    trained.close()
    numbers = {name: p.detach().cpu() for name, p in parameters.items()}
    return Outcome(numbers)


class Failing:
    """A loss that raises in a step."""

    step = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.step == 2:
            raise ArithmeticError("the loss fails")
        return loss_fn(outputs, targets)


def failing(mode: str, n_stages: int | None, **more: Any) -> Outcome:
    """A stage fails, and the others learn of it."""
    settings: dict[str, Any] = {"first_timeout_s": 10.0, "timeout_s": 1.0}
    loss = Failing()
    trained = pipeline(mode, n_stages, loss_fn=loss, **(settings | more))
    error = "none"
    try:
        for loss.step in range(N_STEPS):
            note_results(Outcome(), [trained.step(*batch(loss.step))])
    except Exception as raised:
        error = type(raised).__name__
    return Outcome({f"error of rank {trained.rank}": error})


DROPOUT = {"model": dropping, "seed": 3}
POINTS = {"model": talking}
TWO_TENSORS = {"model": with_two_tensors}

ONE_PROCESS = [
    Scenario("ZBV", from_host, "ZBV"),
    Scenario("ZBH1", from_host, "ZBH1"),
    Scenario("ZBH1, batches of the GPU", from_gpu, "ZBH1"),
    Scenario("1F1B, pinned batches", from_host, "1F1B", {"pins": True}),
    Scenario("ZBV, own optimizer", own_optimizer, "ZBV"),
    Scenario("ZBH1, dropout", from_host, "ZBH1", alike=DROPOUT),
    Scenario("ZBH1, times", with_times, "ZBH1"),
    Scenario("DualPipeV, points", from_host, "DualPipeV", alike=POINTS),
    Scenario("DualPipeV, points of the GPU", from_gpu, "DualPipeV", alike=POINTS),
    Scenario("ZBV, closed at once", closed_at_once, "ZBV"),
    Scenario("ZBV, loss scale", scaled, "ZBV"),
    Scenario("VPP, snapshots", from_host, "VPP", {"snapshots": True}),
]
SHARDS = {"shard": "parameters"}
TWO_PROCESSES = [
    Scenario("ZBV, 2 processes", from_host, "ZBV", n_processes=2),
    Scenario("1F1B, 2 processes", from_gpu, "1F1B", n_processes=2),
    Scenario(
        "two tensors, 2 processes", from_host, "ZBH1", alike=TWO_TENSORS, n_processes=2
    ),
    Scenario("ZBV closed at once", closed_at_once, "ZBV", n_processes=2),
    Scenario("a stage fails", failing, "1F1B", n_processes=2, is_own_reference=True),
    *(
        Scenario(name, on_mesh, "1F1B", alike=how, n_processes=2, is_own_reference=True)
        for name, how in {
            "mesh of replicas": {},
            "mesh of replicas, tied": {
                "ties": [((0, "weight"), (N_LAYERS - 1, "weight"))]
            },
            "mesh of shards": SHARDS,
            "mesh of shards, buffers": SHARDS | {"alternating_buffers": True},
        }.items()
    ),
]
