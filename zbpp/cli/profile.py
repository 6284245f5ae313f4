"""The ``profile`` command: measure a costs file on the real devices."""

from collections.abc import Sequence
from dataclasses import dataclass

from zbpp.training.options import ProfileOptions

__all__ = ["Profile"]


@dataclass(frozen=True, kw_only=True)
class Profile(ProfileOptions):
    """Measure a model's costs, per chunk and per layer, on the real devices.

    F, B, W, the loss, O, V, links and memory, from some steps, then from each layer
    alone; of the model of zbpp train, or of your own. Starts its own processes, or
    runs as one of torchrun's.
    """

    def run(self, words: Sequence[str]) -> None:
        """Profile, and return when it is done."""
        from zbpp.training.profiled import run_profile
        from zbpp.training.setup import start_worker

        start_worker(run_profile, self, words)
