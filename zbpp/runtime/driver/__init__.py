"""Serve `zbpp.Pipeline`: the stages of one process, from start to end.

`build` makes their executors, `agreement` compares the settings of the ranks, `stages`
settles steps and ends the pipeline, `batches` cuts the batch of a call.
"""
