"""From a module to layers that a pipeline deals to stages.

layered       `Layered`: layers by index, their own names, ties, loss and batch
given         `layered_of`: whatever `zbpp.Pipeline` takes as `Layered`; `cut`
families      `Family`, `register`: where blocks are
hugging_face  models of transformers: names, loss, batch
configs/      layers and a batch from a configuration file
cut           from named blocks to layers: parts (front, block, back)
frame         the model's own forward around other blocks, with stand_ins
calls         what blocks are called with; recorded: outputs that join the loss
discover      what runs before and after the blocks
weights       weights of a model on the meta device, made where they are needed
"""

from zbpp.models.families import Family, register
from zbpp.models.given import cut, layered_of, layers_from
from zbpp.models.layered import Layered, Tie

__all__ = ["Family", "Layered", "Tie", "cut", "layered_of", "layers_from", "register"]
