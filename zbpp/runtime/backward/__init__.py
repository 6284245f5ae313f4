"""The split backward of any module; it knows no pipeline.

Read `split` (B and W as two calls), then `plan` (which weights can wait) with
`products` (what W computes), and `order` (in which order gradients are added).
`torch_stage` serves torch's pipeline; `wrappers` are those of modules that miss what W
computes; `self_check` asks once a process whether this torch is split right.
"""
