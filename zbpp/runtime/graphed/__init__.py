"""Passes as CUDA graphs: recorded once for each micro-batch in flight, then run."""
