"""One stage's gradients: their norms by layer.

Gradients may be dense, complex, sparse (COO) or sharded over a tensor-parallel mesh: a
norm is always that of all numbers, the same on every process of the mesh.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from itertools import chain, islice

import torch
from torch import Tensor

from zbpp.runtime.comm.place import ALONE, Place
from zbpp.runtime.stage import Stage
from zbpp.runtime.support.sharded import local_part

_PIECE = 2**16
"""Numbers that are copied to float64 at a time: these stay in the cache."""


def squared_norms(
    stage: Stage, counted: Collection[Tensor], n_layers: int, peers: Place = ALONE
) -> Tensor:
    """Squared gradient norm of each layer of the model, (n_layers,) in float64.

    Layers of other stages have 0. Gradients of ``counted`` count once each, those of
    parameters that are in no layer (a loss may have some) with the stage's last layer,
    and those that several processes of the stage have on one of them.
    """
    *_, (last, _) = stage.numbered()
    places: list[tuple[int, Tensor]]
    places = [(index, p) for index, _, p in stage.named_stepped()]
    places += [(last, p) for p in counted]
    left, owns = set(counted), cache(peers.owns)
    layers, gradients = [], []
    for index, p in places:
        if p in left and p.grad is not None:
            left.remove(p)
            part = local_part(p.grad)
            if owns(part.names):
                layers.append(index)
                gradients.append(_real_numbers(part.numbers))
    by_layer = defaultdict(list)
    for index, square in zip(layers, _squares(gradients), strict=True):
        by_layer[index].append(square)
    norms = torch.zeros(n_layers, dtype=torch.float64, device=stage.device)
    for index, squares in by_layer.items():
        norms[index] = torch.stack(squares).sum()
    return norms


def _real_numbers(numbers: Tensor) -> Tensor:
    """The numbers of a gradient that may be sparse or complex."""
    if numbers.layout is torch.sparse_coo:
        numbers = numbers.coalesce().values()
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers.resolve_conj())
    return numbers


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
    else:  # in pieces, as the kernel copies a whole tensor to float64
        pieces = [torch.split(x.reshape(-1), _PIECE) for x in every]
        of_pieces = iter(
            torch._foreach_norm(list(chain(*pieces)), 2, dtype=torch.float64)
        )
        parts = [list(islice(of_pieces, len(part))) for part in pieces]
        norms = [x[0] if len(x) == 1 else _norm(torch.stack(x)) for x in parts]
    return torch.stack(norms).square().unbind()


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm


def multiply_gradients(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply all gradients that there are, in place; nothing is done for 1."""
    if factor == 1.0:
        return
    plain = []
    for p in parameters:
        # one call for many rounds the factor to 16 bits, where the fused one does not
        if type(p.grad) is Tensor and p.grad.dtype in (torch.float32, torch.float64):
            plain.append(p.grad)
        elif p.grad is not None:
            p.grad.mul_(factor)
    if plain:
        torch._foreach_mul_(plain, factor)
