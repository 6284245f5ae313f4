"""Ways to sum gradients over the replicas of a stage; `zbpp.DataParallel` takes one.

    Reduction  | all-reduce                                            |
    TwoLevel   | reduce-scatter  | all-reduce          | all-gather    |
               | in the node     | between nodes, of   | in the node   |
               |                 | a part per process  |               |
    TopK       | all-gather of the largest numbers and their places    |

A dtype is one of torch's, which this module does not import.
"""

from dataclasses import dataclass, field
from typing import Any

from zbpp.core.errors import RequestError


@dataclass(frozen=True)
class Reduction:
    """One all-reduce of all numbers.

    Args:
        dtype: of the numbers that are sent, for instance ``torch.bfloat16``; None: that
            of the gradients.

    Raises:
        RequestError: a value is out of its range; so do the other reductions.
    """

    dtype: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check(
            self.dtype is None or getattr(self.dtype, "is_floating_point", False),
            f"dtype is {self.dtype!r}; give a floating-point dtype of torch, or None",
        )

    @property
    def number_bytes(self) -> int:
        """Bytes of a number in a message, of gradients in fp32."""
        return 4 if self.dtype is None else int(self.dtype.itemsize)


@dataclass(frozen=True)
class TwoLevel(Reduction):
    """A reduce-scatter in the node, an all-reduce between nodes, and an all-gather.

    Between nodes each process sends its part of the numbers alone.

    Args:
        ranks_per_node: processes of a node, whose ranks follow each other.
    """

    ranks_per_node: int

    def __post_init__(self) -> None:
        super().__post_init__()
        n = self.ranks_per_node
        text = f"ranks_per_node is {n!r}; give the number of processes of a node"
        _check(type(n) is int and n > 0, text)


@dataclass(frozen=True)
class TopK(Reduction):
    """An all-gather of the largest numbers of each layer's gradient, and their places.

    Each replica adds the rest, its residual, to its next gradient (error feedback, as
    of S. Stich et al., "Sparsified SGD with memory", 2018).

    Args:
        share: of the numbers that a replica sends, above 0 and up to 1.
    """

    share: float

    def __post_init__(self) -> None:
        super().__post_init__()
        share = self.share
        text = f"share is {share!r}; give a part of 1, above 0"
        _check(isinstance(share, int | float) and 0 < share <= 1, text)


def _check(is_right: bool, text: str) -> None:
    if not is_right:
        raise RequestError(text)
