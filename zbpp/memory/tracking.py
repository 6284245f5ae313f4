"""Count the bytes of tensors while they live: every storage once, aliases never."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zbpp.runtime.support.torch_internals import inner_tensors

_ANSWER = torch.ops.aten._local_scalar_dense.default
"""Reads a number: the counter of an optimizer, or if a mask leaves nothing out."""

_SHRUNK = {torch.ops.aten.mse_loss.default, torch.ops.aten.smooth_l1_loss.default}
"""Kernels that shrink their result to a scalar, and leave its memory as it was."""


class Tracker(TorchDispatchMode):
    """While it is entered, new storages are counted until they are freed.

    Temporaries inside a kernel are not seen.

    Args:
        block: every storage takes a multiple of so many bytes; 512 on GPUs.
    """

    def __init__(self, block: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        """Bytes of the storages that were made and live."""
        self.most = 0
        """Most since `restart`."""
        self._block = block
        self._known: dict[int, tuple[int, Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and count the memory of its results."""
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # its operators come here again
        if func is _ANSWER:
            return 1.0 if args[0].is_floating_point() else 1
        result = _SHAPES.get(func, func)(*args, **(kwargs or {}))
        for item in result if isinstance(result, list | tuple) else (result,):
            if isinstance(item, Tensor):
                self._note(item, bytes_of(args[:1]) if func in _SHRUNK else 0)
        if func in _SHRUNK:  # it copies the summands
            self.most = max(self.most, self.now + bytes_of(args[:1], self._block))
        return result

    def restart(self) -> int:
        """Begin a span: return `now`, above which `most` is measured."""
        self.most = self.now
        return self.now

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Never count these, nor their views."""
        for key, storage in storages_of(tensors).items():
            self._watch(key, storage, 0)

    def _note(self, tensor: Tensor, least: int = 0) -> None:
        for key, storage in storages_of([tensor]).items():
            if key not in self._known:
                size = max(least, storage.nbytes())
                self._watch(key, storage, _rounded(size, self._block))
                self.now += self._known[key][0]
                self.most = max(self.most, self.now)

    def _watch(self, key: int, storage: Any, n_bytes: int) -> None:
        def gone(_: object) -> None:
            self.now -= self._known.pop(key)[0]

        self._known[key] = n_bytes, weakref.ref(storage, gone)


def _rounded(n_bytes: int, block: int) -> int:
    return -(-n_bytes // block) * block


def storages_of(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """The storages behind dense tensors, by number; of a sharded one, those here."""
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        inner = inner_tensors(tensor)
        if inner is not None:
            storages |= storages_of(inner)
        elif tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage
    return storages


def bytes_of(tensors: Iterable[Tensor], block: int = 1) -> int:
    """Bytes that tensors take; shared memory counts once."""
    storages = storages_of(tensors).values()
    return sum(_rounded(storage.nbytes(), block) for storage in storages)


def _grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Products of groups: rows of ``a`` (or of both) belong to groups by ``offs``.

    torch's rule for fake tensors asks for bfloat16, its CPU kernel takes all.
    """
    shape = [a.shape[-2], b.shape[-1]]
    if a.dim() == b.dim():
        shape.insert(0, len(a if offs is None or a.dim() == 3 else offs))
    return torch.empty(shape, dtype=out_dtype or a.dtype, device=a.device)


_SHAPES: dict[Any, Any] = {torch.ops.aten._grouped_mm.default: _grouped_mm}
"""Rules of operators whose rule for fake tensors is stricter than the kernel."""
