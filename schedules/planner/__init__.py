"""Planners: orders made for given times and a memory limit.

`placement` plans any placement: `search/` its passes, `parts` those on two lanes.
`compiled/` holds the inner loops in C, `budget` the effort, `limits` the memory limits,
`figures` which of two plans is better, `layers/` splits and recomputed layers. What a
mode is, and how `auto` chooses, is in `zbpp.planning`.
"""
