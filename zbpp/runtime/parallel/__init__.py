"""Stages with data and tensor parallelism, on one mesh.

mesh       the mesh, and this process's place on it        read this first
sums       the collectives of a stage: unshard, reshard, reduce, wait
reductions the sums of flat gradients
bind       the wrapped parameters of a stage, and their collectives
broadcast  equal parameters on all processes of a stage at the start
wrap       wrap layers as ``--shard`` asks
buffers    alternating buffers
pieces     all-gathers in pieces
experts    experts as DTensors

A module that `fully_shard` or `replicate` has wrapped is a `Unit` of
`zbpp.runtime.support.fsdp`.
"""
