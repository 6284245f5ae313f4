"""Schedules of any mode with random costs, for laws that hold for all of them."""

from functools import cache

from hypothesis import strategies as st

from zbpp.core import Costs
from zbpp.planning import MODES, plan

TIME = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(1e-9, 10.0))
_ALL = tuple(sorted(MODES))
_SIZES = [(1, 1), (1, 5), (2, 1), (2, 4), (3, 2), (3, 7), (4, 6)]


@cache
def _planned(mode, p, m):
    return plan(mode, n_stages=p, n_microbatches=m, effort="fast")


@st.composite
def timed_schedules(draw, modes=_ALL, each=TIME, validation=TIME):
    """A schedule, and times per chunk: zeros, and messages longer than passes too."""
    schedule = _planned(draw(st.sampled_from(modes)), *draw(st.sampled_from(_SIZES)))
    times = st.tuples(*[each] * schedule.placement.n_chunks)
    return schedule, Costs(
        draw(times),
        draw(times),
        draw(times),
        draw(TIME),
        draw(times),
        reduction=draw(st.none() | TIME),
        validation=draw(validation),
    )
