"""Small trainings on the simulated device, and the runs that they must equal.

A scenario is what a user's script does beside its steps: it changes its batches as
soon as a step has begun, makes them on the GPU, evaluates, loads, reads times or
gradients. What the host must not wait for is watched: from the fourth step on a call
that holds it up is an error, and so is a copy of memory that is not pinned.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from cases import NUMBERS, Case, make
from gpu_waits import waits_are_errors
from torch import Tensor, nn

import simgpu
import zbpp
from zbpp import Costs, diagnostics

__all__ = ["ONE_PROCESS", "PROCESSES", "Numbers", "Scenario", "train"]

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
        case: settings of the pipeline.
        options: of `train`.
        n_processes: that train.
        by_mode: replicas add up in an order of their own: the reference is 1F1B in the
            same processes.
    """

    name: str
    case: Case
    options: Mapping[str, Any] = field(default_factory=dict)
    n_processes: int = 1
    by_mode: bool = False

    def run(self) -> Numbers:
        """Train, in each of the processes."""
        return train(self.case, **self.options)

    @property
    def reference(self) -> "Scenario":
        """What must give the same numbers, where everything runs at once."""
        if self.by_mode:
            return replace(self, name="1F1B", case=replace(self.case, mode="1F1B"))
        numbers = {name: getattr(self.case, name) for name in NUMBERS}
        case = Case(mode="FThenB", n_stages=1, device="cuda", **numbers)
        options = {k: x for k, x in self.options.items() if k in _OF_NUMBERS}
        return Scenario("FThenB", case, options)


_OF_NUMBERS = ("source", "optimizes", "overflows", "closes", "reads_times")
"""Options on which the numbers depend, or their names."""


def case(mode: str, model: str = "lm", **more: Any) -> Case:
    """With steps that are clipped, and rolled back where that comes late."""
    settings = {"clip": 0.7, "post_validation": True, "device": "cuda"} | more
    return Case(mode=mode, model=model, **settings)


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


class Mixing(nn.Module):
    """Makes batches on the GPU: what the caller's stream has to do takes long."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = (x * 3 + 1) % 11
        return x


@dataclass
class Loss:
    """The model's loss, times a factor that the host changes."""

    of: Case
    factor: float = 1.0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.of.of.loss_fn(outputs, targets) * self.factor


def train(
    of: Case,
    *,
    source: str = "host",
    folder: str | None = None,
    switches: bool = False,
    reads_times: bool = False,
    optimizes: bool = False,
    overflows: bool = False,
    closes: bool = False,
    mesh: Mapping[str, Any] | None = None,
    **limits: float,
) -> Numbers:
    """Train as a script does, which overwrites each batch once its step has begun.

    Args:
        of: settings of the pipeline.
        source: of batches: ``"host"``, ``"pinned"`` memory, or ``"gpu"``: the caller's
            stream makes them.
        folder: into which the first pipeline saves, for another one to go on.
        switches: to another order of the mode.
        reads_times: after each step, before its result.
        optimizes: the caller's stream adds up gradients, and takes each second step.
        overflows: the third step.
        closes: the pipeline while its last step is under way.
        mesh: of two replicas, each with its share of the batch: stages and shards.
        limits: of time.
    """
    loss, more, replica = Loss(of), dict(limits), None
    if overflows:
        more["loss_fn"] = loss
    if mesh is not None:
        options = {"stages": 1} | mesh
        sizes = zbpp.mesh(stages=options.pop("stages"), data_parallel=2)
        more["mesh"] = zbpp.DataParallel(mesh=sizes, **options)
        replica = sizes.get_local_rank("dp")
    batches = [of.of.batch(step, 8 if mesh is None else 16) for step in range(N_STEPS)]
    if source == "gpu":
        batches = [tuple(x.cuda() for x in batch) for batch in batches]
    numbers, results, mixing = Numbers(), [], Mixing()
    trained = start(of, **more)
    parameters = dict(trained.named_parameters())
    optimizer = None
    if optimizes:
        optimizer = torch.optim.SGD([*parameters.values()], lr=1e-1, momentum=0.9)
    is_usual = not (switches or folder or reads_times or optimizes or overflows)
    for step, batch in enumerate(batches):
        if folder is not None and step == 2:
            trained.save(folder, wait=True)
            trained.close()
            trained = start(of, **more)
            trained.load(folder)
        if switches and step == 2:
            trained.switch(another_order(of.mode, trained))
        if source != "host":
            batch = [mixing(x) if x.is_cuda else x.pin_memory() for x in batch]
        if replica is not None:
            batch = [x.tensor_split(2)[replica] for x in batch]
        loss.factor = float("inf") if overflows and step == 2 else 1.0
        with steady() if is_usual and step >= WARM_UP else nullcontext():
            results.append(trained.step(*batch))
        for x in batch:
            x.fill_(step)  # on a GPU as the caller's stream comes to it
        if reads_times:
            note_times(numbers, trained, step)
        if optimizer is not None and step % 2:
            optimizer.step()
            optimizer.zero_grad()
    if closes:
        trained.close()
    else:
        note_end(numbers, of, trained, results, evaluates=mesh is None)
        parameters = dict(trained.named_parameters())
    for name, p in parameters.items():
        # by the caller's stream, which the host then waits for, and no other
        p = p.to_local() if hasattr(p, "to_local") else p
        numbers[f"{name} of {replica}"] = p.detach().cpu()
        if optimizes:
            numbers[f"gradient of {name}"] = None if p.grad is None else p.grad.cpu()
    if not closes:
        trained.close()
    return numbers


def note_times(numbers: Numbers, trained: zbpp.Pipeline, step: int) -> None:
    slots = [slot for row in diagnostics.timeline(trained).rows for slot in row]
    name = f"no time runs backwards in step {step}"
    numbers[name] = all(slot.end >= slot.start for slot in slots)
    for executor in trained.stages.executors.values():
        executor.times.norm_seconds()


def note_end(
    numbers: Numbers,
    of: Case,
    trained: zbpp.Pipeline,
    results: list[Any],
    *,
    evaluates: bool,
) -> None:
    """Results, an evaluation and a prediction."""
    numbers["steps"] = [(result.loss, result.grad_norm) for result in results]
    if evaluates:
        x, y = of.of.batch(99, 7)
        numbers["validation"] = trained.evaluate(x, y, n_microbatches=3)
        outputs = trained.predict(of.batch(98)[0], everywhere=True)
        if isinstance(outputs, Tensor):
            numbers["outputs"] = float(outputs.double().sum())


def another_order(mode: str, trained: zbpp.Pipeline) -> zbpp.Plan:
    return zbpp.plan(
        mode,
        n_stages=trained.schedule.n_stages,
        n_microbatches=trained.n_microbatches,
        costs=Costs(f=1, b=3, w=2),
    )


_NOTHING_TO_VALIDATE = {"optimizer": None, "clip": None, "post_validation": None}
OF_GPU = {"source": "gpu"}
TWO_TENSORS = case("ZBH1", "tuples", split=(7, 1))
ONE_PROCESS = [
    Scenario("ZBV", case("ZBV")),
    Scenario("ZBH1", case("ZBH1")),
    Scenario("ZBH1, batches of the GPU", case("ZBH1"), OF_GPU),
    Scenario("1F1B, pinned batches", case("1F1B"), {"source": "pinned"}),
    Scenario("ZBV, optimizer of the user", case("ZBV", **_NOTHING_TO_VALIDATE),
             {"optimizes": True}),
    Scenario("ZBH1, dropout", case("ZBH1", "lm dropout")),
    Scenario("ZBH1, times", case("ZBH1"), {"reads_times": True}),
    Scenario("DualPipeV, points", case("DualPipeV", "exchange")),
    Scenario("DualPipeV, points of the GPU", case("DualPipeV", "exchange"), OF_GPU),
    Scenario("ZBV, closed at once", case("ZBV"), {"closes": True}),
    Scenario("ZBV, loss scale", case("ZBV", loss_scale=8.0), {"overflows": True}),
    Scenario("VPP, snapshots", case("VPP", snapshots=True)),
    Scenario("ZBH2, barrier", case("ZBH2", post_validation=False)),
    Scenario("ZBV, recompute", case("ZBV", recompute="all")),
    Scenario("1F1B, recompute, points",
             case("1F1B", "exchange, dropout", recompute="all")),
    Scenario("ZB, segments", case("ZB", "exchange, dropout", parts=True)),
    Scenario("ZBH1, switches", case("ZBH1"), {"switches": True}),
    Scenario("1F1B, fused", case("1F1B", optimizer="fused")),
    Scenario("ZBH2, checkpoint", case("ZBH2", "checkpoints")),
    Scenario("VHalf, 16 bits", case("VHalf", autocast=True)),
    Scenario("VHalf, buffers", case("VHalf", "norms")),
    Scenario("1F1B, buffers", case("1F1B", "norms"), OF_GPU),
    Scenario("ZBH2, tied ends", case("ZBH2", "lm tied")),
    Scenario("ZBV, tokens", case("ZBV", weigh="tokens")),
]  # fmt: skip
PROCESSES = [
    Scenario("ZBV, 2 processes", case("ZBV"), n_processes=2),
    Scenario("1F1B, 2 processes", case("1F1B"), OF_GPU, n_processes=2),
    Scenario("two tensors, 2 processes", TWO_TENSORS, n_processes=2),
    Scenario("ZBV closed at once", case("ZBV"), {"closes": True}, n_processes=2),
    *(
        Scenario(name, case("1F1B", model), {"mesh": how}, n_processes=2, by_mode=True)
        for name, model, how in (
            ("mesh of replicas", "lm", {}),
            ("mesh of replicas, tied", "lm tied", {}),
            ("mesh of shards", "lm", {"shard": "parameters"}),
            ("mesh of shards, buffers", "lm",
             {"shard": "parameters", "alternating_buffers": True}),
        )
    ),
    Scenario("ZBH1, 2 processes", case("ZBH1"), OF_GPU, n_processes=2),
    Scenario("VPP, 4 processes", case("VPP"), n_processes=4),
    Scenario("ZBH1, tied ends", case("ZBH1", "lm tied"), n_processes=2),
    Scenario("ZBH2 switches", case("ZBH2"), {"switches": True}, 2),
    Scenario("VHalf, barrier", case("VHalf", post_validation=False),
             n_processes=2),
    Scenario("1F1B, snapshots", case("1F1B", snapshots=True), n_processes=4),
    Scenario("ZBV, recompute, 4 processes", case("ZBV", recompute="all"),
             n_processes=4),
    *(
        Scenario(f"{mode}, {name}", case(mode, model), {"mesh": how | {"stages": 2}},
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
