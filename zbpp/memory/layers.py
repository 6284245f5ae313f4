"""Memory of each layer of a model in bytes, by passes on fake tensors.

Every layer runs F, B and W as a separate chunk on the runtime's stage, so the
split of the backward, checkpoints and the order of releases are those of a run. Layers
that are alike run once. The memory of a stage under a schedule follows by the planner's
sums: ``LayerCosts.on(placement, split)``, then `zbpp.core.occupancy.peaks`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import add
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from zbpp.core import LayerCosts, RequestError, a_kind
from zbpp.memory.fakes import FakeModel, fake_model, reading_fakes
from zbpp.memory.tracking import Tracker, bytes_of
from zbpp.models.entry import AnyModel, layered_of
from zbpp.profiling.alone import copied
from zbpp.runtime.chunk import Chunk, OwnName
from zbpp.runtime.layer_random import LayerRandom
from zbpp.runtime.loss import LossFn
from zbpp.runtime.microbatches import MicroBatches
from zbpp.runtime.optim.host import master_dtype
from zbpp.runtime.optim.make import MakeOptimizer, made_optimizers
from zbpp.runtime.optim.rollback import DeferredStep, can_defer
from zbpp.runtime.stage import Stage
from zbpp.runtime.support.devices import runs_ahead
from zbpp.runtime.support.pytree import tensors_in
from zbpp.runtime.values import Tensors, as_tensors

_UNKNOWN = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
_GPU_BLOCK = 512  # bytes; torch's allocators for CUDA and XPU round up to it
_MESSAGES = 3
"""Of a stage at any time: two that are announced, and one that leaves."""
_N_MICROBATCHES = 3
"""The first one makes gradients; the last one counts."""


class Tracing(TypedDict, total=False):
    """The way in which the layers of a model run; as in `zbpp.Pipeline`."""

    microbatch_size: int | None
    """Samples of a micro-batch, if not those of the batch."""
    device: torch.device | str
    """The device whose kernels are taken; cuda needs a GPU, and leaves it alone."""
    autocast: torch.dtype | None
    """Compute dtype of the forward."""
    exact_sums: bool
    """Add gradients in micro-batch order."""
    offload_optimizer: bool
    """Optimizers step in host memory; as in `zbpp.StepPolicy`."""


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW, as it comes."""
    return torch.optim.AdamW(parameters)


def layer_memory(
    model: AnyModel,
    batch: Any,
    loss_fn: LossFn | None = None,
    *,
    optimizer: MakeOptimizer | None = adamw,
    post_validation: bool = True,
    **tracing: Unpack[Tracing],
) -> LayerCosts:
    """Bytes of every layer; its times are left at their defaults.

    No weight is allocated, and no kernel runs: real tensors are copied as fake ones, a
    builder makes fake ones. Equal layers are traced once.

    Args:
        model: as `zbpp.Pipeline` takes it.
        batch: inputs and targets of one micro-batch, or the batch of the model.
        loss_fn: the mean over a micro-batch; None: that of the model, or the last layer
            puts it out.
        optimizer: as `zbpp.Pipeline` takes it; None: there is none.
        post_validation: count the copy that steps are rolled back with.
        tracing: see `Tracing`.

    Raises:
        RequestError: the model has no layers, or decides by its data.
    """
    layers = trace_layers(model, batch, loss_fn, optimizer=optimizer, **tracing)
    return layers.costs(post_validation=post_validation)


# ---- The answer.


class _Layer(NamedTuple):
    """Bytes of one layer.

    Args:
        left: by F until B, without its input and output.
        left_input: the part of the input that stays until B.
        left_output: the same of the output.
        change_b: memory that B leaves, less memory that it frees.
        peak_f, peak_b, peak_w: most inside a pass above the memory before it.
        message: the output.
        for_good: what stays of the first F.
        gradients: of each parameter, in order.
    """

    left: int
    left_input: int
    left_output: int
    change_b: int
    peak_f: int
    peak_b: int
    peak_w: int
    message: int
    for_good: int = 0
    gradients: tuple[int, ...] = ()


class StepBytes(NamedTuple):
    """Bytes of the optimizer of some layers."""

    state: int = 0
    rollback: int = 0
    """Copies that post-validation keeps."""
    peak: int = 0
    """Most that a step needs besides."""
    host: int = 0
    """All of it, masters and gradients too, where it is in host memory."""


@dataclass
class Layers:
    """Bytes of the layers of a model.

    Args:
        fake: the model and one micro-batch.
        optimizer: builds one or several; None: there is none.
        own_name: the model's names of parameters.
        loss_fn: None: the last layer puts out the loss.
        autocast: compute dtype of the forward.
        exact_sums: add gradients in micro-batch order.
        offloads: optimizers step in host memory.

    Raises:
        RequestError: a layer decides by its data, which fake tensors do not have.
    """

    fake: FakeModel
    optimizer: MakeOptimizer | None
    own_name: OwnName
    loss_fn: LossFn | None
    autocast: torch.dtype | None
    exact_sums: bool
    offloads: bool = False
    rows: list[_Layer] = field(init=False, default_factory=list)
    _looks: list[Any] = field(init=False, default_factory=list)
    """Equal for layers that are alike."""
    _steps: dict[Any, StepBytes] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._trace()

    @property
    def block(self) -> int:
        """Bytes that an allocation is a multiple of."""
        return _GPU_BLOCK if runs_ahead(self.fake.device) else 1

    def of_size(self, samples: int | None) -> "Layers":
        """The same layers with another number of samples in the micro-batch."""
        if samples in (None, self.fake.samples):
            return self
        return replace(self, fake=self.fake.of_size(samples))

    def parameters(self, layers: Sequence[int]) -> dict[nn.Parameter, int]:
        """The parameters of some layers, each once, and bytes of their gradients."""
        return {
            p: size
            for i in layers
            for p, size in zip(
                self.fake.layers[i].parameters(), self.rows[i].gradients, strict=True
            )
        }

    def bytes_of(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of parameters or buffers."""
        return bytes_of(dict.fromkeys(tensors), self.block)

    def buffers(self, layers: Sequence[int]) -> int:
        """Bytes of buffers, and of tensors that the first forward of a layer keeps."""
        buffers = [b for i in layers for b in self.fake.layers[i].buffers()]
        return self.bytes_of(buffers) + sum(self.rows[i].for_good for i in layers)

    def costs(self, *, post_validation: bool = True) -> LayerCosts:
        """Return the columns for planners.

        A parameter of several layers is in the columns of the first one, and a row of
        ``tied``; each of the layers has a gradient for it.
        """
        n, rows = len(self.rows), self.rows
        holders: dict[nn.Parameter, list[int]] = {}
        amounts: dict[nn.Parameter, tuple[float, float, float]] = {}
        for i in range(n):
            gradients = self.parameters([i])
            step = self.step([i], post_validation=post_validation)
            for p, gradient in gradients.items():
                holders.setdefault(p, []).append(i)
                share = gradient / max(1, sum(gradients.values()))
                size = self.bytes_of([p])
                fixed = size + share * (step.state + step.rollback)
                amounts.setdefault(p, (fixed, share * step.peak, float(size)))
        sums = [[0.0, 0.0, 0.0] for _ in range(n)]
        for p, of in holders.items():
            sums[of[0]] = [*map(add, sums[of[0]], amounts[p])]
        messages = [x.message for x in rows[:-1]]
        # a cut shares the memory of its message
        inputs = [rows[0].left_input]
        inputs += [max(x.left_output, y.left_input) for x, y in pairwise(rows)]
        m_b = [max(0, x.left + left) for x, left in zip(rows, inputs, strict=True)]
        columns: dict[str, Sequence[float]] = {
            "m_b": m_b,
            "m_w": [max(0, m + x.change_b) for m, x in zip(m_b, rows, strict=True)],
            "peak_f": [x.peak_f for x in rows],
            "peak_b": [x.peak_b for x in rows],
            "peak_w": [x.peak_w for x in rows],
            "m_fixed": [
                fixed + self.buffers([i]) + sum(rows[i].gradients)
                for i, (fixed, *_) in enumerate(sums)
            ],
            "peak_o": [peak for _, peak, _ in sums],
            "m_r": [0, *messages],
            "message": messages,
            "parameters": [size for *_, size in sums],
            "batch": [self._batch(i) for i in range(n)],
        }
        floats: dict[str, Any] = {
            name: tuple(map(float, column)) or 0.0 for name, column in columns.items()
        }
        tied = tuple((tuple(of), *amounts[p]) for p, of in holders.items() if of[1:])
        runs = runs_ahead(self.fake.device)
        return LayerCosts(
            n_layers=n,
            tied=tied,
            messages_at_once=_MESSAGES if runs else _MESSAGES - 1,
            keeps_sent=not runs,  # gloo does, until the sums of the step have come
            **floats,
        )

    def _batch(self, layer: int) -> int:
        """Bytes of the batch that a layer reads."""
        read = [self.fake.inputs] * (layer == 0)
        read += [self.fake.targets] * (layer == len(self.rows) - 1)
        return bytes_of(tensors_in(read), self.block)

    def operations(self) -> list[float]:
        """Floating-point operations of each layer's forward of one micro-batch.

        A multiplication and an addition count as two. B takes as many as F, and so does
        W. The counter is torch's, which knows no attention of CPUs but as products.
        """
        value: Any = self.fake.inputs
        counts: list[float] = []
        with (
            self.fake.mode, torch.no_grad(), Tracker(), reading_fakes(),
            sdpa_kernel(SDPBackend.MATH),
        ):  # fmt: skip
            for layer in self.fake.layers:
                with FlopCounterMode(display=False) as counter:
                    value = layer(value)
                counts.append(float(counter.get_total_flops()))
        return counts

    def step(self, layers: Sequence[int], *, post_validation: bool) -> StepBytes:
        """Bytes of the optimizer of some layers: it steps on fake parameters."""
        key = (post_validation, *(self._looks[i] for i in layers))
        if key not in self._steps:
            with self.fake.mode:
                self._steps[key] = self._step(layers, post_validation)
        return self._steps[key]

    def _step(self, layers: Sequence[int], post_validation: bool) -> StepBytes:
        learning = [p for p, size in self.parameters(layers).items() if size]
        if self.optimizer is None or not learning:
            return StepBytes()
        names: dict[nn.Parameter, str] = {}
        for i in layers:
            for name, p in self.fake.layers[i].named_parameters():
                names.setdefault(p, self.own_name(i, name))
        if self.offloads:
            named = [(names[p], p) for p in learning]
            learning = [nn.Parameter(p.detach().to(master_dtype(p))) for p in learning]
            names = {p: name for p, (name, _) in zip(learning, named, strict=True)}
        for p in learning:
            p.grad = torch.empty_like(p, requires_grad=False)
        tracker = Tracker(self.block)
        tracker.ignore(t for p in learning for t in (p, p.grad) if t is not None)
        with tracker:
            named = [(names[p], p) for p in learning]
            optimizers = made_optimizers(self.optimizer, named)
            for optimizer in optimizers:
                optimizer.step()
            state, rollback, peak = tracker.now, 0, 0
            defers = post_validation and all(map(can_defer, optimizers))
            if post_validation:
                rollback = self.bytes_of(learning) + (0 if defers else state)
            for optimizer in optimizers:
                deferred = DeferredStep(optimizer) if defers else None
                if deferred is not None:
                    deferred.take()  # makes the copies, which stay
                    deferred.undo()
                base = tracker.restart()
                optimizer.step() if deferred is None else deferred.take()
                peak = max(peak, tracker.most - base)
        for p in learning:
            p.grad = None
        if self.offloads:
            masters = 2 * self.bytes_of(learning)  # and gradients
            return StepBytes(host=masters + state + rollback + peak)
        return StepBytes(state, rollback, peak)

    # ---- Tracing.

    def _trace(self) -> None:
        fake, tracker = self.fake, Tracker(self.block)
        for layer in fake.layers:
            tracker.ignore([*layer.parameters(), *layer.buffers()])
        tracker.ignore(tensors_in((fake.inputs, fake.targets)))
        known: dict[Any, tuple[_Layer, Tensors]] = {}
        value: Tensors | None = None
        with (
            LayerRandom(torch.device("cpu")).restored(),
            fake.mode,
            reading_fakes(),
        ):
            for i, layer in enumerate(fake.layers):
                is_end = i in (0, len(fake.layers) - 1)
                key = i if is_end else (_look_of(layer), _look_of_value(value))
                if key not in known:
                    try:
                        known[key] = self._run(i, layer, value, tracker)
                    except _UNKNOWN as error:
                        raise _undecided(i, layer, error) from error
                row, value = known[key]
                self.rows.append(row)
                self._looks.append(key)

    def _run(
        self, i: int, layer: nn.Module, value: Tensors | None, tracker: Tracker
    ) -> tuple[_Layer, Tensors]:
        """Run F, B and W of a layer; return their memory, and the output."""
        index, is_last, n = min(i, 1), i == len(self.fake.layers) - 1, _N_MICROBATCHES
        stage = Stage(
            [Chunk(index, 0, (layer,))],
            n_chunks=index + 2 - is_last,
            loss_fn=self.loss_fn or _refuse,
            device=self.fake.device,
            autocast=self.autocast,
            exact_sums=self.exact_sums,
        )
        targets = self.fake.targets if is_last else None
        stage.begin(
            MicroBatches(
                n,
                inputs=None if i else [as_tensors(self.fake.inputs)] * n,
                targets=None if targets is None else [targets] * n,
            )
        )
        left = []
        for m in range(n):
            row, output = self._measure(stage, index, m, value, tracker)
            left.append(row.left)
        gradients = tuple(
            0 if p.grad is None else self.bytes_of([p if p.grad.is_sparse else p.grad])
            for p in layer.parameters()
        )
        for p in layer.parameters():
            p.grad = None
        for_good = max(0, left[0] - left[-1])
        return row._replace(for_good=for_good, gradients=gradients), output

    def _measure(
        self,
        stage: Stage,
        index: int,
        microbatch: int,
        value: Tensors | None,
        tracker: Tracker,
    ) -> tuple[_Layer, Tensors]:
        """Run F, B and W of a layer once; return their memory, and the output."""
        base = tracker.restart()
        with tracker:
            x = value and copied(value)
            size_x = tracker.now - base
            y = stage.forward(index, microbatch, x)
        peak_f = tracker.most - base
        output = copied(y)
        message = sum(bytes_of([t], self.block) for t in output)
        with_both, x = tracker.now, None
        with_output, y = tracker.now, ()
        left_input = size_x - (with_both - with_output)
        left_output = max(0, message - (with_output - tracker.now))
        left = tracker.now - base - left_input - left_output
        base = tracker.restart()
        dy: Tensors | None = None
        # no thread of autograd frees tensors of a backward after it has returned
        with tracker, torch.autograd.set_multithreading_enabled(False):
            if not stage.has_loss:
                dy = tuple(torch.zeros_like(t) for t in output if t.requires_grad)
            dx = stage.backward_input(index, microbatch, dy)
            peak_b = tracker.most - base
            del dx, dy
            # the output is the next layer's input, which has a B
            change_b = tracker.now - base + left_output
            base = tracker.restart()
            stage.backward_weight(index, microbatch)
        peak_w = tracker.most - base
        return _Layer(
            left, left_input, left_output, change_b, peak_f, peak_b, peak_w, message
        ), output


def trace_layers(
    model: AnyModel,
    batch: Any,
    loss_fn: LossFn | None = None,
    *,
    optimizer: MakeOptimizer | None = adamw,
    microbatch_size: int | None = None,
    device: torch.device | str = "cpu",
    autocast: torch.dtype | None = None,
    exact_sums: bool = True,
    offload_optimizer: bool = False,
) -> Layers:
    """Trace the layers of a model on fake tensors; `layer_memory` explains the rest."""
    layered = layered_of(model)
    if layered.cut_batch is not None and not isinstance(batch, tuple):
        batch = layered.cut_batch(batch)
    inputs, targets = batch
    loss_fn = loss_fn or layered.loss_fn
    fake = fake_model(
        layered,
        inputs,
        None if loss_fn is None else targets,
        device=torch.device(device),
    ).of_size(microbatch_size)
    return Layers(
        fake,
        optimizer,
        layered.own_name,
        loss_fn,
        autocast,
        exact_sums,
        offload_optimizer,
    )


def _refuse(*_: object) -> Tensor:
    raise AssertionError("there are no targets, so no loss is called")


def _look_of(layer: nn.Module) -> str:
    """Text that is equal for layers that are alike: modules, sizes, plain settings.

    The number of a layer, as in ``layer_idx``, is no difference.
    """
    tensors = [
        (name, x.shape, x.dtype, x.requires_grad)
        for name, x in layer.state_dict(keep_vars=True).items()
    ]
    settings = [
        (name, value)
        for module in layer.modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | float | str)
        or (isinstance(value, int) and not name.endswith(("idx", "index", "_id")))
    ]
    return f"{layer} {tensors} {settings}"


def _look_of_value(value: Tensors | None) -> str:
    looks = [(x.shape, x.dtype, x.requires_grad) for x in value or ()]
    return f"{getattr(value, 'structure', None)} {looks}"


def _undecided(i: int, layer: nn.Module, error: Exception) -> RequestError:
    return RequestError(
        f"layer {i} ({a_kind(layer)}) cannot be traced without data: the result of "
        f"{error} depends on values that are known in a run only; use an operator of "
        "fixed shape (for experts of transformers config._experts_implementation = "
        "'grouped_mm')"
    )
