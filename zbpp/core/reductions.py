"""Ways to sum gradients over the replicas of a stage; `zbpp.DataParallel` takes one.

    Reduction  | all-reduce                                            |
    TwoLevel   | reduce-scatter  | all-reduce          | all-gather    |
               | in the node     | between nodes, of   | in the node   |
               |                 | a part per process  |               |
    TopK       | all-gather of the largest numbers and their places    |

A dtype is one of torch's, which this module does not import.
"""

from dataclasses import dataclass
from typing import Any

from zbpp.core.errors import RequestError


@dataclass(frozen=True)
class Reduction:
    """One all-reduce of all numbers.

    Args:
        dtype: of the numbers that are sent and added, for instance ``torch.bfloat16``;
            None: that of the gradients.

    Raises:
        RequestError: it is no dtype of floating-point numbers.
    """

    dtype: Any = None

    def __post_init__(self) -> None:
        _check_dtype(self.dtype)


@dataclass(frozen=True)
class TwoLevel:
    """A reduce-scatter in the node, an all-reduce between nodes, and an all-gather.

    Between nodes each process sends its part of the numbers alone.

    Args:
        ranks_per_node: processes of a node, whose ranks follow each other.
        dtype: as of `Reduction`.

    Raises:
        RequestError: a value is none of these.
    """

    ranks_per_node: int
    dtype: Any = None

    def __post_init__(self) -> None:
        n = self.ranks_per_node
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise RequestError(
                f"ranks_per_node is {n!r}; give the number of processes of a node"
            )
        _check_dtype(self.dtype)


@dataclass(frozen=True)
class TopK:
    """An all-gather of the largest numbers of each layer's gradient, and their places.

    Each replica adds the rest, its residual, to its next gradient (error feedback, as
    of S. Stich et al., "Sparsified SGD with memory", 2018).

    Args:
        share: of the numbers that a replica sends, above 0 and up to 1.
        dtype: of the numbers that are sent; the residual has what rounding leaves.

    Raises:
        RequestError: a value is none of these.
    """

    share: float
    dtype: Any = None

    def __post_init__(self) -> None:
        if not (isinstance(self.share, int | float) and 0 < self.share <= 1):
            raise RequestError(
                f"share is {self.share!r}; give the part of the numbers that a replica "
                "sends, above 0 and up to 1"
            )
        _check_dtype(self.dtype)


AnyReduction = Reduction | TwoLevel | TopK


def bytes_per_number(reduction: AnyReduction) -> int:
    """Bytes that a number takes in a message; gradients are taken to be in fp32."""
    return 4 if reduction.dtype is None else int(reduction.dtype.itemsize)


def _check_dtype(dtype: Any) -> None:
    if dtype is not None and not getattr(dtype, "is_floating_point", False):
        raise RequestError(
            f"dtype is {dtype!r}; give torch.bfloat16 or another floating-point dtype "
            "of torch, or None"
        )
