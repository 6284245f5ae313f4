"""Times and memories that plans are made for, and simulated with.

columns        what the columns of costs are per, and how shorthands are spread
collectives    times of gathers and sums among replicas, by formula; ZeRO's bytes
parts          what passes compute, and what they exchange between
chunks         ChunkCosts: the costs on a placement
table          Costs: times and memories of chunks
layers         LayerCosts: those of layers, for any split
held           memory along an order
"""
