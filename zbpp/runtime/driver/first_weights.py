"""Compare what layers of different chunks begin with, where a function builds them.

    each process draws from one seed          layers 0 and 4 begin alike
    layers share a parameter, without ties=   layers 0 and 7 begin alike

Both train another model than the plain one, and nobody else would notice.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from zbpp.core import RequestError
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.support.fingerprint import fingerprints
from zbpp.runtime.support.sharded import own_shard
from zbpp.runtime.support.torch_internals import is_fake

__all__ = ["FirstWeights", "check_first_weights", "describe_first_weights"]

_SAMPLE = 1000
_FEWEST = 8

FirstWeights = Mapping[tuple[int, int, str], tuple[str, tuple[int, ...], int]]
"""By chunk, layer and name in it: dtype, shape and fingerprint of random numbers."""


def describe_first_weights(
    chunks: Iterable[Chunk], ties: Sequence[Sequence[tuple[int, str]]]
) -> FirstWeights:
    """Describe the parameters of this process that look drawn, but for tied ones."""
    tied = {place for tie in ties for place in tie}
    found = {
        (chunk.index, layer, name): p
        for chunk in chunks
        for layer, module in chunk.numbered()
        for name, p in module.named_parameters()
        if (layer, name) not in tied and _looks_random(p)
    }
    numbers = fingerprints(found.values())
    return {
        place: (str(p.dtype), tuple(p.shape), number)
        for (place, p), number in zip(found.items(), numbers, strict=True)
    }


def check_first_weights(every: Iterable[FirstWeights]) -> None:
    """Compare the weights of all processes.

    Those that repeat within a chunk are meant to: one call has built them.

    Raises:
        RequestError: layers of different chunks begin with the same numbers.
    """
    places: dict[object, set[tuple[int, int, str]]] = {}
    for weights in every:
        for place, description in weights.items():
            places.setdefault(description, set()).add(place)
    for alike in places.values():
        layers = sorted({(chunk, layer) for chunk, layer, _ in alike})
        chunks = {chunk for chunk, _ in layers}
        if len(chunks) == 1 or len(chunks) < len(layers):
            continue
        tie = tuple((layer, name) for _, layer, name in sorted(alike))
        (a, first), (b, second) = tie[:2]
        raise RequestError(
            f"{first} of layer {a} and {second} of layer {b} begin with the same "
            "random numbers, but other processes or calls have built them: let the "
            "builder seed each layer by its index, torch.manual_seed(seed + index); "
            "if the layers share the parameter, name it: "
            f"zbpp.layers_from(build, n_layers=..., ties=[{tie}])"
        )


def _looks_random(p: Tensor) -> bool:
    """True for many different numbers in no order, as an initialisation draws them."""
    if p.is_meta or is_fake(p) or not p.is_floating_point():
        return False
    numbers = own_shard(p).detach()
    if numbers.layout is not torch.strided:
        return False
    flat = numbers.flatten()
    sample = flat[:: max(1, len(flat) // _SAMPLE)].float()
    if len(sample) < _FEWEST or len(sample.unique()) * 8 < len(sample):
        return False
    steps = sample.diff()
    return bool((steps > 0).any() and (steps < 0).any())
