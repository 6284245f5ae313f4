"""Temporaries inside CPU kernels: matrices that oneDNN packs, buffers of threads.

Fake tensors do not show them. Products and convolutions of moderate size are therefore
run once each, on real zeros, and the allocator is asked what they took. It depends on
the processor and on the number of threads. Larger ones are left out: there, what is
packed is small beside what is computed. Casts of operands are reckoned; see `casts`.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from zbpp.memory.operators.casts import cast_bytes
from zbpp.runtime.support.pytree import tensors_in
from zbpp.runtime.support.torch_internals import profiling

__all__ = ["KernelScratch"]

_ATEN = torch.ops.aten
_PROBED = {
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN.baddbmm.default,
    _ATEN.convolution.default,
    _ATEN.convolution_backward.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default,
    _ATEN.native_batch_norm_backward.default,
    _ATEN.native_batch_norm.default,
    _ATEN.native_layer_norm_backward.default,
    _ATEN.native_group_norm_backward.default,
}
_INTO = {
    getattr(_ATEN, name).out: getattr(_ATEN, name).default
    for name in ("mm", "addmm", "bmm", "baddbmm")
}
"""Products that are written to memory which is there already."""
_MOST_BYTES = 2**26
_MOST_WORK = 2**35
"""Of a call: bytes of its tensors, and the number of its multiplications, about."""


class KernelScratch:
    """Bytes that single calls of kernels need besides their results, by their sizes."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}
        self._wanted: dict[Any, tuple[Any, Any, Any, int]] = {}

    def of(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        """Bytes that a call needs; 0 if it is not known yet, and is to be probed."""
        if func in _INTO:
            func, kwargs = _INTO[func], {k: v for k, v in kwargs.items() if k != "out"}
        if func not in _PROBED:
            return cast_bytes(func, args, kwargs, result)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        shapes = tuple(_shape_of(leaf) for leaf in leaves)
        key = (func, shapes)
        found = self._known.get(key)
        if found is None:
            made = sum(t.numel() for t in tensors_in(result))
            self._wanted.setdefault(key, (func, shapes, spec, made))
        return found or 0

    def probe(self) -> bool:
        """Run the calls that are wanted; True if one of them needs anything."""
        wanted, self._wanted = self._wanted, {}
        found = {}
        for key, (func, shapes, spec, made) in wanted.items():
            found[key] = 0
            if _is_small(shapes, made) and not profiling():
                with _disable_current_modes(), torch.no_grad():
                    args, kwargs = pytree.tree_unflatten(map(_made, shapes), spec)
                    found[key] = _peak(lambda: func(*args, **kwargs))  # noqa: B023
        self._known.update(found)
        return any(found.values())


def _shape_of(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return _Shape(tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype)


class _Shape(tuple[Any, ...]):
    """Sizes, strides and dtype of a tensor."""

    def __new__(cls, *parts: Any) -> "_Shape":
        return super().__new__(cls, parts)


def _is_small(shapes: Iterable[Any], made: int) -> bool:
    numels = [
        torch.Size(shape[0]).numel() for shape in shapes if isinstance(shape, _Shape)
    ]
    numels.append(made)
    if any(n == 0 for n in numels):
        return False
    work = 1.0
    for n in sorted(numels)[-3:]:
        work *= n**0.5  # of (m, k), (k, n) and (m, n): m k n
    return sum(numels) * 4 <= _MOST_BYTES and work <= _MOST_WORK


def _made(shape: Any) -> Any:
    if not isinstance(shape, _Shape):
        return shape
    size, stride, dtype = shape
    return torch.empty_strided(size, stride, dtype=dtype).zero_()


def _peak(call: Callable[[], Any]) -> int:
    """Most that a call allocates above what it leaves."""
    autograd: Any = torch.autograd
    autograd._enable_profiler_legacy(_memory_profile(autograd))
    try:
        kept = call()
    finally:
        events = autograd._disable_profiler_legacy()
    held = most = 0
    for n_bytes in _allocations(events):
        held += n_bytes
        most = max(most, held)
    del kept
    return most - held


def _memory_profile(autograd: Any) -> Any:
    options = torch._C._profiler._ExperimentalConfig()
    state = autograd.ProfilerState.CPU
    return autograd.ProfilerConfig(state, False, True, False, False, False, options)


def _allocations(events: Any) -> Iterator[int]:
    for thread in events:
        for event in thread:
            if event.kind() == "memory_alloc":
                yield event.cpu_memory_usage()
