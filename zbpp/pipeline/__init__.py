"""The API in a user's script.

pipeline     `Pipeline`: mode -> schedule -> programs -> executors, and ``step``
evaluate     losses without gradients
switch       another schedule between two steps
reports      timelines, measured costs, predictions, profiles
exhausted    words for a run that is out of memory
"""

from zbpp.pipeline.pipeline import Pipeline

__all__ = ["Pipeline"]
