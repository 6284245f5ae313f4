"""The comparison of all tests of bits: nested containers, leaf by leaf."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["bytes_of", "copy_of", "difference", "flat"]


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested containers, by path; of tensors copies."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flat(inner, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from flat(inner, f"{path}/{index}")
    else:
        yield path, copy_of(value) if isinstance(value, Tensor) else value


def copy_of(x: Tensor) -> Tensor:
    """A copy on the host, of DTensors the whole."""
    whole: Any = x
    if hasattr(x, "full_tensor"):  # the host may have it, of a mesh of devices
        parts = whole.to_local(), whole.device_mesh, whole.placements
        sizes = {"shape": x.shape, "stride": x.stride()}
        whole = type(whole).from_local(*parts, run_check=False, **sizes).full_tensor()
    return whole.detach().clone().cpu()


def bytes_of(x: Tensor) -> bytes:
    x = x.detach().to_dense() if x.is_sparse else x.detach()
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def difference(
    found: Any, expected: Any, *, rounding: float | None = None
) -> str | None:
    """Name the first leaf that differs by more than rounding; None: by a bit."""
    left, right = dict(flat(found)), dict(flat(expected))
    for path in [*left, *right]:
        if path not in left or path not in right:
            return f"{path} is missing {'there' if path in left else 'here'}"
        if not _is_same(left[path], right[path], rounding):
            return f"{path}: {left[path]!s:.200} is not {right[path]!s:.200}"
    return None


def _is_same(x: Any, y: Any, rounding: float | None) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        if x.dtype != y.dtype or x.shape != y.shape:
            return False
        if rounding is None:
            return bytes_of(x) == bytes_of(y)
        x, y = (z.to_dense() if z.is_sparse else z for z in (x, y))
        return torch.allclose(x, y, rtol=rounding, atol=rounding / 10)
    if rounding is not None and isinstance(x, float) and isinstance(y, float):
        return math.isclose(x, y, rel_tol=rounding, abs_tol=rounding / 10)
    return repr(x) == repr(y)
