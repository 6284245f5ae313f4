"""What single operators take and give on fake tensors, where torch does not say it.

`shapes` (results), `routing` (numbers of integers), `engine` (sums of gradients in
place), `casts` and `scratch` (temporaries of CPU kernels).
"""
