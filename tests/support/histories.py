"""Histories: what scripts do with a pipeline, step by step, and what they can see.

`Run` is one pipeline; its methods are the actions of a history. Two runs of one history
must show the same bits, whatever schedule, stages and rollbacks they have.
"""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from same import flat
from torch import Tensor, nn

import zbpp
from zbpp.runtime import LossScaler

CLIP = 50.0
"""Far above the norm of a usual step."""
ONE_CHUNK = ("1F1B", "ZBH1", "ZBH2", "ZB", "FThenB")
TWO_CHUNKS = ("ZBV", "VHalf", "VMin")


@dataclass(frozen=True, kw_only=True)
class Case(cases.Case):
    """A pipeline, without what a history does to it.

    Args:
        scheduler: a name in `SCHEDULERS`.
        grows: the loss scale grows, and shrinks after skipped steps.
        max_consecutive_skips: as for `zbpp.StepPolicy`.
    """

    model: str = "buffers"
    n_microbatches: int = 3
    optimizer: str = "groups"
    clip: float | None = CLIP
    weigh: str | None = "samples"
    post_validation: bool | None = True
    scheduler: str = "none"
    grows: bool = False
    max_consecutive_skips: int | None = None

    @property
    def n_parts(self) -> int:
        """Micro-batches of a step."""
        return self.n_microbatches * max(1, self.calls)

    @property
    def reference(self) -> "Case":
        """A pipeline of one stage that waits for the norm."""
        if self.model == "shrunk weights":  # between F and B, so the order matters
            return replace(self, post_validation=False)
        return replace(
            self,
            mode="FThenB",
            n_stages=1,
            n_microbatches=self.n_parts,
            calls=0,
            post_validation=False,
        )


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any] | None] = {
    "none": None,
    "steps": lambda x: torch.optim.lr_scheduler.StepLR(x, 2, gamma=0.7),
    "cosine": lambda x: torch.optim.lr_scheduler.CosineAnnealingLR(x, 40),
    "one cycle": lambda x: torch.optim.lr_scheduler.OneCycleLR(
        x, 0.05, total_steps=400, cycle_momentum="betas" in x.defaults
    ),
}


@dataclass(frozen=True)
class BadGradient:
    """A gradient of one micro-batch times a factor; without a layer, its targets.

    Args:
        factor: of the gradient.
        microbatch: of the step.
        layer: the parameter is its weight in layers 2 and 5, else its first vector.
    """

    factor: float
    microbatch: int = 0
    layer: int | None = None


SPIKE, INF = BadGradient(1e5, 0, 2), BadGradient(float("inf"), 0, 5)


Action = tuple[Any, ...]
"""The name of a method of `Run`, and its arguments."""


class Run:
    """One pipeline, and a script that uses it; methods are the actions of a history.

    Args:
        case: what is trained.
        folder: for checkpoints.
    """

    def __init__(self, case: Case, folder: Path | str = "") -> None:
        self.case, self.folder = case, folder
        self.results: list[Any] = []
        self.frozen: set[tuple[int, str]] = set()
        self._begin()

    def do(self, action: str, *args: Any, **more: Any) -> Any:
        """Act as a script does, whose random numbers stay as they are."""
        before = generators()
        visible = getattr(self, action)(*args, **more)
        assert generators() == before, f"{action} has drawn random numbers"
        return visible

    # Training.

    def step(
        self, bad: BadGradient | None = None, *, parts: bool = False, key: bool = False
    ) -> None:
        """Step on a batch, or on parts of it; the result is read later."""
        self._bad = bad
        self._n_gradients.clear()
        pipeline, n = self.pipeline, max(1, self.case.calls)
        inputs, targets = self.batch(pipeline.n_steps)
        if n == 1 and not parts:
            numbers = torch.arange(len(inputs)) if key else None
            self.results.append(pipeline.step(inputs, targets, key=numbers))
        else:
            size = len(inputs) // n
            for i in range(n):
                part = slice(i * size, (i + 1) * size)
                pipeline.forward_backward(inputs[part], targets[part], n_calls=n)
            self.results.append(pipeline.optim_step())
        self._bad = None
        assert all(p.grad is None for p in self._names), "gradients are left"
        for optimizer in pipeline.optimizers:  # as scripts do, without need
            optimizer.zero_grad(set_to_none=False)

    def read(self) -> list[Any]:
        """The results of the steps so far."""
        return [(x.loss, x.grad_norm, x.skipped, x.losses) for x in self.results]

    def peek(self) -> None:
        """Rank 0 alone looks at the last step."""
        if self.pipeline.rank == 0:
            assert self.results[-1].losses
            self.pipeline.synchronize()

    def evaluate(self, n_microbatches: int = 2) -> float:
        inputs, targets = self.batch(99, n_microbatches)
        return self.pipeline.evaluate(inputs, targets, n_microbatches=n_microbatches)

    def predict(self) -> Any:
        n = self.case.n_parts
        outputs = self.pipeline.predict(self.batch(98)[0], n_microbatches=n)
        return None if outputs is None else outputs.clone()

    # Between steps.

    def synchronize(self) -> None:
        self.pipeline.synchronize()

    def switch(self, mode: str) -> None:
        """Go on with another schedule of the same placement."""
        pipeline = self.pipeline
        n_stages, m = pipeline.schedule.n_stages, pipeline.n_microbatches
        pipeline.switch(zbpp.plan(mode, n_stages=n_stages, n_microbatches=m))

    def move(self, mode: str, n_stages: int | None, by: str) -> None:
        """Go on in a new pipeline, from a checkpoint or a state."""
        old = self.pipeline
        if by == "file":
            old.save(self.folder, keep=1, wait=True, extra={"steps": old.n_steps})
        state = old.state_dict()
        old.close()
        n_stages = n_stages or self.case.n_stages
        self.case = replace(self.case, mode=mode, n_stages=n_stages)
        if by == "file":
            self._begin()
            assert self.pipeline.load(self.folder) == {"steps": old.n_steps}
            self.has_saved = True
            self._thaw()
        else:
            self.restart(state)

    def restart(self, state: dict[str, Any]) -> None:
        """Go on from a state in a new pipeline."""
        self._begin()
        self.pipeline.load_state_dict(state)
        self._thaw()

    def write(self, layer: int, how: str) -> None:
        """Write to a weight, which `synchronize` allows."""
        self.pipeline.synchronize()
        places = self.places(layer, self.names[layer][0])
        here = [self.layers[i].get_parameter(x) for i, x in places if i in self.layers]
        for weight in {x.data_ptr(): x for x in here}.values():  # each memory once
            with torch.no_grad():
                if how == "in place":
                    weight.mul_(0.5)
                elif how == "data":
                    weight.data.mul_(0.5)
                else:
                    weight.data = weight.data * 0.5

    def load_layer(self, layer: int) -> None:
        """Through the module, which settles the last step."""
        if (module := self.layers.get(layer)) is not None:
            state = module.state_dict()
            for name, p in module.named_parameters():
                if p.dim() == 1:
                    state[name] = state[name] + 0.25
            module.load_state_dict(state)

    def set_rate(self, factor: float) -> None:
        for optimizer in self.pipeline.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor

    def schedule_rates(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()

    def freeze(self, layer: int, number: int = 0) -> None:
        """Freeze a parameter of a layer, or let it learn again."""
        names = self.names[layer]
        self.frozen ^= {self.places(layer, names[number % len(names)])[0]}
        self._thaw()

    def places(self, layer: int, name: str) -> tuple[tuple[int, str], ...]:
        """Layers and names of a parameter, or of all that it is tied to."""
        ties = self.case.of.ties
        return next((tie for tie in ties if (layer, name) in tie), ((layer, name),))

    # What can be seen.

    def look(self, view: str = "state") -> dict[str, Any]:
        """The validated state, as a script gets it."""
        pipeline = self.pipeline
        if view == "state":
            return dict(flat(pipeline.state_dict()))
        if view == "named":
            named = [*pipeline.named_parameters(), *pipeline.named_buffers()]
            return dict(flat(dict(named)))
        if view == "modules":
            return dict(flat({i: x.state_dict() for i, x in self.layers.items()}))
        every: dict[str, Any] = {}
        for optimizer in pipeline.optimizers:
            state = optimizer.state_dict()["state"]
            parameters = [p for g in optimizer.param_groups for p in g["params"]]
            every |= {
                self._names[parameters[i]]: values
                for i, values in state.items()
                if parameters[i] in self._names  # else the copy of a tied one
            }
        return dict(flat(every))

    def close(self) -> None:
        self.pipeline.close()

    # Steps with an end of another kind.

    def interrupted(self, error: BaseException, layer: int, where: str) -> None:
        """A step in which a pass raises; the pipeline has then ended."""
        self.fail_in(layer, where, error)
        with pytest.raises(type(error)):
            self.step()

    def fail_in(self, layer: int, where: str, error: BaseException) -> None:
        """Let the passes of a layer raise an error from now on, in F or in B."""

        def fail(*_: Any) -> None:
            raise error

        def fail_later(_: nn.Module, __: Any, outputs: Tensor) -> None:
            if outputs.requires_grad:
                outputs.register_hook(fail)

        hook = fail if where == "F" else fail_later
        self.layers[layer].register_forward_hook(hook)

    def look_within(self, layer: int) -> None:
        """A step in which a forward looks at the state, as a signal handler may."""
        refusals = []

        def ask(*_: Any) -> None:
            with pytest.raises(RuntimeError, match="in the middle of a step"):
                self.pipeline.state_dict()
            refusals.append(1)

        handle = self.layers[layer].register_forward_hook(ask)
        self.step()
        handle.remove()
        assert refusals

    def refusals(self) -> set[str]:
        """The errors of a pipeline that has ended, for every call."""
        pipeline, texts = self.pipeline, set()
        inputs, targets = self.batch(0, self.case.n_microbatches)
        for call in (
            lambda: pipeline.step(inputs, targets),
            lambda: pipeline.save(self.folder),
            pipeline.state_dict,
            lambda: pipeline.load_state_dict({}),
            pipeline.synchronize,
            lambda: pipeline.evaluate(inputs, targets),
            lambda: pipeline.predict(inputs),
            lambda: pipeline.load(self.folder),
        ):
            with pytest.raises(RuntimeError) as refused:
                call()
            texts.add(str(refused.value))
        return texts

    # Details.

    def _begin(self) -> None:
        case, self.has_saved = self.case, False
        outer = torch.get_rng_state()
        layers = case.of.layers()
        self.names = [[name for name, _ in x.named_parameters()] for x in layers]
        torch.default_generator.manual_seed(7)  # decides draws without a seed
        more: dict[str, Any] = {"max_consecutive_skips": case.max_consecutive_skips}
        if case.grows:
            more["loss_scale"] = LossScaler(2.0**8, growth_interval=2)
        self.pipeline = cases.make(case, model=layers, **more)
        torch.set_rng_state(outer)
        # a tied one has the name of its first layer, wherever that layer is
        named = sorted(self.pipeline.named_parameters(), key=lambda x: x[0])
        self._names = {p: name for name, p in reversed(named)}
        here = (name.partition(".")[2] for name, _ in self.pipeline.named_layers())
        self.layers: dict[int, Any] = {int(i): layers[int(i)] for i in here}
        make = SCHEDULERS[case.scheduler]
        self.schedulers = [make(x) for x in self.pipeline.optimizers if make]
        self.pipeline.attach(*self.schedulers)
        self._bad: BadGradient | None = None
        self._n_gradients: dict[int, int] = {}
        for index, layer in self.layers.items():
            n_dims = 2 if index in (SPIKE.layer, INF.layer) else 1
            for p in [p for p in layer.parameters() if p.dim() == n_dims][:1]:
                p.register_hook(partial(self._multiplied, index))

    def _multiplied(self, layer: int, gradient: Tensor) -> Tensor | None:
        """A parameter's hook: called once a micro-batch, in their order."""
        number = self._n_gradients.get(layer, 0)
        self._n_gradients[layer] = number + 1
        bad = self._bad
        if bad is None or layer != bad.layer:
            return None
        is_it = number == bad.microbatch % self.case.n_parts
        return gradient * bad.factor if is_it else None

    def _thaw(self) -> None:
        """Let parameters learn, but for those that are frozen."""
        for index, layer in self.layers.items():
            for name, parameter in layer.named_parameters():
                is_frozen = self.places(index, name)[0] in self.frozen
                parameter.requires_grad_(not is_frozen)

    def batch(self, step: int, n: int | None = None) -> tuple[Any, Any]:
        """One tensor, or one per micro-batch where they are changed in place."""
        n, of = n or self.case.n_parts, self.case.of
        inputs, targets = of.batch(step, 2 * n)
        bad = self._bad
        if bad is not None and bad.layer is None and targets.is_floating_point():
            i = 2 * (bad.microbatch % n)
            targets[i : i + 2] *= bad.factor
        if self.case.model not in ("in place", "changed targets"):
            return inputs, targets
        return [[part.clone() for part in y.chunk(n)] for y in (inputs, targets)]


def generators() -> tuple[Any, ...]:
    """The states of the generators that a script may use."""
    states = [torch.get_rng_state().numpy().tobytes(), random.getstate()]
    if "numpy" in sys.modules:
        _, numbers, *rest = sys.modules["numpy"].random.get_state()
        states += [numbers.tobytes(), rest]
    return tuple(states)
