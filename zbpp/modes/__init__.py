"""Modes: the values of ``--pipeline_schedule_mode``, and what plans each.

table    name -> planner, one row a mode
fixed    orders that depend on no times, and schedule files
auto     the best of all modes for the costs and the limit
"""

from zbpp.modes.table import (
    MODES,
    SINGLE_CHUNK_MODES,
    Mode,
    canonical,
    is_auto,
    is_file,
    plan,
    planner_of,
)

__all__ = [
    "MODES",
    "SINGLE_CHUNK_MODES",
    "Mode",
    "canonical",
    "is_auto",
    "is_file",
    "plan",
    "planner_of",
]
