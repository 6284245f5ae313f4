"""Know before you run: the memory of a model in bytes, without its weights.

The runtime's own stages run on fake tensors, which have sizes and no data. Read
`tracker` (bytes of tensors while they live), `recorder` and `trace` (passes of a
chunk, layer by layer), `model` (equal layers once), then `layers` (for planners).
"""

from zbpp.memory.layers import layer_memory

__all__ = ["layer_memory"]
