"""Names that a module or a trainer has and a pipeline has not, with those to use."""

from typing import TYPE_CHECKING, Any, NoReturn

__all__ = ["AbsentNames"]

_INSTEAD = {
    "parameters": "named_parameters() gives the names and parameters of this process",
    "modules": "named_layers() gives the layers of this process",
    "optimizer": "optimizers lists those of this process's stages",
    "train": "step() trains, and sets no mode: that of each layer stays as it is",
    "eval": "evaluate() and predict() run in eval mode and restore it",
    "to": "give device= where the pipeline is made",
    "cuda": "give device= where the pipeline is made",
    "zero_grad": "step() clears the gradients",
    "backward": "step() runs forward, backward and optimizer",
    "forward": "step() trains, evaluate() gives a loss, predict() the outputs",
    "train_batch": "step(inputs, targets) trains on a batch",
    "eval_batch": "evaluate(inputs, targets) gives the loss of a batch",
    "save_checkpoint": "save(folder) writes a checkpoint",
    "load_checkpoint": "load(folder) goes on from one",
}


class AbsentNames:
    """The part of a pipeline that names its methods to those who come from others."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            hint = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise AttributeError(f"a Pipeline has no attribute {name!r}{hint}")

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Say that a pipeline is no function.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"a Pipeline is not called: {_INSTEAD['forward']}")
