"""Serve `zbpp.Pipeline`: the stages of one process, from start to end.

`build` makes their executors, `agreement` compares the ranks, `stages` runs them and
settles their steps, `batches` hands out a batch, `state_hooks` settle before a
state_dict, `stop_request` ends a run that was sent a signal.
"""
