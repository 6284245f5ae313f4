"""Memory of the trained model, in bytes, beside what a run measures."""

from collections.abc import Callable

import torch
from torch.optim import Optimizer

from zbpp.core import Costs, LayerCosts
from zbpp.memory import layer_memory
from zbpp.pipeline import Pipeline
from zbpp.planning.answer import recomputed_layers
from zbpp.training.build import AUTOCAST
from zbpp.training.options import Train
from zbpp.training.setup import model_of

__all__ = ["estimate_layers", "memory_of"]


def estimate_layers(
    options: Train, make_optimizer: Callable[..., Optimizer]
) -> LayerCosts:
    """Estimate what the layers of the model hold, on fake tensors: some seconds."""
    model = model_of(options)
    tokens = torch.zeros(options.microbatch_size, options.seq, dtype=torch.long)
    given = model.given()
    return layer_memory(
        given["model"],
        model.batch(tokens, tokens),
        given.get("loss_fn"),
        optimizer=make_optimizer,
        n_layers=given.get("n_layers"),
        autocast=AUTOCAST[options.dtype],
        exact_sums=options.exact_sums,
        compile="blocks" if options.compiles else False,
    )


def memory_of(pipeline: Pipeline, layers: LayerCosts) -> Costs:
    """Give the chunks of a pipeline the costs of their layers."""
    split = [len(layers) for layers in pipeline.split]
    again = recomputed_layers(pipeline.schedule, split)
    return layers.on(pipeline.schedule.placement, split, recompute=again)
