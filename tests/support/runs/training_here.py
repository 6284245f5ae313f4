"""`zbpp train` with all stages in this process."""

from collections.abc import Sequence
from unittest import mock

from zbpp.cli import main
from zbpp.training import start
from zbpp.training.loop import train
from zbpp.training.options import TrainOptions
from zbpp.training.setup import check, plan_of

__all__ = ["run_train"]


def run_train(*words: str) -> int:
    """Run the command, whatever the number of stages; its exit code."""

    def start_here(options: TrainOptions, _: Sequence[str]) -> None:
        plan = plan_of(options)
        check(options, plan)
        assert train(options, plan) == 0

    with mock.patch.object(start, "start", start_here):
        return main(["train", *words])
