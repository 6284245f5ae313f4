"""Stages beside data and tensor parallelism, on one mesh.

mesh       the mesh, and this process's place on it        read this first
unit       a module that `fully_shard` or `replicate` has wrapped
buckets    gradients of layers that nobody has wrapped, summed over the replicas
stage      the collectives of a stage: unshard, reshard, reduce, wait
wrap       wrap layers as ``--shard`` asks
totals     the weight of the whole batch, over all replicas
"""
