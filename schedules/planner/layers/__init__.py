"""Layers to chunks, planned together with the schedule.

`balance` deals layers so that the busiest stage has the least to do, within the memory;
`search` moves them, and chooses layers that are recomputed, while plans get shorter.
"""
