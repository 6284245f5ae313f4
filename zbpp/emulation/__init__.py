"""Stages that sleep instead of computing: schedules measured on few cores."""

from zbpp.emulation.layers import EmulatedLayer
from zbpp.emulation.run import Emulation, emulate, emulated_batch, emulated_pipeline

__all__ = [
    "EmulatedLayer",
    "Emulation",
    "emulate",
    "emulated_batch",
    "emulated_pipeline",
]
