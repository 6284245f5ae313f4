"""`zbpp train` with all stages in this process."""

from collections.abc import Callable, Sequence
from unittest import mock

from zbpp.cli import main
from zbpp.planning import Plan
from zbpp.training import launch
from zbpp.training.options import TrainOptions

__all__ = ["run_train"]


def run_train(*words: str) -> int:
    """Run the command, whatever the number of stages; its exit code."""

    def start_here(
        worker: Callable[[TrainOptions, Plan], int],
        options: TrainOptions,
        _: Sequence[str],
        *,
        plan: Callable[[TrainOptions], Plan],
        check: Callable[[TrainOptions], None],
        grace_s: int,
    ) -> None:
        planned = plan(options)
        check(options)
        assert worker(options, planned) == 0

    with mock.patch.object(launch, "start", start_here):
        return main(["train", *words])
