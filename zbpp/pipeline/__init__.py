"""The API in a user's script.

pipeline        `Pipeline`: plan -> programs -> executors, and ``step``
plan_model      `plan_model`: from a model to the plan that a pipeline runs
arguments       checks of the arguments of a pipeline
torch_schedule  `TorchSchedule`: for a trainer that takes a schedule of torch
"""

from zbpp.pipeline.pipeline import Pipeline
from zbpp.pipeline.plan_model import plan_model

__all__ = ["Pipeline", "plan_model"]
