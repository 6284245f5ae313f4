"""Serve `zbpp.Pipeline`: the executors of one process, from start to end.

`build` makes them, `agreement` compares the ranks, `batches` hands out a batch,
`collective_calls` gather results of all stages, `state_access` settles before a look,
`lifecycle` ends a failed run, `stop_request` a run that was sent a signal.
"""
