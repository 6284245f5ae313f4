"""Marks that tell whether a tensor was written to."""

from torch import Tensor, nn

__all__ = ["Mark", "mark"]

Mark = tuple[int, int] | None


def mark(tensor: Tensor) -> Mark:
    """Changes when a tensor is written to, or gets another memory.

    Writes through ``tensor.data`` are not seen. None: nothing is known of this tensor.
    """
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_inference():
        return None
    return tensor._version, tensor.data_ptr()
