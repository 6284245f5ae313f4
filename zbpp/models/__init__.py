"""From a module to layers that a pipeline assigns to stages.

entry         `layered_of`: whatever `zbpp.Pipeline` takes as `Layered`; `cut`
layered       `Layered`: layers by index, their names, ties, loss and batch
blocks        the list of repeated blocks of a model
pretrained    models of transformers: their forward around other blocks
exported      any other module: torch exports it, and splits its graph
hugging_face  batches, losses and wrappers of transformers and peft
weights       weights of a model on the meta device, made where they are needed
configs       layers and a batch from a configuration file
"""

from zbpp.models.entry import cut, layered_of, layers_from
from zbpp.models.layered import Layered
from zbpp.runtime.ties.plan import Tie

__all__ = ["Layered", "Tie", "cut", "layered_of", "layers_from"]
