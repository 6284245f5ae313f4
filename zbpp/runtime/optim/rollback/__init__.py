"""Steps that can be rolled back bit-exactly: `choose` takes one of two ways.

`recompute` keeps a copy of the parameters and computes a valid step twice, `buckets`
at a time (`parameter_only` and `adam_kernel` save it the copies of the state);
`snapshot` keeps parameters and state. `copies` holds what either has copied.
"""
