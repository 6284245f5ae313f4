"""A worker that fails at a chosen job, for launchers that are called in tests."""

import os

from zbpp.planning import Plan
from zbpp.training.loop import train
from zbpp.training.options import Train


def train_with_a_fault(fault: str, options: Train, plan: Plan) -> None:
    """Train with ``ZBPP_FAULT``: forked processes do not see this one's environment."""
    os.environ["ZBPP_FAULT"] = fault
    train(options, plan)
