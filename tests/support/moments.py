"""Moments that come by chance between processes, drawn by lot in one process."""

import contextlib
import random
from collections.abc import Iterator

from zbpp.runtime.optim import rollback
from zbpp.runtime.optim.decision import StepSums

__all__ = ["small_buckets", "uncertain_sums"]


@contextlib.contextmanager
def uncertain_sums(seed: int, *, share: float = 0.1) -> Iterator[None]:
    """Sums that nobody has waited for are rarely there, at O for instance."""
    rng = random.Random(seed)
    kept = StepSums.done

    def done(self: StepSums) -> bool:
        return self._host is not None or (kept(self) and rng.random() < share)

    StepSums.done = done  # type: ignore[method-assign]
    try:
        yield
    finally:
        StepSums.done = kept


@contextlib.contextmanager
def small_buckets() -> Iterator[None]:
    """Optimizers step many small parts of their parameters."""
    sizes = rollback._BUCKET_BYTES
    kept = dict(sizes)
    sizes["cpu"] = 400
    try:
        yield
    finally:
        sizes.update(kept)
