"""Planners: orders made for given times and a memory limit.

`search/` plans any placement, `single_modes` asks it for one chunk a stage;
`compiled/` holds its inner loops in C, `budget` its effort, `limits` the memory limits,
`figures` which of two plans is better, `layers/` splits and recomputed layers, `solver`
the proof by OR-tools. What a mode is, and how `auto` chooses, is in `zbpp.planning`.
"""
