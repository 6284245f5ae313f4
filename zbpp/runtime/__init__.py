"""Run programs with PyTorch; below `zbpp.pipeline` only this layer imports torch."""
