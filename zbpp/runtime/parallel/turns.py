"""Two buffers that the layers of a stage use in turn, and the order that this needs.

gathers | layer 0 -> A | layer 1 -> B | layer 2 -> A | layer 3 -> B | ..
passes  |              | layer 0 in A | layer 1 in B | layer 2 in A | ..

Layer 2 is gathered into A once the pass of layer 0 has ended, beside that of layer 1.
Gradients go the other way: a layer's are copied into a buffer, and reduced from it.
Four conditions keep one layer from what belongs to another (the buffers and conditions
of YaFSDP, Yandex 2024):

    1  a layer is gathered only when the buffer's last pass has ended
    2  its pass begins only when its gather has ended
    3  its gradients are reduced only when all of them are in the buffer
    4  others are copied there only when that sum has ended

The host checks the order. On a GPU it needs no events: gathers and sums begin behind
what their stage's stream has been given, and the stage's stream waits for them.
"""

from enum import Enum, auto

__all__ = ["GradientTurn", "OrderError", "ParameterTurn"]


class OrderError(RuntimeError):
    """An ordering condition of alternating buffers does not hold."""

    def __init__(self, condition: int, layer: str, what: str) -> None:
        super().__init__(
            f"{layer}: {what}; condition {condition} of alternating buffers: "
            f"{_CONDITIONS[condition]}"
        )
        self.condition = condition
        self.layer = layer


_CONDITIONS = {
    1: "a layer is gathered only when the last pass in its buffer has ended",
    2: "a pass begins only when the gather of its layer has ended",
    3: "gradients are reduced only when all of them are in their buffer",
    4: "gradients are copied into a buffer only when its last sum has ended",
}


class _State(Enum):
    FREE = auto()
    FILLING = auto()
    FULL = auto()
    USED = auto()


class _Turn:
    """One buffer: the layer that has it, and how far it is."""

    def __init__(self) -> None:
        self._state = _State.FREE
        self.owner: str | None = None

    def _move(
        self, layer: str, before: _State, after: _State, condition: int, what: str
    ) -> None:
        owns = layer == self.owner or before is _State.FREE
        if self._state is not before or not owns:
            held = self._state.name.lower()
            if self.owner is not None:
                held = f"{held}, by {self.owner}"
            raise OrderError(condition, layer, f"{what} (its buffer is {held})")
        self._state = after
        self.owner = None if after is _State.FREE else layer


class ParameterTurn(_Turn):
    """A buffer that parameters are gathered into."""

    @property
    def is_ahead(self) -> bool:
        """A layer is gathered here, or being so, and its pass has not begun."""
        return self._state in (_State.FILLING, _State.FULL)

    def gather(self, layer: str) -> None:
        """A gather begins, on this stream."""
        what = "its gather begins while the buffer is in use"
        self._move(layer, _State.FREE, _State.FILLING, 1, what)

    def arrived(self, layer: str) -> None:
        """This stream has waited for the gather."""
        what = "a gather ends that never began"
        self._move(layer, _State.FILLING, _State.FULL, 2, what)

    def begin(self, layer: str) -> None:
        """A pass begins."""
        what = "its pass begins though nobody has waited for its gather"
        self._move(layer, _State.FULL, _State.USED, 2, what)

    def check(self, layer: str) -> None:
        """A pass runs."""
        what = "its pass runs and it is not gathered"
        self._move(layer, _State.USED, _State.USED, 2, what)

    def release(self, layer: str) -> None:
        """A pass has ended, with all that this stream has been given."""
        what = "it is freed, and its pass has not begun"
        self._move(layer, _State.USED, _State.FREE, 2, what)

    def cancel(self) -> None:
        """Forget what was gathered ahead in vain; this stream has waited for it."""
        assert self.is_ahead
        self._state, self.owner = _State.FREE, None


class GradientTurn(_Turn):
    """A buffer that gradients are reduced from."""

    def fill(self, layer: str) -> None:
        """Gradients are copied in, on this stream."""
        what = "its gradients are copied over those of another"
        self._move(layer, _State.FREE, _State.FILLING, 4, what)

    def filled(self, layer: str) -> None:
        """All are there, or this stream waits for them."""
        what = "no gradients were copied"
        self._move(layer, _State.FILLING, _State.FULL, 3, what)

    def reduce(self, layer: str) -> None:
        """Their sum begins, on this stream."""
        what = "a sum begins that lacks gradients"
        self._move(layer, _State.FULL, _State.USED, 3, what)

    def release(self, layer: str) -> None:
        """This stream has had the sum."""
        what = "a sum ends that never began"
        self._move(layer, _State.USED, _State.FREE, 4, what)
