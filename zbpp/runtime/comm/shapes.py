"""The shapes of activations in steps: learnt once for every kind of micro-batch.

    stage 0 | kinds 0 0 0 0 > F0> ...      kinds 1 1 1 1 > F0> ...     batch is longer
    stage 1 | kinds <  post F0 F1 ..       kinds <  header < F0 ..     kind 1 is new

Micro-batches are of one kind if their shapes, dtypes and containers are the same. The
stage that reads the inputs numbers the kinds, and tells the others once a step, in one
small message to each stage, which kind every micro-batch is of. What a chunk puts out
for a kind is told by a header the first time; afterwards both ends know it, and the
receiver makes its buffers early. So shapes may change from step to step and within one:
a change costs a header for each channel, once for each kind.
"""

from collections.abc import Hashable, Sequence

from zbpp.core import Value, What
from zbpp.runtime.comm.header import Spec
from zbpp.runtime.values import Nested, Tensors

__all__ = ["MOST_KINDS", "Shapes"]

MOST_KINDS = 1024
"""Kinds that are remembered; beyond, all are forgotten and learnt anew."""


class Shapes:
    """The shapes that one stage knows."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._oldest = 0
        self._kinds: Sequence[int] | None = None
        self._specs: dict[tuple[int, int], Spec] = {}
        self._latest: dict[int, Spec] = {}

    def begin(self) -> None:
        """Start a step: the kinds of its micro-batches are not known yet."""
        self._kinds = None

    @property
    def are_told(self) -> bool:
        """True if the kinds of the step are known."""
        return self._kinds is not None

    def number(self, inputs: Sequence[Tensors]) -> list[int]:
        """Return what is to be told of a step: the oldest kind in use, and all kinds.

        Args:
            inputs: of the step's micro-batches.
        """
        if len(self._numbers) > MOST_KINDS:
            self._oldest += len(self._numbers)
            self._numbers.clear()
        numbers, kinds = self._numbers, []
        for tensors in inputs:
            looks = (
                tuple((x.shape, x.dtype, x.requires_grad) for x in tensors),
                tensors.structure if isinstance(tensors, Nested) else None,
            )
            kinds.append(numbers.setdefault(looks, self._oldest + len(numbers)))
        return [self._oldest, *kinds]

    def tell(self, told: Sequence[int]) -> None:
        """Take what `number` has returned, on whatever stage."""
        oldest, *self._kinds = told
        if oldest > self._oldest:
            self._oldest = oldest
        if self._specs and next(iter(self._specs))[1] < oldest:
            self._specs = {key: x for key, x in self._specs.items() if key[1] >= oldest}

    def known(self, value: Value) -> Spec | None:
        """The shapes of a message, if they are known; else a header comes first."""
        if self._kinds is None:
            return None
        kind = self._kinds[value.microbatch]
        if value.what is What.GRADIENT:  # as the activation that this stage has sent
            sent = self._specs.get((value.chunk - 1, kind))
            return None if sent is None else sent.of_gradients
        return self._specs.get((value.chunk, kind))

    def learn(self, value: Value, spec: Spec) -> None:
        """Note the shapes of an activation."""
        assert self._kinds is not None
        self._specs[value.chunk, self._kinds[value.microbatch]] = spec
        self._latest[value.chunk] = spec

    def latest(self) -> dict[int, Spec]:
        """Shapes of every chunk's activations that were learnt last."""
        return self._latest
