"""The split backward of any module, without a pipeline.

Read `split` (B and W as two calls), then `plan` (which weights can wait) with
`products` (what W computes), and `order` (in which order gradients are added).
`torch_stage` serves torch's pipeline; `wrappers` refuses modules whose hooks would miss
gradients of W; `self_check` compares a split and a plain backward once in a process.
"""
