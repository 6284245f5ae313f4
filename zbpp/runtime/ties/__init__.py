"""Tied weights: one parameter that several layers hold.

plan    ties in a list of layers, and the stages that hold each of them
bind    one tensor a stage, and a gradient for each layer
stage   the ties of one stage in a step: gradients sent, added, compared

On one stage a tied parameter is one tensor; every other stage that holds it has a copy.
A layer's uses of it add up to a gradient of the layer's own over the micro-batches, and
the layers' gradients are added in layer order at the end: so the sum has the same bits
under every schedule, for any number of stages.
"""
