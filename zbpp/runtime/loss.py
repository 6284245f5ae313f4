"""The loss of each micro-batch, its share in the loss of the batch, and metrics."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from zbpp.core import RequestError, a_kind
from zbpp.runtime.layer_random import draws_nothing
from zbpp.runtime.microbatches import MicroBatches, mean_by_weight
from zbpp.runtime.support.pytree import map_tensors, tensors_in
from zbpp.runtime.support.streams import sent_ahead

Metrics = Mapping[str, Tensor | float]
"""Scalars of one micro-batch by name, averaged as the loss is."""

LossFn = Callable[..., Tensor | tuple[Tensor, Metrics]]
"""``loss_fn(outputs, targets) -> scalar``, the mean over one micro-batch, or a pair of
it and `Metrics`."""


class Loss:
    """The losses of a step's micro-batches.

    Each is the mean over its micro-batch. The batch's is the mean of them by weight, so
    that it is the mean over all samples, or over all tokens, if that is what the
    weights count. A micro-batch of weight 0 has nothing to take a mean over: its loss
    is 0, and so are its gradients.
    """

    def __init__(self, loss_fn: LossFn, device: torch.device) -> None:
        self._loss_fn = loss_fn
        self._device = device
        self.modules = loss_modules(loss_fn)
        self._first_versions = self._versions()
        self.adds = False
        """The loss of the batch is the sum over micro-batches, not their mean."""
        self._all_weights: list[float] = []
        self.begin(MicroBatches(1))

    def begin(self, batch: MicroBatches) -> None:
        """Start a step, or its next part, which keeps the losses before it."""
        self._used_fn = batch.loss_fn or self._loss_fn
        self.draws_nothing = draws_nothing(self._used_fn)
        self._batch = batch
        self._weights = batch.weights or [1.0] * batch.n_microbatches
        earlier = self._all_weights if batch.first else []
        self._all_weights = [*earlier, *self._weights]
        self._total: float | None = None
        if not batch.first:
            self.values: dict[int, Tensor] = {}
            """Losses by the number of the micro-batch in the step."""
            self.metrics: dict[int, Metrics] = {}

    def __call__(self, outputs: object, microbatch: int) -> Tensor:
        """Loss of one micro-batch; its value stays in `values`."""
        loss: object
        targets = self._batch.targets
        if targets is None or self._weights[microbatch] == 0:
            loss = _nothing(outputs, self._device)
        else:
            move = partial(sent_ahead, device=self._device)
            loss = self._used_fn(outputs, map_tensors(targets[microbatch], move))
            if type(loss) is tuple and len(loss) == 2:
                loss, metrics = loss
                self.metrics[self._batch.first + microbatch] = _numbers(metrics)
        if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
            look = getattr(loss, "dtype", type(loss)), getattr(loss, "shape", None)
            raise RequestError(
                f"loss_fn returned {look[0]} of shape {look[1]}; it must return a "
                "scalar tensor of floating point, the mean over a micro-batch, or a "
                "pair of it and a dict of metrics"
            )
        # A copy: mse_loss's scalar keeps the memory of all its summands.
        self.values[self._batch.first + microbatch] = loss.detach().clone()
        return loss

    def check_buffers(self) -> None:
        """Refuse a loss that changes its buffers: no checkpoint has them."""
        for name, version in self._versions().items():
            if version != self._first_versions.get(name):
                raise RequestError(
                    f"loss_fn changes its buffer {name}, and checkpoints store no "
                    "state of a loss; move it into the last layer, or register it "
                    "with persistent=False if it need not be saved"
                )

    def _versions(self) -> dict[str, tuple[int, int]]:
        """Identities and versions of the persistent buffers, by name."""
        saved = [
            x for loss in self.modules for x in loss.state_dict(keep_vars=True).items()
        ]
        return {name: (id(x), x._version) for name, x in saved if isinstance(x, Tensor)}

    def discard(self) -> None:
        """Forget the losses of this part of the step; they will be computed again."""
        first = self._batch.first
        for number in range(first, first + self._batch.n_microbatches):
            self.values.pop(number, None)
            self.metrics.pop(number, None)

    def gradients(
        self, losses: Sequence[Tensor], microbatch: int, scale: float
    ) -> tuple[Tensor, ...]:
        """The gradient that B starts from, for each loss that needs one."""
        if self._total is None:
            total = self._batch.total
            self._total = sum(self._weights) if total is None else total()
        # all weights may be 0
        share = self._weights[microbatch] / self._total if self._total else 0.0
        return tuple(
            torch.full_like(y, scale * share) for y in losses if y.requires_grad
        )

    def table(self) -> Tensor:
        """Loss and weight of each micro-batch, float64; zero where there is no loss."""
        n = len(self._all_weights)
        if not self.values:
            return torch.zeros(2, n, dtype=torch.float64, device=self._device)
        nothing = torch.zeros((), device=self._device)
        losses = torch.stack([self.values.get(i, nothing) for i in range(n)]).double()
        weights = torch.tensor(self._all_weights, dtype=torch.float64)
        return torch.stack([losses.to(self._device), sent_ahead(weights, self._device)])

    def mean_metrics(self) -> Callable[[], dict[str, float]]:
        """Return what reads the means of the metrics so far, of this replica."""
        return partial(_mean_metrics, self.metrics, self._all_weights)


def loss_modules(loss_fn: LossFn) -> list[nn.Module]:
    """The module that a loss function is, also as a partial; empty for a function."""
    while isinstance(loss_fn, partial):
        loss_fn = loss_fn.func
    return [loss_fn] if isinstance(loss_fn, nn.Module) else []


def is_sum(loss_fn: LossFn) -> bool:
    """True if a loss function has ``reduction="sum"``."""
    bound = loss_fn.keywords if isinstance(loss_fn, partial) else {}
    reduction = bound.get("reduction", getattr(loss_fn, "reduction", None))
    return bool(reduction == "sum")


def refuse_foreign(leaves: Iterable[Tensor], parameters: Collection[Tensor]) -> None:
    """Refuse a loss whose graph has other parameters than those of its stage."""
    for leaf in leaves:
        if isinstance(leaf, nn.Parameter) and leaf not in parameters:
            raise RequestError(
                f"the loss reads a parameter of shape {tuple(leaf.shape)} that the "
                "last stage does not have, so this stage would not train it; read it "
                "in the last layer, or pass what is computed from it through the layers"
            )


def loss_alone(loss_fn: LossFn) -> Callable[..., Tensor]:
    """Return the loss function without its metrics."""

    def loss(outputs: object, targets: object) -> Tensor:
        returned = loss_fn(outputs, targets)
        return returned[0] if isinstance(returned, tuple) else returned

    return loss


def _mean_metrics(
    metrics: Mapping[int, Metrics], weights: Sequence[float]
) -> dict[str, float]:
    """Mean of each metric by weight, over the micro-batches that have it."""
    means = {}
    for name in dict.fromkeys(name for one in metrics.values() for name in one):
        having = [i for i in sorted(metrics) if name in metrics[i]]
        pairs = [(float(metrics[i][name]), weights[i]) for i in having]
        values, counts = torch.tensor(pairs, dtype=torch.float64).unbind(1)
        means[name] = mean_by_weight(values, counts)
    return means


def _numbers(metrics: object) -> Metrics:
    """Return metrics without their graphs, in separate memory."""
    pairs = dict(metrics).items() if isinstance(metrics, Mapping) else ()
    if isinstance(metrics, Mapping) and all(_is_number(x) for _, x in pairs):
        return {
            name: x.detach().clone() if isinstance(x, Tensor) else float(x)
            for name, x in pairs
        }
    what = a_kind(metrics)
    for name, x in pairs:
        if not _is_number(x):
            shape = f" of shape {tuple(x.shape)}" if isinstance(x, Tensor) else ""
            what = f"{name!r} as {a_kind(x)}{shape}"
    raise RequestError(
        f"loss_fn returned the metrics {what}; they must be a dict from names to "
        "scalar tensors or numbers"
    )


def _is_number(x: object) -> bool:
    return x.dim() == 0 if isinstance(x, Tensor) else isinstance(x, int | float)


def _nothing(outputs: object, device: torch.device) -> Tensor:
    """A loss of 0 whose gradients are 0, whatever the outputs are."""
    ends = [x for x in tensors_in(outputs) if x.requires_grad]
    return sum((x.reshape(-1)[:0].sum() for x in ends), torch.zeros((), device=device))
