"""Planners: orders made for given times and a memory limit.

`single_modes` plans one chunk a stage and `multi/plan` any placement; `single/` and
`multi/` hold their searches, `budget` their effort, `limits` the memory limits,
`figures` which of two plans is better, `layers/` splits and recomputed layers, `solver`
the proof by OR-tools. What a mode is, and how `auto` chooses, is in `zbpp.planning`.
"""
