"""Planners: orders made for given times and a memory limit.

`search/` plans any placement; `compiled/` holds its inner loops in C, `budget` its
effort, `limits` the memory limits, `figures` which of two plans is better, `layers/`
splits and recomputed layers, `solver` the proof by OR-tools. What a mode is, and how
`auto` chooses, is in `zbpp.planning`.
"""
