"""Times below which no schedule can go; a plan is judged by its gap to them.

Each bound is on the largest span, holds for any placement, and stands with its proof in
a file of its own; `best` takes the highest. `ways` and `stage` hold what they share:

    ways     work  bottleneck  front_tail  cycle  area       mostly for the first chunk
    stage    fill  turns  slots                              for all chunks of a stage

Notation: on a stage, F, B and W are sums over its chunks; the loop of a chunk is the
time from the start of its F to the end of its B on one micro-batch if nothing waits:
all F and B of later chunks, and messages, between. Until it is through its loop, a
micro-batch holds the memory m_b of that chunk.

Every bound is tested against all planners on random costs.
"""

from zbpp.core.bounds.best import lower_bound, lower_bound_on, lower_bounds

__all__ = ["lower_bound", "lower_bound_on", "lower_bounds"]
