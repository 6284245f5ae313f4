"""Times and memories that plans are made for, and simulated with.

dealing        numbers for stages and chunks: lists, and how they are dealt
times          Costs: of passes, messages, optimizer steps; PassTimes: per chunk
links          the time of a message on each edge between chunks
collectives    times of gathers and sums among replicas, by formula; ZeRO's bytes
memory_model   MemoryModel: what passes leave and need; ChunkMemory: per chunk
layers         LayerCosts: times and memories per layer, for any split
chunk_layers   costs of chunks, dealt to their layers
limits         limits beside memories: in bytes, or in the costs' own unit
units          amounts of memory as people write them
"""

from zbpp.core.costs.chunk_layers import chunk_layers
from zbpp.core.costs.collectives import (
    CollectiveOperation,
    Link,
    collective_time,
    fit_link,
    zero_bytes,
    zero_volume,
)
from zbpp.core.costs.dealing import PerChunk
from zbpp.core.costs.layers import LayerCosts
from zbpp.core.costs.memory_model import ChunkMemory, MemoryModel
from zbpp.core.costs.times import Costs, PassTimes
from zbpp.core.costs.units import parse_memory

__all__ = [
    "ChunkMemory",
    "CollectiveOperation",
    "Costs",
    "LayerCosts",
    "Link",
    "MemoryModel",
    "PassTimes",
    "PerChunk",
    "chunk_layers",
    "collective_time",
    "fit_link",
    "parse_memory",
    "zero_bytes",
    "zero_volume",
]
