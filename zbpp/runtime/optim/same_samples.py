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
from zbpp.runtime.comm.stage_group import StageGroup, row_of
from zbpp.runtime.support.pytree import tensors_in
from zbpp.runtime.support.sharded import is_sharded, own_shard
from zbpp.runtime.support.streams import sent_ahead

__all__ = ["N_NUMBERS", "SameSamples"]

Digest = tuple[int, Tensor | int]
"""Of the dtypes of a batch, 0 where there is none, and of its numbers."""

_TENSOR = "tp"
_N_END = 6
"""Numbers of an end: rank + 1, dtypes and digest of inputs, of targets, key."""
_NO_END = [0] * _N_END
N_NUMBERS = 2 + 2 * _N_END
"""Stages with plain parameters, place but for ``tp``, first end, last end."""

_MOST = 1024
"""Elements of a tensor that count, spread evenly."""
_MODULUS = 2**52
"""Integers below it are exact in float64."""
_ODD = 7046029254386353131
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        peers: StageGroup,
        *,
        is_first: bool,
        is_last: bool,
        parameters: Iterable[Tensor],
    ) -> None:
        place = {dim: at for dim, at in peers.place.items() if dim != _TENSOR}
        self._place = row_of([*place.values()], [1024] * len(place))
        self._rank = dist.get_rank()
        self._is_first, self._is_last = is_first, is_last
        self._is_plain = _TENSOR in peers.place and any(
            p.requires_grad and not is_sharded(p) for p in parameters
        )
        self._inputs: Digest = 0, 0
        self._targets: Digest = 0, 0
        self._key = 0

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
        number = _key_number(key)
        both = _digest(inputs), _digest(targets)
        if is_first:
            (self._inputs, self._targets), self._key = both, number
            return
        before = self._inputs, self._targets
        self._inputs, self._targets = map(_joined, before, both)
        self._key = number and self._key and 1 + (self._key * 31 + number) % _MODULUS

    def write(self, part: Tensor) -> None:
        """Write the numbers of this process into its part of a step's vector."""
        if not (self._is_first or self._is_last or self._is_plain):
            return
        end = [self._rank + 1, *self._inputs, *self._targets, self._key]
        numbers = [
            int(self._is_plain),
            self._place if self._is_first else 0,
            *(end if self._is_first else _NO_END),
            *(end if self._is_last else _NO_END),
        ]
        host = [0 if isinstance(number, Tensor) else number for number in numbers]
        part.copy_(sent_ahead(torch.tensor(host, dtype=part.dtype), part.device))
        for place, number in enumerate(numbers):
            if isinstance(number, Tensor):
                part[place] = number

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
            first, last = row[2 : 2 + _N_END], row[2 + _N_END :]
            if _ends_differ(first, last):
                return _other_samples(step)
            a, b = neighbours.setdefault(row[1], (first, last))
            for what, place, mine, theirs in (
                ("inputs", 1, a, first),
                ("targets", 3, b, last),
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
    if first[5] and last[5]:
        return first[5] != last[5]
    return _differ(first, last, 1) and _differ(first, last, 3)


def _differ(a: Sequence[float], b: Sequence[float], place: int) -> bool:
    """True if two ends were given things of the same dtypes that are not equal."""
    return bool(a[place]) and a[place] == b[place] and a[place + 1] != b[place + 1]


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
        return 0, 0
    total: Any = 0
    dtypes = 1
    for x in tensors_in(batch):
        dtypes = (dtypes * 31 + _number(x.dtype)) % _MODULUS
        total = (total * 31 + _content(own_shard(x)) + x.dim()) % _MODULUS
        for size in x.shape:
            total = total * 31 + size
    return dtypes, total % _MODULUS


@cache
def _number(dtype: torch.dtype) -> int:
    return zlib.crc32(str(dtype).encode())


def _content(tensor: Tensor) -> Tensor | int:
    """A number for some elements of a tensor, computed where it is."""
    if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
        return 0
    flat = _bits(tensor)
    if len(flat) > _MOST:
        flat = flat[:: len(flat) // _MOST | 1][:_MOST]
    weights = _weights(tensor.device)[: len(flat)]
    if flat.is_cpu:  # numpy takes a third of the time
        return int(flat.numpy().dot(weights.numpy())) % _MODULUS
    total: Tensor = (flat * weights).sum()
    return total % _MODULUS


def _bits(tensor: Tensor) -> Tensor:
    """The bits of a dense tensor as integers, flat."""
    data = tensor.detach()
    if data.is_complex():
        data = torch.view_as_real(data.resolve_conj())
    return data.resolve_neg().reshape(-1).view(_INTEGERS[data.element_size()])


@cache
def _weights(device: torch.device) -> Tensor:
    return torch.arange(1, _MOST + 1, device=device) * _ODD


def _key_number(key: Any) -> int:
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
    """The digest of two parts of a step."""
    if not (before[0] and now[0]):
        return 0, 0
    return (before[0] * 31 + now[0]) % _MODULUS, (before[1] * 31 + now[1]) % _MODULUS
