"""Policies of computing, stepping, executing and replicating: values with defaults.

`zbpp.Pipeline` takes one of each. Nothing here imports torch when ``import zbpp`` does.
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zbpp.core import RequestError, a_kind
from zbpp.core.reductions import Reduction
from zbpp.core.replicas import Shard

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from zbpp.runtime.compiled.backend import Compiling
    from zbpp.runtime.microbatches import Weigh, WeighName

_MAX_SECONDS = 1e9
"""30 years; torch counts time-outs in whole units of 64 bits."""


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """The choices that decide the bits of losses and gradients.

    Args:
        autocast: compute dtype of the forward, for instance ``torch.bfloat16``.
        seed: of the random numbers that layers draw, by step, layer and micro-batch,
            alike in all modes; None: it depends on torch's generator (of rank 0)
            when the pipeline is built. Steps leave the generators as they were.
        first_step: number of the first step, for dropout; `Pipeline.load` sets it too.
        exact_sums: add gradients in micro-batch order, rounded as ``loss.backward()``
            does; then all modes agree to the last bit. False adds those of plain
            matrices within their products: a few per cent faster, with less memory.
        weigh: the loss of the batch is a mean over these: ``"samples"``; ``"tokens"``,
            the targets (or ``targets["labels"]``) that are not -100; or a function
            that counts the targets of a micro-batch. ``"sum"``: ``loss_fn`` is a sum
            over its micro-batch, and the loss of the batch is the sum of all, over
            replicas too. None: the sum if ``loss_fn`` has ``reduction="sum"``; else the
            model's, or samples, or tokens where processes read slices of the same
            sequences.

    Raises:
        RequestError: a value is none of these.
    """

    autocast: "torch.dtype | None" = None
    seed: int | None = None
    first_step: int = 0
    exact_sums: bool = True
    weigh: "WeighName | Weigh | None" = None

    def __post_init__(self) -> None:
        if self.autocast is not None and not _is_floating(self.autocast):
            raise RequestError(
                f"autocast is {self.autocast!r}; give a dtype, torch.bfloat16 or "
                "torch.float16, or None"
            )
        if self.seed is not None and not is_whole(self.seed):
            raise RequestError(f"seed is {self.seed!r}; give a whole number, or None")
        if not (is_whole(self.first_step) and self.first_step >= 0):
            raise RequestError(
                f"first_step is {self.first_step!r}; give the number of steps done "
                "before, from 0 on (pipeline.n_steps when the state was saved)"
            )


class LossScaler:
    """The factor on the loss that keeps fp16 gradients in range, kept on the host.

    Its rule is that of ``torch.amp.GradScaler``.

    Args:
        scale: of the first step.
        growth_factor: of the scale.
        backoff_factor: of the scale, when it shrinks.
        growth_interval: good steps in a row before it grows; 0 keeps it constant.

    Raises:
        RequestError: a value is out of its range.

    >>> scaler = LossScaler(8.0, growth_interval=2)
    >>> for finite in (False, True, True):
    ...     scaler.update(finite)
    >>> scaler.scale
    8.0
    """

    def __init__(
        self,
        scale: float = 2.0**16,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if not (0 < scale < math.inf and growth_factor >= 1 >= backoff_factor > 0):
            raise RequestError(
                f"a loss scale of {scale:g} that grows by {growth_factor:g} and "
                f"shrinks by {backoff_factor:g} makes no sense; choose a positive "
                "scale, a growth_factor of at least 1, a backoff_factor of at most 1"
            )
        if growth_interval < 0:
            raise RequestError(
                f"growth_interval is {growth_interval}; choose 0 or more"
            )
        self.scale = scale
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._good_steps = 0

    def __repr__(self) -> str:
        return f"LossScaler({vars(self)})"  # ranks compare it

    def update(self, finite: bool) -> None:
        """Count a decided step; ``finite`` is true if it was taken."""
        if self._growth_interval == 0:
            return
        if not finite:
            self.scale *= self._backoff_factor
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == self._growth_interval:
            grown = self.scale * self._growth_factor
            self.scale = grown if math.isfinite(grown) else self.scale
            self._good_steps = 0

    @property
    def may_shrink(self) -> bool:
        """A skipped step may be the search for a scale, and no fault."""
        return self._growth_interval > 0 and self.scale > 1.0

    def state_dict(self) -> dict[str, float]:
        """The values that change from step to step."""
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a saved state."""
        self.scale = float(state["scale"])
        self._good_steps = int(state["good_steps"])


@dataclass(frozen=True, kw_only=True)
class StepPolicy:
    """When the optimizer steps, and when it leaves a step out.

    Args:
        post_validation: step without waiting for the other stages' gradient norms, and
            roll the step back in the next one if they ask for it. None: where the
            schedule splits the backward or has V's, after 10 steps in a row that no
            norm has clipped or skipped; True: in every step. The results are the same.
        max_consecutive_skips: with an Inf or NaN gradient, before the run ends; None:
            any number.
        loss_scale: of fp16 gradients: a number, or a `zbpp.runtime.LossScaler`.
        offload_optimizer: keep optimizer state, and 32-bit parameters, in host memory,
            and step there; see docs/how_to/offload.md.

    Raises:
        RequestError: a value is none of these.
    """

    post_validation: bool | None = None
    max_consecutive_skips: int | None = 5
    loss_scale: LossScaler | float | None = None
    offload_optimizer: bool = False

    def __post_init__(self) -> None:
        check_count("max_consecutive_skips", self.max_consecutive_skips)
        scale = self.loss_scale
        if not (scale is None or is_number(scale) or isinstance(scale, LossScaler)):
            raise RequestError(
                f"loss_scale is {a_kind(scale)}; give a number or a "
                "zbpp.runtime.LossScaler, which works as torch.amp.GradScaler does"
            )


@dataclass(frozen=True, kw_only=True)
class Execution:
    """The execution of passes, watched and waited for; the results are the same.

    Args:
        compile: compile each layer by itself, ``"blocks"``; see docs/how_to/compile.md.
        overlap: passes stop where layers call `zbpp.overlap_point`, and other planned
            jobs compute meanwhile; False: passes run one after the other.
        partition_activations: of the input of a recomputed layer each process along
            ``tp`` keeps a slice; see
            docs/reference/data_parallel.md#activations-along-tp.
        watch: when to plan again from measured times, a `zbpp.tuning.Watch`, or True
            for its defaults: after the first steps, and every 50 steps. None: where
            ``"auto"`` has chosen the plan.
        timeout_s: how long a stage waits for another before it gives up; longer than
            whatever one rank alone may have to do: compile, evaluate, load.
        first_timeout_s: the same at the start and in the first step; None: timeout_s.

    Raises:
        RequestError: a time-out is no time.
    """

    compile: "Compiling" = False
    overlap: bool = True
    partition_activations: bool = False
    watch: Any = None
    timeout_s: float = 600.0
    first_timeout_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("timeout_s", "first_timeout_s"):
            time_s = getattr(self, name)
            if time_s is None and name == "first_timeout_s":
                continue
            if not (is_number(time_s) and 0 < time_s <= _MAX_SECONDS):
                raise RequestError(
                    f"{name} is {time_s!r}; give seconds, above 0 and up to "
                    f"{_MAX_SECONDS:g}"
                )

    @property
    def start_timeout_s(self) -> float:
        """The time-out at the start and in the first step."""
        return self.first_timeout_s or self.timeout_s


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """A mesh, and the options of its replicas.

    Args:
        mesh: of stages, data, context, expert and tensor parallelism; see `zbpp.mesh`.
            Each replica is given its share of the batch. Layers may be wrapped by
            `fully_shard` or `replicate`; those that are not are replicated, or wrapped
            by ``shard``.
        shard: state that replicas shard: ``"optimizer"`` state, ``"gradients"`` too,
            or ``"parameters"`` as well; ``"none"``: each has all.
        alternating_buffers: for ``shard="parameters"``; see
            docs/reference/data_parallel.md.
        gather_piece_bytes: of the pieces in which ``shard`` gathers layers, a multiple
            of 16; None: each as a whole.
        reduction: how gradients are summed, for ``shard="none"`` and plain layers: a
            `zbpp.Reduction`, `zbpp.TwoLevel` or `zbpp.TopK`.
    """

    mesh: "DeviceMesh | None" = None
    shard: Shard = "none"
    alternating_buffers: bool = False
    gather_piece_bytes: int | None = None
    reduction: Reduction = field(default_factory=Reduction)


def is_whole(value: object) -> bool:
    """True for an int that is no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """True for an int or float that is neither a bool nor NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value == value


def check_count(name: str, count: Any) -> None:
    """Refuse anything but a whole number from 1 on, or None.

    Raises:
        RequestError: it is something else; names it.
    """
    if count is None:
        return
    if not is_whole(count) or count < 1:
        raise RequestError(f"{name} is {count!r}; give a whole number from 1 on")


def _is_floating(dtype: Any) -> bool:
    import torch

    return isinstance(dtype, torch.dtype) and dtype.is_floating_point
