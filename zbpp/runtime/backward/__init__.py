"""The split backward; it knows no pipeline, and of the runtime only `support`.

Read `split` (B and W as two calls), then `graph` (which products can wait),
`deferred_product` with `weight_rules` (how one is computed later), `queue` (where it
waits) and `accumulate` (the order of the sums). `torch_stage` serves torch's pipeline.
"""
