"""Run schedules with PyTorch; the only layer that imports torch."""
