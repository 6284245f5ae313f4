"""A small language model trained by a pipeline: what `zbpp train` runs."""
