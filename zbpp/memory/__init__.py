"""Know before you run: the memory of a model in bytes, without its weights.

The runtime's own stages run on fake tensors, which have sizes and no data:

    fake, alike           a model and a batch without data; equal layers run once
    tracker, recorder     bytes of tensors while they live, and marks between layers
    engine_sums           sums of gradients that autograd makes in place
    trace, model          passes of chunks
    passes                rows of the cost table: what passes leave and need
    resident, optimizer   what is there all the time, and what a step needs
    walk, estimate        the one walk over a stage's program; stages of every mode
    layers                the same rows for planners

Read `passes`, `resident` and `walk` to find where the bytes of a stage come from.
"""

from zbpp.memory.api import estimate
from zbpp.memory.estimate import Estimate, StageEstimate
from zbpp.memory.layers import layer_memory

__all__ = ["Estimate", "StageEstimate", "estimate", "layer_memory"]
