"""Planners: orders made for given times and a memory limit.

Read `request` (the arguments of all planners), then `single_modes` (one chunk a stage)
and `wave_modes` (several), then `auto`, which chooses between them. `single/` and
`multi/` hold the two searches, `budget` their effort, `limits` the memory limits,
`solver` the proof by OR-tools.
"""
