"""The ``zbpp bench`` command: our modes and torch's, on the same model and devices."""

from collections.abc import Sequence
from dataclasses import dataclass

from zbpp.bench.request import BenchOptions


@dataclass(frozen=True, kw_only=True)
class Bench(BenchOptions):
    """Time our modes and torch's schedules, interleaved, on the real devices.

    The same model, batch, split and optimizer for all, in one process group; loss and
    gradient norm of the first step must agree. Starts its processes, or runs as one
    of torchrun's.
    """

    def run(self, words: Sequence[str]) -> None:
        """Compare, and return when it is done."""
        from zbpp.bench.run import start_bench

        start_bench(self, words)
