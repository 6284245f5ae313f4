"""Count the bytes of tensors while they live: every storage once, aliases never.

A mode sees every operator, also those that autograd and checkpoints call. Whatever
storage comes out of one for the first time is counted until it is freed. Temporaries
inside a kernel are not seen, but for the copies of convolutions on CPUs.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zbpp.memory.engine_sums import EngineSums
from zbpp.runtime.support.devices import runs_ahead
from zbpp.runtime.support.torch_internals import inner_tensors

__all__ = ["Span", "StorageTracker", "storages_of"]


_ANSWER = torch.ops.aten._local_scalar_dense.default
"""Reads a number: of a bool, the answer to a question about data."""


class Span(NamedTuple):
    """Changes between two marks, in bytes above the first one.

    ``left`` is what there is at the end, ``peak`` the most that there was.
    """

    left: int
    peak: int

    def smaller(self, n: int) -> "Span":
        """Return a span with ``n`` bytes fewer left, and at a peak in its end."""
        left = self.left - n
        return Span(left, max(left, self.peak - n))


class StorageTracker(TorchDispatchMode):
    """While it is entered, `held` is what new storages take.

    Args:
        granularity: every storage takes a multiple of so many bytes; 512 on GPUs.
    """

    def __init__(self, *, granularity: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = 0
        self._most = 0
        self._granularity = granularity
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._sums = EngineSums()
        self.owner: object = None
        """Whose storages are made now; see `freed`."""
        self.freed: Counter[object] = Counter()
        """Bytes that were freed since `restart`, by owner."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator; what it makes is counted."""
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # its own operators come here again
        if func is _ANSWER and args[0].dtype is torch.bool:
            return True  # as of a mask without padding
        if self._sums.in_place(func, args):
            return torch.ops.aten.add_.Tensor(*args, **(kwargs or {}))
        result = _SHAPES.get(func, func)(*args, **(kwargs or {}))
        if func in _SHRUNK:
            n_bytes = self.size_of(args[0].untyped_storage())
            self._note(result, least=n_bytes)
            self._most = max(self._most, self.held + n_bytes)  # a copy of the summands
        elif isinstance(result, Tensor):
            self._note(result)
        elif isinstance(result, list | tuple):
            for item in result:
                if isinstance(item, Tensor):
                    self._note(item)
        if func in _REORDERING and not runs_ahead(args[0].device):
            copied = args[: _REORDERING[func]]
            if max(args[_REORDERING[func]].shape[2:], default=1) > 1:
                n_bytes = sum(self.size_of(x.untyped_storage()) for x in copied)
                self._most = max(self._most, self.held + n_bytes)
        return result

    def ignore(self, tensors: Iterable[Tensor]) -> int:
        """Never count these; return what they take.

        A view of one that was not ignored would count as new when it is first seen.
        """
        n_bytes = 0
        for tensor in tensors:
            for storage in storages_of(tensor):
                if storage._cdata not in self._known:
                    n_bytes += self.size_of(storage)
                    self._watch(storage, 0)
        return n_bytes

    def bytes_of(self, tensors: Iterable[Tensor]) -> int:
        """Bytes that tensors take, each storage once, counted or not."""
        storages = {s._cdata: s for tensor in tensors for s in storages_of(tensor)}
        return sum(map(self.size_of, storages.values()))

    def counted(self, tensors: Iterable[Tensor]) -> int:
        """The part of `held` that is in these tensors."""
        keys = {s._cdata for tensor in tensors for s in storages_of(tensor)}
        return sum(self._known[key][1] for key in keys if key in self._known)

    def restart(self) -> int:
        """Begin a span: `most` and `freed` start again; return `held`."""
        self._most = self.held
        self.freed.clear()
        return self.held

    @property
    def most(self) -> int:
        """Most that was held since `restart`."""
        return self._most

    def size_of(self, storage: torch.UntypedStorage) -> int:
        """Bytes of one storage, as it is allocated."""
        n = storage.nbytes()
        return n if n <= 0 else -(-n // self._granularity) * self._granularity

    def _note(self, tensor: Tensor, least: int = 0) -> None:
        for storage in storages_of(tensor):
            if storage._cdata not in self._known:
                n_bytes = max(least, self.size_of(storage))
                self._watch(storage, n_bytes)
                self.held += n_bytes
                if self.held > self._most:
                    self._most = self.held

    def _watch(self, storage: torch.UntypedStorage, n_bytes: int) -> None:
        key = storage._cdata
        entries, owner = self._known, self.owner
        self._sums.note(storage)

        def gone(_: object) -> None:
            del entries[key]
            self._sums.forget(key)
            self.held -= n_bytes
            self.freed[owner] += n_bytes

        entries[key] = weakref.ref(storage, gone), n_bytes


_SHRUNK = {torch.ops.aten.mse_loss.default, torch.ops.aten.smooth_l1_loss.default}
"""Kernels that shrink their result to a scalar, and leave its memory as it was."""

_REORDERING = {
    torch.ops.aten.convolution.default: 1,
    torch.ops.aten.convolution_backward.default: 2,
}
"""Kernels of CPUs that copy what they read to a layout of their own, and how many of
their first arguments; the next one is the weight. A product of points copies none."""

_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def storages_of(tensor: Tensor) -> list[torch.UntypedStorage]:
    """The storages behind a tensor; of a sharded one, those of this process."""
    inner = inner_tensors(tensor)
    if inner is not None:
        return [s for part in inner for s in storages_of(part)]
    if tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    parts = (getattr(tensor, name)() for name in _PARTS.get(tensor.layout, ()))
    return [part.untyped_storage() for part in parts]


_ALIGNED = 16  # bytes; rows of a grouped product begin at multiples of it


def _grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Products of groups: rows of ``a`` (or of both) belong to groups by ``offs``.

    torch's rule asks for bfloat16, its CPU kernel takes all.
    """
    if a.dim() == 2 and b.dim() == 2:
        assert offs is not None
        shape = [offs.shape[0], a.shape[0], b.shape[1]]
    elif a.dim() == 2:
        shape = [a.shape[0], b.shape[-1]]
    elif b.dim() == 2:
        shape = [a.shape[1], b.shape[1]]
    else:
        shape = [a.shape[0], a.shape[1], b.shape[-1]]
    dtype = out_dtype or a.dtype
    step = max(1, _ALIGNED // dtype.itemsize)
    stride = [-(-shape[-1] // step) * step, 1]
    if len(shape) == 3:
        stride.insert(0, stride[0] * shape[1])
    return torch.empty_strided(shape, stride, dtype=dtype, device=a.device)


def _same(tensor: Tensor) -> Tensor:
    """The tensor itself; torch's rule makes another one."""
    return tensor


_SHAPES: dict[Any, Callable[..., Tensor]] = {}
"""Shapes of results that torch's own rules for fake tensors refuse or get wrong, by
operator; those that this torch does not have are left out."""

if hasattr(torch.ops.aten, "_grouped_mm"):
    _SHAPES[torch.ops.aten._grouped_mm.default] = _grouped_mm
if torch.distributed.is_available():
    _SHAPES[torch.ops._c10d_functional.wait_tensor.default] = _same
