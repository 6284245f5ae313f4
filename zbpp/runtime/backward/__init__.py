"""The split backward; it knows no pipeline, and of the runtime only `support`.

Read `split` (B and W as two calls), then `graph` (which products can wait) with `ways`
(from an operand to its leaf), `engine` (autograd runs B), `deferred_product` with
`weight_rules` (how one is computed later), `parts` (of one leaf), `queue` (where it
waits) and `accumulate` (the order of the sums). `hooks` finds those of others;
`remembered` keeps plans; `torch_stage` serves torch's pipeline.
"""
