"""Layers to chunks, planned together with the schedule.

Read `plan` first. `balance` chooses its exact method: `one_chunk`, `two_chunks` or
`many_chunks`, on the `loads` of ranges of layers. `polish` moves layers with the
planner in the loop; `trials` plans the splits and compares them. `recompute` chooses
layers that are recomputed: `choices` of a split, and a `choice_search` among them.
"""
