"""The code that Inductor writes for a finished graph, run on fake tensors.

    buf0 = empty_strided_cpu(...)       a fake tensor: counted
    cpp_fused_add_0(arg, buf0)          nothing: no kernel is built
    extern_kernels.mm(buf0, w, out=...) torch's own, which knows sizes only
    del buf0                            freed

So what is there at any time is what a run has: the code says which results take memory,
where one takes the place of another, and when each is let go.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zbpp.runtime.support.compile_internals import without_kernels, write_code

__all__ = ["written_call"]


def written_call(
    graph: fx.GraphModule, inputs: Sequence[Any], **about: Any
) -> Callable[[list[Any]], Any]:
    """Return what runs a finished graph on fake tensors; it empties its list.

    Args:
        graph: of the compiler.
        inputs: its examples.
        about: what the compiler says of it.
    """
    code, constants = write_code(graph, inputs, **about)
    names = without_kernels(code, _Kernels())
    names.update(constants)
    made = {name: f for name, f in _ON_FAKES.items() if name in names}
    names.update(made)
    call: Callable[[list[Any]], Any] = names["call"]
    return call


class _Kernels:
    """Stands for Inductor's builder of kernels, and for every kernel."""

    def __getattr__(self, _: str) -> Callable[..., Any]:
        return self

    def __call__(self, *_: object, **__: object) -> "_Kernels":
        return self


def _empty(device: str) -> Callable[..., Tensor]:
    def empty(sizes: Any, strides: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(sizes, strides, dtype=dtype, device=device)

    return empty


def _reinterpret(tensor: Tensor, sizes: Any, strides: Any, more: int = 0) -> Tensor:
    return torch.as_strided(tensor, sizes, strides, tensor.storage_offset() + more)


def _assert_nothing(*_: object) -> None:
    """Stand for a check of a tensor's sizes and place."""


_ON_FAKES: dict[str, Callable[..., Any]] = {
    **{
        f"empty_strided_{kind}": _empty(kind) for kind in ("cpu", "cuda", "xpu", "mtia")
    },
    "reinterpret_tensor": _reinterpret,
    "assert_size_stride": _assert_nothing,
    "assert_alignment": _assert_nothing,
}
"""Functions of Inductor's that read addresses, by the names that the code has."""
