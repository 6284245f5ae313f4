"""`zbpp train` with all stages in this process."""

from zbpp.training.loop import train
from zbpp.training.options import TrainOptions
from zbpp.training.setup import check, plan_of


def train_here(options: TrainOptions) -> None:
    """Train without any other process, whatever the number of stages."""
    plan = plan_of(options)
    check(options, plan)
    assert train(options, plan) == 0
