"""The shapes of values between stages: learnt once for every kind of micro-batch.

    stage 0 | kinds 0 0 0 0 > F0> ...      kinds 1 1 1 1 > F0> ...     batch is longer
    stage 1 | kinds <  post F0 F1 ..       kinds <  header < F0 ..     kind 1 is new

Micro-batches are of one kind if their shapes, dtypes and containers are the same. The
stage that reads the inputs numbers the kinds, and tells the others once a step, in one
small message to each stage, which kind every micro-batch is of. What a chunk puts out
for a kind is told by a header the first time; afterwards both ends know it, and the
receiver makes its buffers early. So shapes may change from step to step and within one:
a change costs a header for each channel, once for each kind.

What travels is contiguous, and the gradients of a value are known with it: there is one
for each tensor that needs one.
"""

import math
import pickle
import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from zbpp.core import Message, Value, What
from zbpp.runtime.support.errors import ShapeError
from zbpp.runtime.support.torch_internals import inner_tensors
from zbpp.runtime.values import Nested, Structure, Tensors, filled

__all__ = [
    "HEADER_BYTES",
    "MAX_KINDS",
    "MAX_TENSORS",
    "Shapes",
    "Spec",
    "pack",
    "spec_of",
    "unpack",
]

HEADER_BYTES = 8192
"""Length of a header; those of 250 tensors in dicts, packed, need some 2000."""
MAX_TENSORS = 250
"""Tensors in a message."""
MAX_KINDS = 1024
"""Kinds that are remembered; beyond, all are forgotten and learnt anew."""

_DTYPES = {
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
}


@dataclass(frozen=True)
class Spec:
    """Shapes and dtypes of the tensors of a value, and what holds them."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    needs_grad: tuple[bool, ...]
    structure: Structure | None = None
    """Of a `Nested` value."""

    def __str__(self) -> str:
        texts = [
            f"{str(dtype).removeprefix('torch.')}{list(shape)}"
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]
        if self.structure is None:
            return ", ".join(texts)
        return str(filled(self.structure, texts))

    @cached_property
    def n_bytes(self) -> int:
        """Size of all tensors."""
        sizes = zip(self.shapes, self.dtypes, strict=True)
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in sizes)

    @classmethod
    def of(cls, tensors: Tensors) -> "Spec":
        """Describe plain tensors."""
        return cls(
            tuple(tuple(tensor.shape) for tensor in tensors),
            tuple(tensor.dtype for tensor in tensors),
            tuple(tensor.requires_grad for tensor in tensors),
            tensors.structure if isinstance(tensors, Nested) else None,
        )

    def fits(self, tensors: Tensors) -> bool:
        """True if one plain tensor is as this says; False may mean: look closer."""
        if type(tensors) is not tuple or len(tensors) != 1 or len(self.shapes) != 1:
            return False
        (x,) = tensors
        return (
            type(x) is Tensor
            and x.shape == self.shapes[0]
            and x.dtype is self.dtypes[0]
            and x.requires_grad is self.needs_grad[0]
            and x.layout is torch.strided
            and self.structure is None
        )

    @cached_property
    def of_gradients(self) -> "Spec":
        """The gradients: one for each tensor that needs one."""
        learning = [i for i, needs in enumerate(self.needs_grad) if needs]
        return Spec(
            tuple(self.shapes[i] for i in learning),
            tuple(self.dtypes[i] for i in learning),
            (False,) * len(learning),
        )

    def empty(self, place: int, device: torch.device) -> Tensor:
        """Make an uninitialised buffer for one of the tensors."""
        return _blank(self.dtypes[place], device).new_empty(self.shapes[place])


@cache
def _blank(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor to make others like: faster than to name dtype and device each time."""
    return torch.empty((), dtype=dtype, device=device)


def spec_of(value: Value, tensors: Tensors) -> Spec:
    """Describe the tensors of a value.

    Raises:
        ShapeError: a tensor is more than one block of numbers.
    """
    for tensor in tensors:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            _refuse_others(value, tensor)
    return Spec.of(tensors)


def _refuse_others(value: Value, tensor: Tensor) -> None:
    """Refuse what holds its numbers elsewhere, as a DTensor or a sparse tensor does."""
    kind = type(tensor).__name__
    if inner_tensors(tensor) is not None:
        hint = "hand on a plain one (x.to_local()) and wrap it in the next layer"
        if kind != "DTensor":
            hint = "hand on the plain tensors in it and wrap them in the next layer"
        raise ShapeError(f"{value}: a {kind} cannot be sent between stages; {hint}")
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise ShapeError(
            f"{value}: a tensor of layout {layout} cannot be sent between stages; hand "
            "on a dense one, or its parts"
        )


def pack(value: Value, spec: Spec) -> Tensor:
    """Write a header.

    Raises:
        ShapeError: too many tensors, or something that cannot be sent.
    """
    for dtype in spec.dtypes:
        if dtype not in _DTYPES:
            raise ShapeError(f"{value}: {dtype} cannot be sent between stages")
    try:
        header = zlib.compress(pickle.dumps((value, spec)), 1)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ShapeError(
            f"{value}: a container cannot be sent between stages: {error}; define its "
            "class in a module, and not in a function"
        ) from error
    if len(spec.shapes) > MAX_TENSORS or len(header) > HEADER_BYTES:
        raise ShapeError(
            f"{value}: {len(spec.shapes)} tensors are too many for one message, which "
            f"holds {MAX_TENSORS}; hand fewer from chunk to chunk"
        )
    return torch.frombuffer(bytearray(header.ljust(HEADER_BYTES)), dtype=torch.uint8)


def unpack(header: Tensor, expected: Value) -> Spec:
    """Read a header; it must announce the value that this end expects."""
    value: Value
    spec: Spec
    text = zlib.decompressobj().decompress(header.numpy().tobytes())
    value, spec = pickle.loads(text)
    assert value == expected, f"{expected} was due, but {value} came"
    return spec


class Shapes:
    """The shapes that one stage knows."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._oldest = 0
        self._kinds: Sequence[int] | None = None
        self._specs: dict[tuple[int, What, int], Spec] = {}
        """By kind, and what of which chunk it is."""
        self.latest: dict[int, Spec] = {}
        """Of every chunk's activations, those that were learnt last."""

    def begin(self) -> None:
        """Start a step: the kinds of its micro-batches are not known yet."""
        self._kinds = None

    def number(self, inputs: Sequence[Tensors]) -> list[int]:
        """Return the oldest kind in use, and the kinds of a step's micro-batches.

        Args:
            inputs: of the micro-batches.
        """
        if len(self._numbers) > MAX_KINDS:
            self._oldest += len(self._numbers)
            self._numbers.clear()
        numbers, kinds = self._numbers, []
        for tensors in inputs:
            signature = (
                tuple((x.shape, x.dtype, x.requires_grad) for x in tensors),
                tensors.structure if isinstance(tensors, Nested) else None,
            )
            kinds.append(numbers.setdefault(signature, self._oldest + len(numbers)))
        return [self._oldest, *kinds]

    def take(self, kinds: Sequence[int]) -> None:
        """Take what `number` has returned, on whatever stage."""
        oldest, *self._kinds = kinds
        if oldest > self._oldest:
            self._oldest = oldest
        if self._specs and next(iter(self._specs))[0] < oldest:
            self._specs = {key: x for key, x in self._specs.items() if key[0] >= oldest}

    def known(self, value: Message) -> Spec | None:
        """The shapes of a message, if they are known; else a header comes first."""
        if self._kinds is None:
            return None
        assert isinstance(value, Value), "both ends know a tied gradient without"
        kind = self._kinds[value.microbatch]
        return self._specs.get((kind, value.what, value.chunk))

    def learn(self, value: Value, spec: Spec) -> None:
        """Note the shapes of a message; in an evaluation no kinds are known."""
        if self._kinds is not None:
            kind = self._kinds[value.microbatch]
            self._specs[kind, value.what, value.chunk] = spec
            if value.what is What.ACTIVATION:
                self.latest[value.chunk] = spec
                above = value.chunk + 1
                self._specs[kind, What.GRADIENT, above] = spec.of_gradients
