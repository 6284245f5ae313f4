"""`zbpp train` with all stages in this process."""

from collections.abc import Callable, Sequence
from unittest import mock

from zbpp.cli import main
from zbpp.planning import Plan
from zbpp.training import setup
from zbpp.training.options import TrainOptions

__all__ = ["run_train"]


def run_train(*words: str) -> int:
    """Run the command, whatever the number of stages; its exit code."""

    def start_here(
        worker: Callable[[TrainOptions, Plan], int],
        options: TrainOptions,
        _: Sequence[str],
        *,
        check: Callable[[TrainOptions, Plan], None],
        grace_s: int,
    ) -> None:
        plan = setup.plan_of(options)
        check(options, plan)
        assert worker(options, plan) == 0

    with mock.patch.object(setup, "start_worker", start_here):
        return main(["train", *words])
