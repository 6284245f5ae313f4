"""Stages beside data and tensor parallelism, on one mesh.

mesh       the mesh, and this process's place on it        read this first
stage      the collectives of a stage: unshard, reshard, reduce, wait
bind       what of a stage is wrapped, and which collectives it needs
buffers    alternating buffers: all that is special about them
buckets    gradients of layers that nobody has wrapped, summed over the replicas
progress   the sum of a layer, as soon as the last W is done with it
wrap       wrap layers as ``--shard`` asks

A module that `fully_shard` or `replicate` has wrapped is a `Unit` of
`zbpp.runtime.support.fsdp`.
"""
