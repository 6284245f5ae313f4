"""Times below which no schedule can go: `lower_bound` takes the highest of them.

`stage` is how the bounds for several chunks see a stage, `fill` and `turns` are two of
them; those for one chunk stand in `lower_bound`.
"""

from zbpp.core.bounds.lower_bound import lower_bound, lower_bound_on, lower_bounds

__all__ = ["lower_bound", "lower_bound_on", "lower_bounds"]
