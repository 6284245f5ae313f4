"""Times and memories that plans are made for, and simulated with.

columns        what the columns of costs are per, and how shorthands are spread
collectives    times of gathers and sums among replicas, by formula; ZeRO's bytes
parts          what passes compute, and what they exchange between
chunks         ChunkCosts: the costs on a placement
table          Costs: times and memories of chunks
layers         LayerCosts: those of layers, for any split
held           the memory along an order
"""

from zbpp.core.costs.chunks import ChunkCosts
from zbpp.core.costs.collectives import (
    CollectiveOperation,
    Link,
    collective_time,
    fit_link,
    zero_bytes,
    zero_volume,
)
from zbpp.core.costs.columns import parse_memory
from zbpp.core.costs.held import held_during, peaks
from zbpp.core.costs.layers import LayerCosts, chunk_layers
from zbpp.core.costs.parts import Parts
from zbpp.core.costs.table import Costs

__all__ = [
    "ChunkCosts",
    "CollectiveOperation",
    "Costs",
    "LayerCosts",
    "Link",
    "Parts",
    "chunk_layers",
    "collective_time",
    "fit_link",
    "held_during",
    "parse_memory",
    "peaks",
    "zero_bytes",
    "zero_volume",
]
