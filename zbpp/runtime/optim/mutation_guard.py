"""Notice what others write between a step and its validation.

    O    step, speculatively          marks are taken
         the script writes to p       p is no longer what the step has left
    V    an invalid step would be rolled back, and the write with it

So a write in between is an error even if the step turns out valid: otherwise a run
would depend on its luck.
"""

from collections.abc import Iterable

from torch import Tensor

from zbpp.core import RequestError
from zbpp.runtime.optim.optimizers import StageOptimizers
from zbpp.runtime.stage import Stage
from zbpp.runtime.support.marks import Mark, mark

__all__ = ["MutationGuard"]


class MutationGuard:
    """Marks of a stage's stepped parameters and optimizer state.

    Writes through ``tensor.data`` leave no mark and are not seen, nor are those to
    sharded tensors.

    Args:
        stage: names the parameters in the error.
        optimizers: step the parameters.
    """

    def __init__(self, stage: Stage, optimizers: StageOptimizers) -> None:
        self._stage = stage
        self._optimizers = optimizers
        self._marks: list[tuple[Tensor, Mark]] = []

    def begin(self) -> None:
        """The step has been taken; from now on nobody may write."""
        self._marks = [(tensor, mark(tensor)) for _, _, tensor in self._tensors()]

    def end(self) -> None:
        """Writes are zbpp's own, or harmless."""
        self._marks = []

    def check(self) -> None:
        """Find what has been written to.

        Raises:
            RequestError: it names the first such tensor.
        """
        if all(mark(tensor) == at for tensor, at in self._marks):
            return
        changed = {id(tensor) for tensor, at in self._marks if mark(tensor) != at}
        names = [
            f"{self._name(parameter)}{what}"
            for parameter, what, tensor in self._tensors()
            if id(tensor) in changed
        ]
        raise RequestError(
            f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''} changed after "
            "an optimizer step that is not validated yet, and a rollback would undo "
            "the change; call pipeline.synchronize() before you write to parameters "
            "or optimizer state (or switch post_validation off)"
        )

    def _tensors(self) -> Iterable[tuple[Tensor, str, Tensor]]:
        """Each with the parameter that it belongs to, and a description."""
        for p in self._optimizers.parameters():
            yield p, "", p
        for optimizer in self._optimizers.all:
            for p, state in optimizer.state.items():
                for name, value in state.items() if isinstance(state, dict) else ():
                    if isinstance(value, Tensor) and isinstance(p, Tensor):
                        yield p, f" ({name} in {type(optimizer).__name__})", value

    def _name(self, parameter: Tensor) -> str:
        for _, name, p in self._stage.named_stepped():
            if p is parameter:
                return name
        return f"a parameter of shape {tuple(parameter.shape)}"
