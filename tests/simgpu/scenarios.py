"""Small trainings on the simulated device, and the runs that they must equal.

A scenario is what a user's script does beside its steps: it changes its batches as
soon as a step has begun, makes them on the GPU, evaluates, loads, reads times or
gradients. What the host must not wait for is watched: from the fourth step on a call
that holds it up is an error, and so is a copy of memory that is not pinned.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from cases import NUMBERS, Case, make
from gpu_waits import waits_are_errors
from torch import Tensor, nn

import simgpu
import zbpp
from zbpp import Costs, diagnostics

__all__ = ["ONE_PROCESS", "PROCESSES", "Numbers", "Scenario", "differences"]

N_STEPS = 5
WARM_UP = 3
"""Steps in which the host may wait: buffers are watched."""


Numbers = dict[str, Any]
"""What a training leaves, by name; all of it must be equal to the last bit."""


@dataclass(frozen=True)
class Scenario:
    """A training, and the one on one stage that it must equal.

    Args:
        name: of the scenario.
        train: called with the case and the options.
        case: settings of the pipeline.
        options: of the script.
        n_processes: that train.
        by_mode: replicas add up in an order of their own: the reference is 1F1B in the
            same processes.
    """

    name: str
    train: Callable[..., Numbers]
    case: Case
    options: Mapping[str, Any] = field(default_factory=dict)
    n_processes: int = 1
    by_mode: bool = False

    def run(self) -> Numbers:
        """Train, in each of the processes."""
        return self.train(self.case, **self.options)

    @property
    def reference(self) -> "Scenario":
        """What must give the same numbers, where everything runs at once."""
        if self.by_mode:
            return replace(self, name="1F1B", case=replace(self.case, mode="1F1B"))
        numbers = {name: getattr(self.case, name) for name in NUMBERS}
        case = Case(mode="FThenB", n_stages=1, device="cuda", **numbers)
        return Scenario("FThenB", self.train, case)


def case(mode: str, model: str = "lm", **more: Any) -> Case:
    """With steps that are clipped, and rolled back where that comes late."""
    settings = {"clip": 0.7, "post_validation": True, "device": "cuda"} | more
    return Case(mode=mode, model=model, **settings)


def differences(found: Numbers, expected: Numbers) -> list[str]:
    """Names of the numbers that differ."""
    names = found.keys() | expected.keys()
    return sorted(x for x in names if not _is_same(found.get(x), expected.get(x)))


def _is_same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    return repr(left) == repr(right)  # NaN is NaN


@contextmanager
def steady() -> Iterator[None]:
    """Within this no call may hold up the host."""
    before = _copies_in_vain()
    with waits_are_errors():
        yield
    assert _copies_in_vain() == before, "a copy of memory that is not pinned"


def _copies_in_vain() -> int:
    return sum(n for name, n in simgpu.counts().items() if "not pinned" in name)


def start(of: Case, **more: Any) -> zbpp.Pipeline:
    """Make the pipeline, with short limits of time."""
    limits = {"timeout_s": 30.0, "first_timeout_s": 20.0}
    limits |= {name: more.pop(name) for name in limits if name in more}
    how = zbpp.Execution(overlap=of.overlap, **limits)
    return make(of, execution=how, **more)


def note_results(numbers: Numbers, results: list[Any]) -> None:
    for step, result in enumerate(results):
        numbers[f"step {step}"] = result.loss, result.grad_norm


def note_parameters(numbers: Numbers, trained: zbpp.Pipeline) -> None:
    """By the caller's stream, which the host then waits for, and no other."""
    for name, parameter in trained.named_parameters():
        numbers[name] = parameter.detach().cpu()


# ---- What scripts do.


def from_host(
    of: Case,
    *,
    pins: bool = False,
    folder: str | None = None,
    switches: bool = False,
    **more: Any,
) -> Numbers:
    """Batches of the host, overwritten as soon as a step has begun; an evaluation.

    Before the third step another pipeline may load from a folder what the first one
    has saved, or the pipeline switch to another order of its mode.
    """
    numbers, trained = Numbers(), start(of, **more)
    results = []
    for step in range(N_STEPS):
        if folder is not None and step == 2:
            trained.save(folder, wait=True)
            trained.close()
            trained = start(of, **more)
            trained.load(folder)
        if switches and step == 2:
            trained.switch(another_order(of.mode, trained))
        x, y = (t.pin_memory() if pins else t for t in of.batch(step))
        if step < WARM_UP or switches or folder is not None:
            results.append(trained.step(x, y))
        else:
            with steady():
                results.append(trained.step(x, y))
        x.zero_()
        y.zero_()
    note_results(numbers, results)
    x, y = of.of.batch(99, 7)
    numbers["validation"] = trained.evaluate(x, y, n_microbatches=3)
    outputs = trained.predict(of.batch(98)[0], everywhere=True)
    if isinstance(outputs, Tensor):
        numbers["outputs"] = float(outputs.double().sum())
    note_parameters(numbers, trained)
    trained.close()
    return numbers


def another_order(mode: str, trained: zbpp.Pipeline) -> zbpp.Plan:
    return zbpp.plan(
        mode,
        n_stages=trained.schedule.n_stages,
        n_microbatches=trained.n_microbatches,
        costs=Costs(f=1, b=3, w=2),
    )


class Mixing(nn.Module):
    """Makes batches on the GPU: what the caller's stream has to do takes long."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = (x * 3 + 1) % 11
        return x


def from_gpu(of: Case) -> Numbers:
    """Batches that the caller's stream makes before a step, and drops after it."""
    numbers, trained = Numbers(), start(of)
    mixing, results, inputs_after = Mixing(), [], []
    raw = [tuple(t.cuda() for t in of.batch(step)) for step in range(N_STEPS)]
    for step, (x, y) in enumerate(raw):
        inputs, targets = mixing(x), mixing(y)
        if step < WARM_UP:
            results.append(trained.step(inputs, targets))
        else:
            with steady():
                results.append(trained.step(inputs, targets))
        inputs.fill_(step)  # as the caller's stream comes to it
        inputs_after.append(inputs)
        del inputs, targets
    note_results(numbers, results)
    numbers["inputs"] = torch.stack(inputs_after).cpu()
    note_parameters(numbers, trained)
    trained.close()
    return numbers


def user_optimizer(of: Case) -> Numbers:
    """The caller's stream adds up gradients, and takes the optimizer step."""
    numbers, trained = Numbers(), start(of)
    parameters = dict(trained.named_parameters())
    optimizer = torch.optim.SGD([*parameters.values()], lr=1e-1, momentum=0.9)
    results = []
    for step in range(N_STEPS):
        results.append(trained.step(*of.batch(step)))
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    note_results(numbers, results)
    for name, parameter in parameters.items():
        grad = parameter.grad
        numbers[f"gradient of {name}"] = None if grad is None else grad.cpu()
    note_parameters(numbers, trained)
    trained.close()
    return numbers


def with_times(of: Case) -> Numbers:
    """Steps whose times are read at once, before their results are."""
    numbers, trained = Numbers(), start(of)
    results = []
    for step in range(N_STEPS):
        results.append(trained.step(*of.batch(step)))
        slots = [slot for row in diagnostics.timeline(trained).rows for slot in row]
        numbers[f"no time runs backwards in step {step}"] = all(
            slot.end >= slot.start for slot in slots
        )
        for executor in trained.stages.executors.values():
            executor.times.norm_seconds()
    note_results(numbers, results)
    note_parameters(numbers, trained)
    trained.close()
    return numbers


@dataclass
class Loss:
    """The model's loss, times a factor that the host changes."""

    of: Case
    factor: float = 1.0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.of.of.loss_fn(outputs, targets) * self.factor


def scaled(of: Case) -> Numbers:
    """A loss scale, and a step whose gradients overflow."""
    loss = Loss(of)
    trained = start(of, loss_fn=loss)
    numbers, results = Numbers(), []
    for step in range(N_STEPS):
        loss.factor = float("inf") if step == 2 else 1.0
        results.append(trained.step(*of.batch(step)))
    note_results(numbers, results)
    note_parameters(numbers, trained)
    trained.close()
    return numbers


def on_mesh(of: Case, *, stages: int = 1, **shards: Any) -> Numbers:
    """Two replicas, each with its share of the batch, that hold parts of all layers."""
    mesh = zbpp.mesh(stages=stages, data_parallel=2)
    numbers = Numbers()
    trained = start(of, mesh=zbpp.DataParallel(mesh=mesh, **shards))
    replica, results = mesh.get_local_rank("dp"), []
    for step in range(N_STEPS):
        x, y = (t.tensor_split(2)[replica] for t in of.of.batch(step, 16))
        if step < WARM_UP:
            results.append(trained.step(x, y))
        else:
            with steady():
                results.append(trained.step(x, y))
    note_results(numbers, results)
    for name, parameter in trained.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        numbers[f"{name} of replica {replica}"] = local.detach().cpu()
    trained.close()
    return numbers


def closed_at_once(of: Case) -> Numbers:
    """A pipeline that is closed while its last step is under way."""
    trained = start(of)
    parameters = dict(trained.named_parameters())
    for step in range(N_STEPS):
        trained.step(*of.batch(step))
    trained.close()
    return {name: p.detach().cpu() for name, p in parameters.items()}


_NOTHING_TO_VALIDATE = {"optimizer": None, "clip": None, "post_validation": None}
TWO_TENSORS = case("ZBH1", "tuples", split=(7, 1))
ONE_PROCESS = [
    Scenario("ZBV", from_host, case("ZBV")),
    Scenario("ZBH1", from_host, case("ZBH1")),
    Scenario("ZBH1, batches of the GPU", from_gpu, case("ZBH1")),
    Scenario("1F1B, pinned batches", from_host, case("1F1B"), {"pins": True}),
    Scenario("ZBV, optimizer of the user", user_optimizer,
             case("ZBV", **_NOTHING_TO_VALIDATE)),
    Scenario("ZBH1, dropout", from_host, case("ZBH1", "lm dropout")),
    Scenario("ZBH1, times", with_times, case("ZBH1")),
    Scenario("DualPipeV, points", from_host, case("DualPipeV", "exchange")),
    Scenario("DualPipeV, points of the GPU", from_gpu, case("DualPipeV", "exchange")),
    Scenario("ZBV, closed at once", closed_at_once, case("ZBV")),
    Scenario("ZBV, loss scale", scaled, case("ZBV", loss_scale=8.0)),
    Scenario("VPP, snapshots", from_host, case("VPP", snapshots=True)),
    Scenario("ZBH2, barrier", from_host, case("ZBH2", post_validation=False)),
    Scenario("ZBV, recompute", from_host, case("ZBV", recompute="all")),
    Scenario("1F1B, recompute, points", from_host,
             case("1F1B", "exchange, dropout", recompute="all")),
    Scenario("ZB, segments", from_host, case("ZB", "exchange, dropout", parts=True)),
    Scenario("ZBH1, switches", from_host, case("ZBH1"), {"switches": True}),
    Scenario("1F1B, fused", from_host, case("1F1B", optimizer="fused")),
    Scenario("ZBH2, checkpoint", from_host, case("ZBH2", "checkpoints")),
    Scenario("VHalf, 16 bits", from_host, case("VHalf", autocast=True)),
    Scenario("VHalf, buffers", from_host, case("VHalf", "norms")),
    Scenario("1F1B, buffers", from_gpu, case("1F1B", "norms")),
    Scenario("ZBH2, tied ends", from_host, case("ZBH2", "lm tied")),
    Scenario("ZBV, tokens", from_host, case("ZBV", weigh="tokens")),
]  # fmt: skip
PROCESSES = [
    Scenario("ZBV, 2 processes", from_host, case("ZBV"), n_processes=2),
    Scenario("1F1B, 2 processes", from_gpu, case("1F1B"), n_processes=2),
    Scenario("two tensors, 2 processes", from_host, TWO_TENSORS, n_processes=2),
    Scenario("ZBV closed at once", closed_at_once, case("ZBV"), n_processes=2),
    *(
        Scenario(name, on_mesh, case("1F1B", model), how, n_processes=2, by_mode=True)
        for name, model, how in (
            ("mesh of replicas", "lm", {}),
            ("mesh of replicas, tied", "lm tied", {}),
            ("mesh of shards", "lm", {"shard": "parameters"}),
            ("mesh of shards, buffers", "lm",
             {"shard": "parameters", "alternating_buffers": True}),
        )
    ),
    Scenario("ZBH1, 2 processes", from_gpu, case("ZBH1"), n_processes=2),
    Scenario("VPP, 4 processes", from_host, case("VPP"), n_processes=4),
    Scenario("ZBH1, tied ends", from_host, case("ZBH1", "lm tied"), n_processes=2),
    Scenario("ZBH2 switches", from_host, case("ZBH2"), {"switches": True}, 2),
    Scenario("VHalf, barrier", from_host, case("VHalf", post_validation=False),
             n_processes=2),
    Scenario("1F1B, snapshots", from_host, case("1F1B", snapshots=True), n_processes=4),
    Scenario("ZBV, recompute, 4 processes", from_host, case("ZBV", recompute="all"),
             n_processes=4),
    *(
        Scenario(f"{mode}, {name}", on_mesh, case(mode, model), how | {"stages": 2},
                 n_processes=4, by_mode=True)
        for name, mode, model, how in (
            ("replicas", "ZBH2", "lm", {}),
            ("replicas, tied", "VPP", "lm tied", {}),
            ("optimizer shards", "ZBV", "lm", {"shard": "optimizer"}),
            ("gradient shards", "ZBH1", "lm", {"shard": "gradients"}),
            ("parameter shards", "ZBH2", "lm", {"shard": "parameters"}),
            ("two buffers", "ZBV", "lm",
             {"shard": "parameters", "alternating_buffers": True}),
        )
    ),
]  # fmt: skip
