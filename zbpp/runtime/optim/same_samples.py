"""The samples that first and last stage were given, compared in every step.

    first stage    inputs, targets, key    } a few numbers in the vector that a step
    last stage     inputs, targets, key    } sums over all processes anyway

Nothing else would notice: a loss of these outputs and those targets is a number too.
Inputs or targets alone may differ: inputs that are augmented at random where they are
read, targets that are made up where no stage reads them. A key counts instead of both.
"""

import zlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp.core import RequestError, a_kind
from zbpp.runtime.comm.place import TENSOR_DIM, Place
from zbpp.runtime.support.pytree import tensors_in
from zbpp.runtime.support.sharded import is_sharded, own_shard
from zbpp.runtime.support.streams import sent_ahead

_RANK, _INPUTS, _TARGETS, _KEY = range(4)
"""Numbers of a first or last stage: rank + 1, and digests; 0: there is none."""

_MOST = 1024
"""Elements of a tensor that count, spread evenly."""
_MODULUS = 2**52
"""Integers below it are exact in float64."""
_ODD = 2654435761


class SameSamples:
    """Digests of the batch of a step, and their comparison.

    ``ends`` tell whether this process reads the inputs, and whether the targets.
    """

    def __init__(
        self,
        peers: Place,
        ends: tuple[bool, bool],
        parameters: Iterable[Tensor],
        device: torch.device,
    ) -> None:
        self._peers, self._ends, self._device = peers, ends, device
        has_plain = any(p.requires_grad and not is_sharded(p) for p in parameters)
        self._is_plain = has_plain and TENSOR_DIM in peers.sizes
        self._numbers = torch.zeros(4, dtype=torch.int64, device=device)

    def note(self, inputs: Any, targets: Any, key: Any, *, is_first: bool) -> None:
        """Record the batch of a step, or of part of a step."""
        if not any(self._ends):
            return
        rank = torch.tensor(dist.get_rank() + 1)
        parts = [rank, *map(_digest, (inputs, targets, _whole_numbers(key)))]
        now = torch.stack([sent_ahead(part, self._device) for part in parts])
        if not is_first:  # what one of the parts lacks is not compared
            before, is_known = self._numbers, (self._numbers != 0) & (now != 0)
            now[1:] = torch.where(is_known, 1 + (before * 31 + now) % _MODULUS, 0)[1:]
        self._numbers = now

    def vector(self) -> Tensor:
        """The numbers of this process, float64; zeros between the ends."""
        is_plain = self._numbers.new_full((1,), self._is_plain)
        ends = [self._numbers * is_end for is_end in self._ends]
        return torch.cat([is_plain, *ends]).double()

    def difference(self, rows: Tensor, step: int) -> str | None:
        """Compare the numbers of each process of a stage, summed over the stages.

        None: they read the same samples.
        """
        first, last = rows[:, 1:5], rows[:, 5:]
        differs = _differs(first, last)
        has_key = (first[:, _KEY] != 0) & (last[:, _KEY] != 0)
        both = differs[:, _INPUTS] & differs[:, _TARGETS]
        if torch.where(has_key, differs[:, _KEY], both).any():
            return (
                f"the first and the last stage read other samples in step {step}, "
                "which was not taken: all stages of a replica must be given the same "
                "batch. Let the loader shuffle alike on all ranks: "
                "DataLoader(shuffle=True) takes its seed from torch's generator, so "
                "seed that alike and draw alike, or give the loader "
                "generator=torch.Generator().manual_seed(0); make a DistributedSampler "
                "with num_replicas=pipeline.place.n_replicas and "
                "rank=pipeline.place.replica"
            )
        if not rows[:, 0].any():
            return None
        dim = [*self._peers.sizes].index(TENSOR_DIM)
        for what, numbers, place in (
            ("inputs", first, _INPUTS),
            ("targets", last, _TARGETS),
        ):
            grid = numbers.reshape(*self._peers.sizes.values(), -1)
            neighbours = grid.narrow(dim, 0, 1).expand_as(grid)
            differs = _differs(neighbours, grid)[..., place]
            if differs.any():
                a, b = (int(x[differs][0, _RANK]) - 1 for x in (neighbours, grid))
                return (
                    f"ranks {a} and {b} are neighbours along 'tp' and read other "
                    f"{what} in step {step}, but gradients of plain parameters are not "
                    "summed over 'tp': give them the same batch, or give the mesh a "
                    "larger 'dp' for other samples"
                )
        return None


def _differs(a: Tensor, b: Tensor) -> Tensor:
    """True where two numbers are there and not equal."""
    return (a != 0) & (b != 0) & (a != b)


def _digest(batch: Any) -> Tensor:
    """A number for the dtypes, shapes and some elements of tensors; 0 for None."""
    total = torch.tensor(0)
    if batch is None:
        return total
    for x in map(own_shard, tensors_in(batch)):
        about = zlib.crc32(f"{x.dtype} {tuple(x.shape)}".encode())
        total = (total * 31 + about) % _MODULUS
        if x.layout is torch.strided and x.numel() and not x.is_meta:
            flat = x.detach().flatten()
            # an odd step: an even one may meet the same column in every row
            flat = flat[:: -(-len(flat) // _MOST) | 1].contiguous().resolve_conj()
            numbers = flat.resolve_neg().view(torch.uint8).long()
            weights = torch.arange(1, len(numbers) + 1, device=x.device) * _ODD % 2**31
            total = (total + (numbers * weights).sum()) % _MODULUS
    return 1 + total


def _whole_numbers(key: Any) -> Tensor | None:
    if key is None:
        return None
    try:
        numbers = torch.as_tensor(key)
    except (TypeError, ValueError, RuntimeError):
        numbers = torch.tensor(0.5)
    if numbers.is_floating_point() or numbers.is_complex():
        raise RequestError(
            f"key is {a_kind(key)}; give the numbers of the samples in the data set, "
            "whole numbers in a tensor or a list"
        )
    return numbers.flatten().long()
