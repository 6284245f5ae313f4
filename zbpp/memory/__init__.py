"""Know before you run: the memory of a model in bytes, without its weights.

The runtime's own stages run on fake tensors, which have sizes and no data. Read
`tracker` (bytes of tensors while they live; `operators/` has what operators take),
`recorder` and `trace` (passes of a chunk, layer by layer), `model` (equal layers once);
then `layers` (for planners), and `walk` and `estimate` (stages under a schedule).
"""

from zbpp.memory.api import estimate
from zbpp.memory.estimate import Estimate, StageEstimate
from zbpp.memory.layers import layer_memory

__all__ = ["Estimate", "StageEstimate", "estimate", "layer_memory"]
