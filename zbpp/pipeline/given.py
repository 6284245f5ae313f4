"""The model, the loss and the example of a pipeline, as it works with them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from zbpp.core import LayerCosts, RequestError
from zbpp.memory import layer_memory
from zbpp.models import Layered
from zbpp.models.given import Given, model_to_build
from zbpp.runtime.stage import LossFn
from zbpp.tuning.measure import MeasuredPipeline, measure_layers

__all__ = ["loss_of", "measure_example"]


def loss_of(layered: Layered, loss_fn: LossFn | None) -> LossFn:
    """The loss that was given, or the model's own.

    Raises:
        RequestError: there is neither.
    """
    found = loss_fn or layered.loss_fn
    if found is None:
        raise RequestError(
            "the model has no loss of its own; give loss_fn, the mean over one "
            "micro-batch of (outputs, targets)"
        )
    return found


def measure_example(
    build: Callable[..., MeasuredPipeline],
    model: Given,
    layered: Layered,
    example: Any,
    *,
    device: torch.device,
    post_validation: bool | None,
    **alike: Any,
) -> LayerCosts:
    """Measure the layers with an example before they are dealt to stages.

    Args:
        build: makes a pipeline.
        model: as the user gave it.
        layered: the same as layers.
        example: inputs and targets of a step, or a batch as the model takes it.
        device: of the pipeline.
        post_validation: as asked for.
        alike: arguments of the pipeline that its memory depends on.
    """
    if not isinstance(example, tuple) and layered.cut_batch is not None:
        example = layered.cut_batch(example)
    alike["n_layers"] = layered.n_layers
    to_build = model_to_build(model, layered)
    return measure_layers(
        partial(build, device=device, post_validation=post_validation, **alike),
        model,  # type: ignore[arg-type]
        example,
        device=device,
        estimate=lambda _, batch, **rest: layer_memory(to_build, batch, **rest),
        post_validation=post_validation is not False,
        **alike,
    )
