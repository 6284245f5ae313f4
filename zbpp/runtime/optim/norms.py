"""One stage's gradients: their norms by layer.

Gradients may be dense, complex, sparse (COO) or sharded over a tensor-parallel mesh: a
norm is always that of all numbers, the same on every process of the mesh.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from zbpp.runtime.comm.place import ALONE, Place
from zbpp.runtime.stage import Stage
from zbpp.runtime.support.sharded import Part, local_part

__all__ = ["multiply_gradients", "squared_norms"]

_PIECE = 2**16
"""Numbers that are copied to float64 at a time: these stay in the cache."""


def squared_norms(
    stage: Stage, counted: Collection[Tensor], peers: Place = ALONE
) -> Iterable[tuple[int, Tensor]]:
    """Squared gradient norm per layer, float64; a shared parameter counts once.

    Args:
        stage: whose layers are meant.
        counted: parameters whose gradients count. Those of them that are in no layer
            (a loss may have some) count with the stage's last layer.
        peers: processes of the stage. What several of them hold counts on one.
    """
    gradients: list[tuple[int, Tensor]] = []
    left = dict.fromkeys(counted)
    *_, (last, _) = stage.numbered()
    for index, _, p in stage.named_stepped():
        if p in left:
            del left[p]
            if p.grad is not None:
                gradients.append((index, p.grad))
    gradients += [(last, p.grad) for p in left if p.grad is not None]
    numbers = [gradient for _, gradient in gradients]
    if all(map(_is_real, numbers)):
        if not peers.owns(()):
            return
        squares = _squares(numbers)
    else:
        parts = [_part(gradient) for gradient in numbers]
        squares = [
            square if peers.owns(part.names) else torch.zeros_like(square)
            for square, part in zip(
                _squares([part.numbers for part in parts]), parts, strict=True
            )
        ]
    by_layer: dict[int, list[Tensor]] = {}
    for (index, _), square in zip(gradients, squares, strict=True):
        by_layer.setdefault(index, []).append(square)
    for index, of_layer in by_layer.items():
        yield index, torch.stack(of_layer).sum()


def _is_real(x: Tensor) -> bool:
    """True if the numbers of a gradient are the tensor itself."""
    is_dense = type(x) is Tensor and x.layout is torch.strided
    return is_dense and not x.dtype.is_complex


def _part(gradient: Tensor) -> Part:
    """The real numbers of a gradient that this process holds."""
    part = local_part(gradient)
    numbers = part.numbers
    if numbers.layout is torch.sparse_coo:
        numbers = numbers.coalesce().values()
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers.resolve_conj())
    return part if numbers is part.numbers else replace(part, numbers=numbers)


def _squares(every: Sequence[Tensor]) -> Sequence[Tensor]:
    """Squared norm of each tensor, float64.

    On CPUs one call does what a call for each would, to the bit. On GPUs the kernel for
    all would round differently, and is taken only if all tensors suit it: the last bits
    would depend on what else is on the stage.
    """
    if not every:
        return ()
    if any(x.device.type != "cpu" for x in every):
        norms = [_norm(x) for x in every]
    elif all(x.numel() <= _PIECE for x in every):
        norms = list(torch._foreach_norm(list(every), 2, dtype=torch.float64))
    else:  # the kernel would copy all of a large tensor to float64
        buffer = torch.empty(_PIECE, dtype=torch.float64)
        norms = [_norm_in_pieces(x, buffer) for x in every]
    return torch.stack(norms).square().unbind()


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm


def _norm_in_pieces(x: Tensor, buffer: Tensor) -> Tensor:
    if x.numel() <= len(buffer):
        return _norm(x)
    pieces = torch.split(x.reshape(-1), len(buffer))
    norms = [_norm(buffer[: len(piece)].copy_(piece)) for piece in pieces]
    return _norm(torch.stack(norms))


def multiply_gradients(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply all gradients that there are, in place; nothing is done for 1."""
    if factor == 1.0:
        return
    plain = []
    for p in parameters:
        if p.grad is not None and _is_plain(p.grad):
            plain.append(p.grad)
        elif p.grad is not None:
            p.grad.mul_(factor)
    if plain:
        torch._foreach_mul_(plain, factor)


def _is_plain(x: Tensor) -> bool:
    """True if a call for many tensors multiplies it as its own does, to the bit.

    In 16 bits torch rounds the factor otherwise.
    """
    return x.dtype in (torch.float32, torch.float64) and _is_real(x)
