"""Know before you run: the memory of a model in bytes, without its weights.

layers     bytes of each layer: F, B, W and the optimizer's step on fake tensors
estimate   stages of every mode by the planner's sums; the largest micro-batch
fakes      a model and a batch without data
tracking   bytes of tensors while they live
"""

from zbpp.memory.estimate import Estimate, StageEstimate, estimate
from zbpp.memory.layers import layer_memory

__all__ = ["Estimate", "StageEstimate", "estimate", "layer_memory"]
