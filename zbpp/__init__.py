"""Zero-bubble pipeline parallelism for PyTorch: plan, simulate, run."""
