"""Single operators on fake tensors: memory and results that torch does not tell.

`shapes` (results), `routing` (numbers of integers), `engine` (sums of gradients in
place), `casts` and `scratch` (temporaries of CPU kernels).
"""
