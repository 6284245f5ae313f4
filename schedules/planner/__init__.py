"""Planners: orders made for given times and a memory limit.

Read `request` (the arguments of all planners), then `single_modes` (one chunk a stage)
and `wave_modes` (several), then `auto`, which chooses between them. `search/` is the
planner of all of them, `compiled/` its inner loops in C, `budget` its effort, `limits`
the memory limits, `layers/` the split of layers, `solver` the proof by OR-tools.
"""
