"""Serve `zbpp.Pipeline`: the stages of one process, from start to end.

`build` makes their executors, `agreement` compares what the ranks begin with, `stages`
runs them and settles their steps, `batches` gives them the micro-batches of a call.
"""
