"""The shapes of values between stages: learnt once for every kind of micro-batch.

    stage 0 | kinds 0 0 0 0 > F0> ...      kinds 1 1 1 1 > F0> ...     batch is longer
    stage 1 | kinds <  post F0 F1 ..       kinds <  header < F0 ..     kind 1 is new

Micro-batches are of one kind if their shapes, dtypes and containers are the same. The
stage that reads the inputs numbers the kinds, and sends the others the kind of every
micro-batch, in one small message a step. What a chunk puts out for a kind is described
by a header the first time; afterwards both ends know it, and the receiver makes its
buffers early. So shapes may change from step to step and within one: a change costs a
header for each channel, once for each kind.

What travels is contiguous, and the gradients of a value are known with it: there is one
for each tensor that needs one.
"""

import math
import pickle
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zbpp.core import Value, What
from zbpp.runtime.support.errors import ShapeError
from zbpp.runtime.support.torch_internals import inner_tensors
from zbpp.runtime.values import Nested, Structure, Tensors, filled

_MAX_KINDS = 1024
"""Kinds that are remembered; beyond, all are forgotten."""


class Look(NamedTuple):
    """One tensor of a value."""

    shape: Sequence[int]
    dtype: torch.dtype
    needs_grad: bool

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class Spec(NamedTuple):
    """The tensors of a value, and the structure of a `Nested` one."""

    looks: Sequence[Look]
    structure: Structure | None = None

    def __str__(self) -> str:
        texts = [*map(str, self.looks)]
        if self.structure is None:
            return ", ".join(texts)
        return str(filled(self.structure, texts))

    @classmethod
    def of(cls, tensors: Tensors) -> "Spec":
        """Describe tensors."""
        return cls(
            tuple([Look(x.shape, x.dtype, x.requires_grad) for x in tensors]),
            tensors.structure if isinstance(tensors, Nested) else None,
        )

    def gradients(self) -> "Spec":
        """Describe the gradients: one for each tensor that needs one."""
        return Spec(
            tuple(x._replace(needs_grad=False) for x in self.looks if x.needs_grad)
        )

    def n_bytes(self) -> int:
        """Size of all tensors."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in self.looks)


def _refuse_others(value: Value, tensor: Tensor) -> None:
    """Refuse tensors whose numbers are elsewhere, as those of a DTensor."""
    if inner_tensors(tensor) is not None:
        raise ShapeError(
            f"{value}: a {type(tensor).__name__} cannot be sent between stages; return "
            "the plain tensors in it (x.to_local()) and wrap them in the next layer"
        )
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise ShapeError(
            f"{value}: a tensor of layout {layout} cannot be sent between stages; "
            "return a dense one, or its parts"
        )


class Shapes:
    """The shapes that one stage knows, of steps or of evaluations."""

    def __init__(self) -> None:
        self._numbers: dict[Spec, int] = {}
        self._kinds: Sequence[int] = ()
        self._specs: dict[tuple[int, What, int], Spec] = {}
        """By kind, and what of which chunk it is."""

    def number(self, inputs: Sequence[Tensors]) -> tuple[bool, list[int]]:
        """Return if all kinds are forgotten, and the kind of each micro-batch."""
        numbers, forgets = self._numbers, len(self._numbers) > _MAX_KINDS
        if forgets:
            numbers.clear()
        return forgets, [numbers.setdefault(Spec.of(x), len(numbers)) for x in inputs]

    def take(self, forgets: bool, kinds: Sequence[int]) -> None:
        """Take the result of `number` of any stage."""
        self._kinds = kinds
        if forgets:
            self._specs.clear()

    def known(self, value: Value) -> Spec | None:
        """The shapes of a message, if they are known; else a header comes first."""
        kind = self._kinds[value.microbatch]
        return self._specs.get((kind, value.what, value.chunk))

    def learn(self, value: Value, spec: Spec) -> None:
        """Note the shapes of a message."""
        kind = self._kinds[value.microbatch]
        self._specs[kind, value.what, value.chunk] = spec
        if value.what is What.ACTIVATION:
            self._specs[kind, What.GRADIENT, value.chunk + 1] = spec.gradients()

    def header(self, value: Value, tensors: Tensors) -> bytes | None:
        """Return what the receiver must know before a value comes; None: it knows."""
        for tensor in tensors:
            if type(tensor) is not Tensor or tensor.layout is not torch.strided:
                _refuse_others(value, tensor)
        spec, known = Spec.of(tensors), self.known(value)
        if spec == known:
            return None
        if known is None:
            self.learn(value, spec)
            try:
                return pickle.dumps(spec)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise ShapeError(
                    f"{value}: a container cannot be sent between stages: {error}; "
                    "define its class in a module, and not in a function"
                ) from error
        same = [x[:2] for x in spec.looks] == [x[:2] for x in known.looks]
        if same and spec.structure == known.structure:
            raise ShapeError(
                f"the {value} needs gradients for other tensors than before: "
                "parameters were frozen or thawed, which stages in several processes "
                "do not learn; build a new Pipeline then, from a checkpoint"
            )
        raise ShapeError(
            f"the {value} is {spec}, but with inputs of the same shapes it was "
            f"{known}; what goes from chunk to chunk must look the same for all "
            "micro-batches whose inputs do (pad it, and return numbers that change as "
            "tensors)"
        )

    def n_bytes(self) -> dict[int, int]:
        """Sizes of the activations that were learnt last, by chunk."""
        return {
            chunk: spec.n_bytes()
            for (_, what, chunk), spec in self._specs.items()
            if what is What.ACTIVATION
        }
