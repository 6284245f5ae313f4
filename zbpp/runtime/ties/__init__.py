"""Tied weights: one parameter that several layers use.

plan    ties in a list of layers, and the stages that use each of them
bind    a parameter for each layer, on one memory
stage   the ties of one stage in a step: gradients sent and added

In one process a tied parameter is one memory; every other process has a copy. A layer's
uses of it add up to one gradient a layer over the micro-batches, and the layers'
gradients are added in layer order at the end: so the sum has the same bits
under every schedule, for any number of stages.
"""
