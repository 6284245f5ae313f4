"""Histories: what scripts do with a pipeline, step by step, and what they can see.

`Run` is one pipeline; its methods are the actions of a history. Two runs of one history
must show the same bits, whatever schedule, stages and rollbacks they have.
"""

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import unknown
from same import flat
from torch import Tensor, nn

import zbpp
from zbpp.runtime import LossScaler

N_LAYERS, WIDTH = 8, 8
CLIP = 500.0
"""Far above the norm of a usual step."""
ONE_CHUNK = ("1F1B", "ZBH1", "ZBH2", "ZB", "FThenB")
TWO_CHUNKS = ("ZBV", "VHalf", "VMin")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pipeline, without what a history does to it.

    Args:
        mode: of the schedule.
        n_stages: in this process; None: one per process.
        n_microbatches: of one call.
        n_calls: of ``forward_backward`` in a step.
        dtype: of parameters.
        optimizer: a name in `OPTIMIZERS`.
        scheduler: a name in `SCHEDULERS`.
        change: what forwards do beside their output, a name in `CHANGES`.
        tied: layers that share a weight.
        batch_norm: in place of layer norms.
        dropout: its rate.
        loss_scale: grows, and shrinks after skipped steps.
        snapshots: zbpp does not know the optimizers, and copies them whole.
        seed: of dropout; None: that of torch's generator.
        post_validation: as for `zbpp.StepPolicy`; the next one too.
    """

    mode: str = "ZBH1"
    n_stages: int | None = 2
    n_microbatches: int = 3
    n_calls: int = 1
    dtype: torch.dtype = torch.float32
    optimizer: str = "adamw"
    scheduler: str = "none"
    change: str = "nothing"
    tied: tuple[int, ...] = ()
    batch_norm: bool = False
    dropout: float = 0.0
    loss_scale: bool = False
    snapshots: bool = False
    seed: int | None = 3
    post_validation: bool | None = True
    max_consecutive_skips: int | None = None

    @property
    def reference(self) -> "Case":
        """A pipeline of one stage that waits for the norm."""
        if self.change == "shrunk_weight":  # between F and B, so the order matters
            return replace(self, post_validation=False)
        return replace(
            self,
            mode="FThenB",
            n_stages=1,
            n_microbatches=self.n_microbatches * self.n_calls,
            n_calls=1,
            post_validation=False,
        )


# The model: what its forwards may change beside their output.


def in_place(layer: "Layer", x: Tensor) -> Tensor:
    return x.sub_(0.1)


def pythons_numbers(layer: "Layer", x: Tensor) -> Tensor:
    return x * (1 + 0.2 * random.random())


def unmarked_mean(layer: "Layer", x: Tensor) -> Tensor:
    """As some vector quantizers do: no version counter sees it."""
    layer.mean.data.lerp_(x.detach().float().mean(0), 0.5)
    return x


def late_buffer(layer: "Layer", x: Tensor) -> Tensor:
    if not hasattr(layer, "cache"):
        layer.register_buffer("cache", torch.ones(WIDTH), persistent=False)
    return x + layer.cache.to(x.dtype)


def shrunk_weight(layer: "Layer", x: Tensor) -> Tensor:
    layer.linear.weight.data.mul_(0.99)
    return x


def clamped_weight(layer: "Layer", x: Tensor) -> Tensor:
    """As weight clipping does: no version counter sees it."""
    layer.linear.weight.data.clamp_(-0.2, 0.2)
    return x


def replaced_weight(layer: "Layer", x: Tensor) -> Tensor:
    layer.linear.weight.data = layer.linear.weight.data.clamp(-0.2, 0.2)
    return x


CHANGES: dict[str, Callable[["Layer", Tensor], Tensor] | None] = {
    "nothing": None,
    "loss": None,  # which changes its targets
} | {
    change.__name__: change
    for change in (
        in_place, pythons_numbers, unmarked_mean, late_buffer, shrunk_weight,
        clamped_weight, replaced_weight,
    )
}  # fmt: skip


class Layer(nn.Module):
    """A norm, a matmul, dropout, and buffers that every forward changes."""

    def __init__(self, case: Case, *, changes: bool) -> None:
        super().__init__()
        norm = nn.BatchNorm1d if case.batch_norm else nn.LayerNorm
        self.norm = norm(WIDTH).to(case.dtype)
        self.linear = nn.Linear(WIDTH, WIDTH).to(case.dtype)
        self.dropout = nn.Dropout(case.dropout)
        self.change = CHANGES[case.change] if changes else None
        self.on_forward: Callable[[], object] = int
        self.error_in_backward: BaseException | None = None
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.on_forward()
        if self.change is not None:
            x = self.change(self, x)
        y = self.dropout(self.linear(self.norm(x)))
        self.mean.lerp_(y.detach().float().mean(0), 0.1)
        self.seen = self.seen + 1  # replaced, not changed in place
        y = x + torch.tanh(y) * 0.5 + self.mean.to(x.dtype) * 0.01
        if self.error_in_backward is not None and y.requires_grad:
            y.register_hook(self.fail)
        return y

    def fail(self, _: Tensor) -> None:
        assert self.error_in_backward is not None
        raise self.error_in_backward


def build(case: Case) -> list[nn.Module]:
    layers = []
    for index in range(N_LAYERS):
        torch.default_generator.manual_seed(index)
        layers.append(Layer(case, changes=index in (0, 5)))
    for index in case.tied[1:]:
        layers[index].linear.weight = layers[case.tied[0]].linear.weight
    return layers


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs.float() - targets) ** 2).sum()


def changing_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return squares(outputs, targets.mul_(0.5))


# Optimizers: torch's, unknown ones, several together.

Named = list[tuple[str, nn.Parameter]]


class Counting(torch.optim.SGD):
    """Unknown to zbpp: counts its steps in a group, a number and a tensor.

    The group's count alone is saved. The others must agree with it: else the rate is
    another one.
    """

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.calls, self.total = 0, torch.zeros(())
        self.before: int | None = None  # steps of the run that this one goes on from

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        self.calls += 1
        self.total += 1
        for group in self.param_groups:
            group["count"] = count = group.get("count", 0) + 1
            self.before = count - 1 if self.before is None else self.before
            ahead = self.calls + float(self.total) - 2 * (count - self.before)
            rate = group["lr"] / (count + ahead)
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["sum"] = state.get("sum", 0.0) + p.grad
                    p.sub_(state["sum"], alpha=rate)


def two_groups(parameters: Any) -> list[dict[str, Any]]:
    """Weights decay, the rest does not."""
    matrices = [p for p in parameters if p.dim() > 1]
    others = [p for p in parameters if p.dim() < 2]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]


def several(named_parameters: Named) -> list[torch.optim.Optimizer]:
    """One for the matrices, one that zbpp does not know, one for the rest."""
    matrices = [p for _, p in named_parameters if p.dim() > 1]
    biases = [p for n, p in named_parameters if n.endswith("linear.bias")]
    norms = [p for n, p in named_parameters if "norm" in n]
    return [
        torch.optim.SGD(matrices, lr=1e-2, momentum=0.9),
        Counting(biases, lr=1e-2),
        torch.optim.AdamW(norms, lr=1e-2, fused=True),
    ]


def muon(named_parameters: Named) -> list[torch.optim.Optimizer]:
    """It takes matrices alone."""
    matrices = [p for _, p in named_parameters if p.dim() > 1]
    others = [p for _, p in named_parameters if p.dim() < 2]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]


def matrices_only(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.dim() > 1], lr=1e-2)


def hooked(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """A hook cannot be rolled back, so the step waits for the norm."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def of_torch() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every optimizer of torch that steps dense gradients, in all its ways."""
    options: dict[str, dict[str, Any]] = {
        "Adam": {"amsgrad": True, "weight_decay": 0.1},
        "AdamW": {"maximize": True},
        "NAdam": {"decoupled_weight_decay": True},
        "RMSprop": {"momentum": 0.9, "centered": True},
        "SGD": {"momentum": 0.9, "nesterov": True},
    }
    for name, kind in vars(torch.optim).items():
        if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
            continue
        if name in ("Optimizer", "LBFGS", "SparseAdam", "Muon"):
            continue
        yield name, partial(kind, lr=1e-2, **options.get(name, {}))
        for way in {"foreach", "fused"} & signature(kind).parameters.keys():
            yield f"{name} {way}", partial(kind, lr=1e-2, **{way: True})


OPTIMIZERS: dict[str, Callable[..., Any]] = dict(sorted(of_torch())) | {
    "adamw": lambda p: torch.optim.AdamW(two_groups(p), lr=1e-2),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
    "counting": partial(Counting, lr=1e-2),
    "several": several,
    "matrices only": matrices_only,
    "hooked": hooked,
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["muon"] = muon

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
    """A gradient of one micro-batch times a factor; without a layer, its targets."""

    factor: float
    microbatch: int = 0
    layer: int | None = None
    parameter: str = "norm.weight"


SPIKE = BadGradient(1e5, 0, 2, "linear.weight")
INF = BadGradient(float("inf"), 0, 5, "linear.weight")


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
        self.frozen: set[str] = set()
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
        pipeline, n = self.pipeline, self.case.n_calls
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
        """What the steps so far say."""
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
        n = self._n_microbatches
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
        tied = self.case.tied if layer in self.case.tied else (layer,)
        here = [self.layers[i].linear.weight for i in tied if i in self.layers]
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
            state["linear.bias"] = state["linear.bias"] + 0.25
            module.load_state_dict(state)

    def set_rate(self, factor: float) -> None:
        for optimizer in self.pipeline.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor

    def schedule_rates(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()

    def freeze(self, name: str) -> None:
        """Freeze a parameter, or let it learn again."""
        self.frozen ^= {name}
        self._thaw()

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
        victim = self.layers[layer]
        if where == "F":

            def fail() -> None:
                raise error

            victim.on_forward = fail
        else:
            victim.error_in_backward = error
        with pytest.raises(type(error)):
            self.step()

    def look_within(self, layer: int) -> None:
        """A step in which a forward looks at the state, as a signal handler may."""
        refusals = []

        def ask() -> None:
            with pytest.raises(RuntimeError, match="in the middle of a step"):
                self.pipeline.state_dict()
            refusals.append(1)

        self.layers[layer].on_forward = ask
        self.step()
        self.layers[layer].on_forward = int
        assert refusals

    def refusals(self) -> set[str]:
        """What a pipeline says that has ended, whatever is called."""
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

    @property
    def _n_microbatches(self) -> int:
        return self.case.n_microbatches * self.case.n_calls

    def _begin(self) -> None:
        case, self.has_saved = self.case, False
        outer = torch.get_rng_state()
        layers = build(case)
        torch.default_generator.manual_seed(7)  # decides dropout without a seed
        optimizer = OPTIMIZERS[case.optimizer]
        scaler = LossScaler(2.0**8, growth_interval=2) if case.loss_scale else None
        self.pipeline = zbpp.Pipeline(
            layers,
            case.mode,
            n_stages=case.n_stages,
            n_microbatches=case.n_microbatches,
            loss_fn=changing_squares if case.change == "loss" else squares,
            optimizer=unknown(optimizer) if case.snapshots else optimizer,
            clip_grad_norm=CLIP,
            numerics=zbpp.Numerics(seed=case.seed, weigh="samples"),
            step=zbpp.StepPolicy(
                post_validation=case.post_validation,
                loss_scale=scaler,
                max_consecutive_skips=case.max_consecutive_skips,
            ),
            execution=zbpp.Execution(timeout_s=100.0),
        )
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
        self._n_gradients: dict[str, int] = {}
        for index, layer in self.layers.items():
            names = ["norm.weight", "linear.bias"]
            names += ["linear.weight"] if index in (SPIKE.layer, INF.layer) else []
            for name in names:
                hook = partial(self._multiplied, f"{index}.{name}")
                layer.get_parameter(name).register_hook(hook)

    def _multiplied(self, name: str, gradient: Tensor) -> Tensor | None:
        """A parameter's hook: called once a micro-batch, in their order."""
        number = self._n_gradients.get(name, 0)
        self._n_gradients[name] = number + 1
        bad = self._bad
        if bad is None or name != f"{bad.layer}.{bad.parameter}":
            return None
        is_it = number == bad.microbatch % self._n_microbatches
        return gradient * bad.factor if is_it else None

    def _thaw(self) -> None:
        """Let parameters learn, but for those that are frozen."""
        for index, layer in self.layers.items():
            for name, parameter in layer.named_parameters():
                parameter.requires_grad_(f"{index}.{name}" not in self.frozen)
                if name == "linear.weight" and index in self.case.tied:
                    first = f"{self.case.tied[0]}.{name}"
                    parameter.requires_grad_(first not in self.frozen)

    def batch(self, step: int, n: int | None = None) -> tuple[Any, Any]:
        """One tensor, or one per micro-batch where they are changed in place."""
        n = n or self._n_microbatches
        generator = torch.Generator().manual_seed(1000 + step)
        x = torch.randn(2 * n, WIDTH, generator=generator)
        inputs, targets = x.to(self.case.dtype), x.roll(1, 1)
        if self._bad is not None and self._bad.layer is None:
            i = 2 * (self._bad.microbatch % n)
            targets[i : i + 2] *= self._bad.factor
        if self.case.change not in ("in_place", "loss"):
            return inputs, targets
        return [[part.clone() for part in y.chunk(n)] for y in (inputs, targets)]


def generators() -> tuple[Any, ...]:
    """The states of the generators that a script may use."""
    states = [torch.get_rng_state().numpy().tobytes(), random.getstate()]
    if "numpy" in sys.modules:
        _, numbers, *rest = sys.modules["numpy"].random.get_state()
        states += [numbers.tobytes(), rest]
    return tuple(states)
