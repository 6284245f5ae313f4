"""A hash of all parameters that does not depend on how the model is split.

Every process hashes the parameters it holds; the hash of the model is that of all
these hashes in the order of the parameters' global names. Nobody sends parameters.
"""

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from zbpp.runtime.support.sharded import whole

__all__ = ["combine", "fingerprints"]


def fingerprints(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Sha256 of every parameter by its global name: its dtype, shape and bytes."""
    return {name: _sha256(parameter) for name, parameter in parameters}


def combine(parts: Iterable[Mapping[str, str]]) -> str:
    """Sha256 of the whole model from the `fingerprints` of all processes.

    Raises:
        RuntimeError: replicas hold different parameters.
    """
    lines: dict[str, str] = {}
    for part in parts:
        mismatches = [
            name for name in part if lines.get(name, part[name]) != part[name]
        ]
        if mismatches:
            raise RuntimeError(f"replicas hold different parameters: {mismatches[:3]}")
        lines |= part
    text = "".join(f"{name} {lines[name]}\n" for name in sorted(lines))
    return hashlib.sha256(text.encode()).hexdigest()


def _sha256(parameter: Tensor) -> str:
    value = whole(parameter).detach().cpu().contiguous()
    digest = hashlib.sha256(f"{value.dtype} {tuple(value.shape)}\n".encode())
    digest.update(value.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
