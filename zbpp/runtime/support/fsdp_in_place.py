"""Custom all-gathers of `fully_shard`, in place.

Torch gathers a layer into one tensor, in which every process's parts lie together, and
copies each parameter out of it to where it is used:

    parts -> copied into a tensor -> gathered there -> copied to parameters    torch
    parts -> gathered where parameters are used                                here

So a layer that is gathered ahead needs no memory but its own.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp.core import RequestError

__all__ = ["InPlace", "aligned"]

_ALIGNED = 64
"""Bytes that each parameter in a buffer begins at a multiple of."""


def aligned(n_bytes: int) -> int:
    """Bytes that a parameter takes of a buffer."""
    return -(-n_bytes // _ALIGNED) * _ALIGNED


class InPlace:
    """All-gathers of `fully_shard` right to where parameters are used.

    What torch takes for the tensor is only a name for the parts of a buffer.

    Args:
        parts: of the buffer, one for each parameter.
        gather: called with them, this process's part of each, the group, and whether
            the work is to be waited for later.
        begin: called where a pass has waited.
    """

    def __init__(
        self,
        parts: Sequence[Tensor],
        gather: Callable[[Sequence[Tensor], Sequence[Tensor], Any, bool], Any],
        begin: Callable[[], None],
    ) -> None:
        self._parts = parts
        self._gather = gather
        self.begin = begin

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A name for the parts; it has no memory."""
        return _Name(self, size[0], dtype, device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather."""
        own = cast(_Name, input_tensor).own
        parts = [p.view(x.dtype) for p, x in zip(self._parts, own, strict=True)]
        work: dist.Work | None = self._gather(parts, own, group, async_op)
        return work


class _Name(Tensor):
    """Stands for a gathered layer in torch's own code."""

    gathers: InPlace
    own: Sequence[Tensor]

    @staticmethod
    def __new__(
        cls, gathers: InPlace, size: int, dtype: torch.dtype, device: torch.device
    ) -> "_Name":
        make: Any = Tensor._make_wrapper_subclass
        name: _Name = make(cls, (size,), dtype=dtype, device=device)
        name.gathers, name.own = gathers, ()
        return name

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name: _Name
        match func._schema.name:
            case "fsdp::all_gather_copy_in":
                own, name, *_ = args
                given = name._again()
                given.own = own
                return given, name._again()
            case "aten::view":
                return args[0]._again()
            case "fsdp::split_with_sizes_copy":
                args[0].gathers.begin()
                return None
        raise RequestError(
            f"torch {torch.__version__} does {func} with gathered parameters, which "
            "alternating buffers do not know; leave them out"
        )

    def _again(self) -> "_Name":
        return _Name(self.gathers, self.numel(), self.dtype, self.device)
