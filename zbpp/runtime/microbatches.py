"""A batch: cut into micro-batches, weighed, joined again."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from zbpp.core import RequestError
from zbpp.runtime.support.pytree import KNOWN, map_tensors, tensors_in
from zbpp.runtime.values import Tensors, as_tensors

Batch = Any
"""Tensors that are cut along their first dimension, alone or in tuples, lists in these,
dicts and other containers, and what every micro-batch gets as it is; or a list of
micro-batches."""

CutBatch = Callable[[Any], tuple[Any, Any]]
"""From a batch as a model takes it to inputs of layers and targets of a loss."""

Weigh = Callable[[Any], float | Tensor]
"""From the targets of a micro-batch to the number that its loss is a mean over."""

WeighName = Literal["samples", "tokens", "sum"]

IGNORED = -100
"""Target that torch's losses leave out by default."""


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of one call; stages read the parts that their chunks need.

    Args:
        n_microbatches: their number.
        step: number of the step, for seeds.
        inputs: of each micro-batch, where the first chunk is.
        targets: where the last chunk is; without any, no loss is computed.
        weights: of each micro-batch, with the targets; None: all alike.
        total: weight of the whole batch, of which others have parts; None: the sum of
            the weights. Called once, before the first backward.
        first: micro-batches of the step's earlier calls.
        is_part: the step has several calls; such a call leaves no times.
        training: backwards follow the forwards.
        keeps_outputs: keep the output of the last chunk, before the loss.
        loss_fn: of this call; None: the usual one.
        n_inputs: samples of the inputs, where they were cut.
        n_targets: samples of the targets, where they were cut.
    """

    n_microbatches: int
    step: int = 0
    inputs: Sequence[Tensors] | None = None
    targets: Sequence[object] | None = None
    weights: Sequence[float] | None = None
    total: Callable[[], float] | None = None
    first: int = 0
    is_part: bool = False
    training: bool = True
    keeps_outputs: bool = False
    loss_fn: Callable[..., Any] | None = None
    n_inputs: int | None = None
    n_targets: int | None = None


def split_inputs(batch: Batch, n: int) -> list[Tensors]:
    """Cut inputs into micro-batches of one or several tensors.

    The first ones get one sample more than the last if they cannot share evenly.
    Tensors without dimensions, and what is no tensor, go to every micro-batch.
    """
    pieces = enumerate(_split("inputs", batch, n))
    return [as_tensors(x, f"the input of micro-batch {i} is") for i, x in pieces]


def split_targets(batch: Batch, n: int) -> list[object]:
    """Cut targets, as `split_inputs` does."""
    return _split("targets", batch, n)


def count_samples(micro_batch: object) -> int:
    """Samples of a micro-batch; 1 where that is unknown."""
    n = _known_samples(micro_batch)
    return 1 if n is None else n


def samples_to_cut(batch: Batch) -> int | None:
    """Samples of a batch that is to be cut; None for a list of micro-batches."""
    return None if isinstance(batch, list) else _known_samples(batch)


def check_samples(n_inputs: int | None, n_targets: int | None) -> None:
    """Refuse two numbers of samples that differ, where both are known."""
    if None not in (n_inputs, n_targets) and n_inputs != n_targets:
        raise RequestError(
            f"inputs has {n_inputs} samples and targets {n_targets}; they must have "
            "the same number, or be lists of micro-batches"
        )


def _known_samples(thing: object) -> int | None:
    return next((len(x) for x in tensors_in(thing) if x.dim()), None)


def _split(name: str, batch: Batch, n: int) -> list[Any]:
    """Cut all tensors of a batch, which must have the same number of samples."""
    if batch is None:
        raise RequestError(f"this process needs the {name} of the batch, not None")
    if isinstance(batch, list):
        if len(batch) != n:
            raise RequestError(
                f"{name} is a list of {len(batch)}; give one entry for each of {n} "
                "micro-batches, or tensors to be cut"
            )
        return batch
    tensors = [x for x in tensors_in(batch) if x.dim()]
    kind = type(batch).__name__
    if not tensors:
        raise RequestError(
            f"{name} is a {kind} without tensors of samples; give tensors, a list of "
            f"micro-batches, or {KNOWN}"
        )
    sizes = [len(x) for x in tensors]
    if len(set(sizes)) > 1:
        raise RequestError(
            f"{name} is a {kind} of tensors of {sizes} samples; they must have the "
            "same number, or be given as a list of micro-batches"
        )
    if sizes[0] < n:
        raise RequestError(
            f"{name} has {sizes[0]} samples for {n} micro-batches, one each at least; "
            "give the data loader drop_last=True, or evaluate and predict a smaller "
            "n_microbatches"
        )
    pieces = {id(x): _cut(x, n) for x in tensors}

    def cut(i: int) -> Any:
        return map_tensors(batch, lambda x: pieces[id(x)][i] if x.dim() else x)

    return [cut(i) for i in range(n)]


def _cut(tensor: Tensor, n: int) -> Sequence[Tensor]:
    pieces = tensor.tensor_split(n)
    if tensor.requires_grad:
        return pieces
    # A version counter for each: a layer may change its micro-batch in place although
    # the graphs of others, cut from the same tensor, are alive.
    return [piece.data for piece in pieces]


def _count_tokens(targets: object) -> Tensor:
    if isinstance(targets, dict) and "labels" in targets:
        targets = targets["labels"]
    if not isinstance(targets, Tensor):
        raise RequestError(
            f"targets is a {type(targets).__name__}, in which no tokens can be counted;"
            " give a tensor, a dict with labels, or a function as weigh"
        )
    return (targets != IGNORED).sum()


WEIGHS: dict[str, Weigh] = {
    "samples": count_samples,
    "tokens": _count_tokens,
    "sum": lambda targets: 1,
}
"""Numbers that a loss may be a mean over, by name; tokens are targets that are not
`IGNORED`, of a tensor or of the labels in a dict."""


def find_weigh(weigh: WeighName | Weigh) -> Weigh:
    """Return the function that weighs a micro-batch, by its name."""
    if callable(weigh):
        return weigh
    if weigh not in WEIGHS:
        raise RequestError(
            f"weigh is {weigh!r}; choose one of {', '.join(map(repr, WEIGHS))}, or "
            "give a function of the targets of a micro-batch"
        )
    return WEIGHS[weigh]


def weights_of(weigh: Weigh, targets: Iterable[Any]) -> list[float]:
    """Weigh micro-batches; a device that counts is waited for once."""
    weights: list[Any] = [weigh(target) for target in targets]
    if all(isinstance(weight, Tensor) for weight in weights):
        weights = torch.stack(weights).tolist()
    if any(not weight >= 0 for weight in weights):
        raise RequestError(f"micro-batches weigh {weights}; give 0 or more")
    return weights


def mean_by_weight(values: Tensor, weights: Tensor) -> float:
    """Mean of values; NaN if all weights are 0."""
    if weights[0] > 0 and bool((weights == weights[0]).all()):
        return float(values.mean())
    return float((values * weights).sum() / weights.sum())


def merge(outputs: Sequence[Any]) -> Any:
    """Join the outputs of micro-batches: the inverse of cutting.

    Tensors are joined along their first dimension, those without one make a new one;
    of what is no tensor, that of the first micro-batch is returned. What cannot be
    joined so, as other dimensions differ, stays a list.
    """
    every = [tensors_in(output) for output in outputs]
    if len({tuple((x.dim(), x.shape[1:]) for x in tensors) for tensors in every}) > 1:
        return list(outputs)
    joined = (
        torch.cat(parts) if parts[0].dim() else torch.stack(parts)
        for parts in zip(*every, strict=True)
    )
    return map_tensors(outputs[0], lambda _: next(joined))
