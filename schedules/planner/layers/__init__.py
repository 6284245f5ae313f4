"""Layers to chunks, planned together with the schedule.

`balance` deals layers so that the busiest stage has the least to do, within the memory;
`search` moves them while plans get shorter; `recompute` chooses layers that are
recomputed, by the same climb. Read them in this order.
"""
