"""Planners: orders made for given times and a memory limit.

Read `request` (what a planner is asked), then `single_modes` (one chunk a stage) and
`wave_modes` (several), then `auto`, which chooses between them. `single/` and `multi/`
hold the two searches, `budget` how long they may take, `limits` what memory allows,
`solver` the proof by OR-tools.
"""
