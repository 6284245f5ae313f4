"""The samples that first and last stage were given, compared in every step.

    first stage    inputs, targets, key    } a few numbers in the vector that a step
    last stage     inputs, targets, key    } sums over all processes anyway

Nobody else would notice: a loss of these outputs and those targets is a number too.
Inputs or targets alone may differ: inputs that are augmented at random where they are
read, targets that are made up where nobody reads them. A key counts instead of both.
"""

import zlib
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp.core import RequestError, a_kind
from zbpp.runtime.comm.place import TENSOR_DIM, Place, row_of
from zbpp.runtime.support.pytree import tensors_in
from zbpp.runtime.support.sharded import is_sharded, own_shard
from zbpp.runtime.support.streams import sent_ahead

__all__ = ["SameSamples"]

Digest = Tensor | int
"""Of a batch, on its device; 0: none was given."""

_END = range(4)
"""Rank + 1, digests of inputs and targets, and key of one end."""

_MOST = 1024
"""Elements of a tensor that count, spread evenly."""
_MODULUS = 2**52
"""Integers below it are exact in float64."""
_ODD = 7046029254386353131


class SameSamples:
    """Digests of what one process was given, and their comparison.

    Args:
        peers: processes of its stage.
        is_first: it reads the inputs.
        is_last: it reads the targets.
        parameters: of its stage.
    """

    def __init__(
        self,
        peers: Place,
        *,
        is_first: bool,
        is_last: bool,
        parameters: Iterable[Tensor],
    ) -> None:
        place = {dim: at for dim, at in peers.coordinates.items() if dim != TENSOR_DIM}
        self._place = row_of([*place.values()], [1024] * len(place))
        self._rank = dist.get_rank()
        self._is_first, self._is_last = is_first, is_last
        self._is_plain = TENSOR_DIM in peers.coordinates and any(
            p.requires_grad and not is_sharded(p) for p in parameters
        )
        self._digests: list[Digest] = [0, 0, 0]

    def note(
        self, inputs: Any, targets: Any, key: Any = None, *, is_first: bool = True
    ) -> None:
        """Note the batch of a step, or of a part of one.

        Args:
            inputs: as this process was given them, whether it reads them or not.
            targets: likewise.
            key: numbers of the samples.
            is_first: the part is the first one.

        Raises:
            RequestError: key is something else.
        """
        if not (self._is_first or self._is_last):
            return
        digests = [_digest(inputs), _digest(targets), _digest_of_key(key)]
        if not is_first:
            pairs = zip(self._digests, digests, strict=True)
            digests = [_joined(before, now) for before, now in pairs]
        self._digests = digests

    def vector(self, device: torch.device) -> Tensor:
        """The numbers of this process, float64; zeros between the ends."""
        nothing = [0 for _ in _END]
        end = [self._rank + 1, *self._digests]
        numbers = [
            int(self._is_plain),
            self._place if self._is_first else 0,
            *(end if self._is_first else nothing),
            *(end if self._is_last else nothing),
        ]
        host = [0 if isinstance(number, Tensor) else number for number in numbers]
        vector = sent_ahead(torch.tensor(host, dtype=torch.float64), device)
        for place, number in enumerate(numbers):
            if isinstance(number, Tensor):
                vector[place] = number
        return vector

    @staticmethod
    def difference(rows: Tensor, step: int) -> str | None:
        """Compare the sums of all processes; None: they read the same samples.

        Args:
            rows: the numbers of each process of a stage, summed over the stages.
            step: number of the step.
        """
        neighbours: dict[float, tuple[list[float], list[float]]] = {}
        table = rows.tolist()
        is_plain = any(row[0] for row in table)
        for row in table:
            first, last = row[2:6], row[6:]
            if _ends_differ(first, last):
                return _other_samples(step)
            a, b = neighbours.setdefault(row[1], (first, last))
            for what, place, mine, theirs in (
                ("inputs", 1, a, first),
                ("targets", 2, b, last),
            ):
                if is_plain and _differ(mine, theirs, place):
                    return (
                        f"ranks {mine[0] - 1:.0f} and {theirs[0] - 1:.0f} are "
                        f"neighbours along 'tp' and read other {what} in step {step}, "
                        "but gradients of plain parameters are not summed over 'tp': "
                        "give them the same batch, or give the mesh a larger 'dp' for "
                        "other samples"
                    )
        return None


def _ends_differ(first: Sequence[float], last: Sequence[float]) -> bool:
    if first[3] and last[3]:
        return first[3] != last[3]
    return _differ(first, last, 1) and _differ(first, last, 2)


def _differ(a: Sequence[float], b: Sequence[float], place: int) -> bool:
    """True if two processes were given things that are not equal."""
    return bool(a[place] and b[place]) and a[place] != b[place]


def _other_samples(step: int) -> str:
    return (
        f"the first and the last stage read other samples in step {step}, which was "
        "not taken: all stages of a replica must be given the same batch. Let the "
        "loader shuffle alike on all ranks: DataLoader(shuffle=True) takes its seed "
        "from torch's generator, so seed that alike and draw alike, or give the loader "
        "generator=torch.Generator().manual_seed(0); make a DistributedSampler with "
        "num_replicas=pipeline.place.n_replicas and rank=pipeline.place.replica"
    )


def _digest(batch: Any) -> Digest:
    if batch is None:
        return 0
    total: Any = 0
    for x in tensors_in(batch):
        total = (total * 31 + _digest_of_tensor(own_shard(x))) % _MODULUS
    digest: Digest = 1 + total
    return digest


def _digest_of_tensor(tensor: Tensor) -> Digest:
    """A number for the dtype, the shape and some elements, on the tensor's device."""
    about = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
        return about
    flat = _bits(tensor)
    if len(flat) > _MOST:
        flat = flat[:: len(flat) // _MOST | 1][:_MOST]
    weights = _weights(tensor.device)[: len(flat)]
    if flat.is_cpu:  # numpy takes a third of the time
        return about + int(flat.numpy().dot(weights.numpy())) % _MODULUS
    total: Tensor = (flat * weights).sum() % _MODULUS
    return about + total


@cache
def _weights(device: torch.device) -> Tensor:
    return torch.arange(1, _MOST + 1, device=device) * _ODD


def _bits(tensor: Tensor) -> Tensor:
    """The bits of a dense tensor as integers, flat."""
    data = tensor.detach()
    if data.is_complex():
        data = torch.view_as_real(data.resolve_conj())
    integers = (torch.uint8, torch.int16, torch.int32, torch.int64)
    dtype = integers[data.element_size().bit_length() - 1]
    return data.resolve_neg().reshape(-1).view(dtype)


def _digest_of_key(key: Any) -> int:
    """A number for the samples of a key; 0: there is none.

    Raises:
        RequestError: it does not hold whole numbers.
    """
    if key is None:
        return 0
    try:
        numbers = torch.as_tensor(key)
    except (TypeError, ValueError, RuntimeError):
        numbers = torch.tensor(0.5)
    if numbers.is_floating_point() or numbers.is_complex():
        raise RequestError(
            f"key is {a_kind(key)}; give the numbers of the samples in the data set, "
            "whole numbers in a tensor or a list"
        )
    whole = numbers.flatten().to("cpu", torch.int64)
    return 1 + zlib.crc32(whole.numpy().tobytes())


def _joined(before: Digest, now: Digest) -> Digest:
    """The digest of two parts of a step; 0 where one was not given."""
    for digest in (before, now):
        if isinstance(digest, int) and digest == 0:
            return 0
    return 1 + (before * 31 + now) % _MODULUS
