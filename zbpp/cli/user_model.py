"""The user's own model: ``--model module:function``, alike in all commands.

    def build():
        layers = [Embed(), *(Block() for _ in range(12)), Head()]
        return layers, (tokens, targets), loss_fn

The function takes nothing. It returns a model as `zbpp.Pipeline` takes it, the batch of
one micro-batch as `Pipeline.step` takes it, and ``loss_fn`` unless the last layer puts
out the loss. A model that is built by ranges of layers is a pair, builder and number of
layers: ``return (build_range, 80), (tokens, targets), loss_fn``.
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zbpp.core import RequestError

if TYPE_CHECKING:
    from zbpp.runtime.partition import Model
    from zbpp.runtime.stage import LossFn

__all__ = ["UserModel", "call_builder", "load_model"]

_WANTED = (
    "it must be a function that returns (model, batch) or (model, batch, loss_fn): an "
    "nn.Sequential, a list of layers or (builder, n_layers), and one micro-batch as "
    "(inputs, targets)"
)


@dataclass(frozen=True)
class UserModel:
    """A model and one micro-batch of it.

    ``model`` and ``n_layers`` are what `zbpp.Pipeline` takes under these names;
    ``targets`` is None if the last layer puts out the loss; then so is ``loss_fn``.
    """

    model: "Model"
    inputs: Any
    targets: Any
    loss_fn: "LossFn | None"
    n_layers: int

    def layers(self) -> list[Any]:
        """All layers of the model, built if they are not yet."""
        if callable(self.model) and not hasattr(self.model, "__len__"):
            return list(self.model(range(self.n_layers)))
        return list(self.model)  # type: ignore[arg-type]


def load_model(name: str) -> UserModel:
    """Call ``module:function``.

    Raises:
        RequestError: there is no such function, or it returns something else.
    """
    from zbpp.runtime.partition import count_layers

    built = call_builder(name, _WANTED)
    if not isinstance(built, tuple) or len(built) not in (2, 3):
        raise RequestError(f"--model {name}: {_WANTED}")
    model, batch = built[:2]
    loss_fn: Any = built[2] if len(built) == 3 else None
    if not isinstance(batch, tuple) or len(batch) != 2:
        raise RequestError(
            f"--model {name}: the batch is a {type(batch).__name__}; give one "
            "micro-batch as a pair, (inputs, targets)"
        )
    n_layers = None
    if isinstance(model, tuple) and len(model) == 2 and isinstance(model[1], int):
        model, n_layers = model
    try:
        n_layers = count_layers(model, n_layers)
    except RequestError as error:
        raise RequestError(f"--model {name}: {error}") from error
    inputs, targets = batch
    if loss_fn is None:
        targets = None
    elif targets is None or not callable(loss_fn):
        raise RequestError(
            f"--model {name}: loss_fn is called with outputs and targets; give both, "
            "or neither if the last layer puts out the loss"
        )
    return UserModel(model, inputs, targets, loss_fn, n_layers)


def call_builder(name: str, wanted: str) -> Any:
    """Return what ``module:function`` returns.

    Args:
        name: of the function.
        wanted: what it must be, for the error.

    Raises:
        RequestError: there is no such function.
    """
    path, _, attribute = name.partition(":")
    if not path or not attribute:
        raise RequestError(f"--model {name}: write it as module:function; {wanted}")
    sys.path.insert(0, "")  # as python -m does
    try:
        build: Callable[[], Any] = getattr(importlib.import_module(path), attribute)
    except (ImportError, AttributeError) as error:
        raise RequestError(f"--model {name}: {error}") from error
    finally:
        sys.path.remove("")
    if not callable(build):
        raise RequestError(f"--model {name}: {wanted}")
    return build()
