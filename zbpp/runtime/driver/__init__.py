"""What `zbpp.Pipeline` does with the executors of its process.

`build` makes them, `agreement` compares the ranks, `lifecycle` ends a failed run,
`state_access` settles before a look, `collective_calls` are the calls of all stages.
"""
