"""Steps that can be rolled back bit-exactly: `choose` takes one of two ways.

`recompute` keeps a copy of the parameters and computes a valid step twice, `buckets`
at a time; `snapshot` keeps parameters and state. `copies` holds what either has copied.
"""
