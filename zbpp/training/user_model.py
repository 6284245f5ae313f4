"""The user's model: ``--model``, alike in all commands.

    --model module:function     a function of the user's
    --model hf:config.json      a causal language model of transformers; or the folder

    def build():
        layers = [Embed(), *(Block() for _ in range(12)), Head()]
        return layers, (tokens, targets), loss_fn

The function takes nothing. It returns a model as `zbpp.Pipeline` takes it (models of
transformers, and what `zbpp.cut` returns, too), the batch of one micro-batch as
`Pipeline.step` takes it, and ``loss_fn`` unless the last layer puts out the loss or the
model has one. A model that is built by ranges of layers is a pair, builder
and number of layers: ``return (build_range, 80), (tokens, targets), loss_fn``.
"""

import pkgutil
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from zbpp.core import RequestError
from zbpp.training.options import HF

if TYPE_CHECKING:
    from zbpp.models import Layered
    from zbpp.runtime.loss import LossFn

_WANTED = (
    "it must be a function that returns (model, batch) or (model, batch, loss_fn): an "
    "nn.Sequential, a list of layers, (builder, n_layers), a model of transformers or "
    "the result of zbpp.cut, and one micro-batch as (inputs, targets) or as a dict"
)


@dataclass(frozen=True)
class UserModel:
    """A model and one micro-batch of it.

    Args:
        layered: the model as layers.
        inputs: of a micro-batch.
        targets: of it; None if the last layer puts out the loss.
        loss_fn: called with outputs and targets; None means the same.
    """

    layered: "Layered"
    inputs: Any
    targets: Any
    loss_fn: "LossFn | None"

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return self.layered.n_layers

    def batch(self, n_microbatches: int) -> tuple[list[Any], list[Any]]:
        """Inputs and targets of the micro-batches of a step.

        They differ, so that the loss shows a micro-batch in place of another. Whole
        numbers of two dimensions and more are rolled along the last one, floating ones
        are scaled by no more than a quarter; all else is equal in all of them.
        """
        import torch

        from zbpp.runtime.support.pytree import map_tensors

        def vary(tensor: torch.Tensor, index: int) -> torch.Tensor:
            if tensor.is_floating_point():
                return tensor * (1 - index / (4 * n_microbatches))
            return tensor.roll(index, -1) if tensor.dim() > 1 else tensor

        targets = torch.zeros(1) if self.loss_fn is None else self.targets
        inputs, targets = (
            [map_tensors(x, partial(vary, index=i)) for i in range(n_microbatches)]
            for x in (self.inputs, targets)
        )
        return inputs, targets


def load_model(
    name: str | None,
    *,
    size: str = "small",
    seq: int | None = None,
    samples: int = 2,
    seed: int = 0,
) -> UserModel:
    """Call ``module:function``, or make the model of ``hf:config.json`` or ours.

    Args:
        name: of either; None: the small Llama of `zbpp train`.
        size: of the latter.
        seq: tokens of a sample, but for a function; None: 128 at most.
        samples: of the micro-batch, but for a function.
        seed: of random weights, but for a function.
    """
    built: Any
    if name is None:
        from zbpp.training.llama import small_llama

        built = small_llama(size, seq=seq or 128, samples=samples, seed=seed)
    elif name.startswith(HF):
        from zbpp.models.configs import layers_of_config

        path = name.removeprefix(HF)
        built = layers_of_config(path, seq=seq, samples=samples, seed=seed)
    else:
        built = call_builder(name)
    if not isinstance(built, tuple) or len(built) not in (2, 3):
        raise RequestError(f"--model {name}: {_WANTED}")
    return _of_layers(name, *built)


def _of_layers(
    name: str | None, model: Any, batch: Any, loss_fn: Any = None
) -> UserModel:
    from zbpp.models import layered_of, layers_from

    if isinstance(model, tuple) and isinstance(model[-1], int):
        build, n_layers = model
        model = layers_from(build, n_layers=n_layers)
    try:
        layered = layered_of(model)
    except RequestError as error:
        raise RequestError(f"--model {name}: {error}") from error
    if layered.cut_batch is not None and not isinstance(batch, tuple):
        batch = layered.cut_batch(batch)
    if not isinstance(batch, tuple) or len(batch) != 2:
        raise RequestError(
            f"--model {name}: the batch is a {type(batch).__name__}; give one "
            "micro-batch as a pair, (inputs, targets)"
        )
    inputs, targets = batch
    loss_fn = loss_fn or layered.loss_fn
    if loss_fn is not None and (targets is None or not callable(loss_fn)):
        raise RequestError(
            f"--model {name}: loss_fn is called with outputs and targets; give both, "
            "or neither if the last layer puts out the loss"
        )
    return UserModel(layered, inputs, None if loss_fn is None else targets, loss_fn)


def call_builder(name: str) -> Any:
    """Return the result of ``module:function``."""
    sys.path.insert(0, "")  # as python -m does
    try:
        build = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise RequestError(f"--model {name}: {error}") from error
    finally:
        sys.path.remove("")
    if ":" not in name or not callable(build):
        raise RequestError(f"--model {name}: write it as module:function; {_WANTED}")
    return build()
