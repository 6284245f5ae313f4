"""Tied weights: one parameter that several layers hold.

find      ties in a list of layers; builders that share parameters
plan      the stages that hold each tie: the same on all of them
alias     a parameter that stands for another in one layer
bind      one tensor a stage, and a gradient for each layer
stage     the ties of one stage in a step: gradients sent, added, compared

On one stage a tied parameter is one tensor; every other stage that holds it has a copy.
A layer's uses of it add up to a gradient of the layer's own over the micro-batches, and
the layers' gradients are added in layer order at the end: so the sum has the same bits
under every schedule, for any number of stages.
"""
