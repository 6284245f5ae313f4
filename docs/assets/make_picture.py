"""Draw the picture of the README: `python docs/assets/make_picture.py`."""

from pathlib import Path

import zbpp
from zbpp.core import Costs
from zbpp.simulator import plot, simulate

schedules = [
    zbpp.plan(mode, n_stages=4, n_microbatches=8) for mode in ("1F1B", "ZBH1", "ZBV")
]
timelines = [simulate(schedule, zbpp.Costs()) for schedule in schedules]
plot(timelines, Path(__file__).parent / "schedules.svg", costs=Costs())
