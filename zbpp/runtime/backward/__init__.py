"""The split backward of any module; it knows no pipeline.

Read `split` (B and W as two calls), then `graph` (which products can wait) with `paths`
(from an operand to its leaf) and `plan_cache` (graphs seen before), `engine` (autograd
runs B), `products` and `regions` (what is computed later, of products and of compiled
regions), `queue` (where it waits), `grads` (the one writer of ``.grad``) and
`accumulate` (the order of the sums). `causes` gives reasons for reports; `torch_stage`
serves torch's pipeline, and `self_check` asks once a process whether this torch is
split right.
"""
