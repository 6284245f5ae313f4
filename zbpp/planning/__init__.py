"""From a request to a plan: the schedule to run for given times and memory.

Read in this order:

request     the question: a mode or orders, sizes, costs, memory, split, recompute
answer      the answer: a schedule, its figures, why others lost; its file
make        `make_plan` from one to the other, and `plan`, its short form; orders
            that are there already, and requests of `zbpp.Pipeline`
modes       one row a mode: names, placement, memory, hand-made order or search
layers      the split of layers, and which of them are recomputed
candidates  plans of modes on placements, for costs of chunks and of layers: the best
replicas    costs and collectives of replicas, and of layers that devices share
meshes      plans of stages, replicas and shares on a number of devices
"""

from zbpp.planning.answer import Plan, Rejected
from zbpp.planning.make import make_plan, plan, read_plan
from zbpp.planning.meshes import best_mesh, plan_meshes
from zbpp.planning.modes import (
    BASELINE,
    MODE_WORDS,
    MODES,
    USUAL_MODES,
    Mode,
    canonical,
    is_auto,
    is_file,
)
from zbpp.planning.replicas import Network
from zbpp.planning.request import PlanRequest

__all__ = [
    "BASELINE",
    "MODES",
    "MODE_WORDS",
    "USUAL_MODES",
    "Mode",
    "Network",
    "Plan",
    "PlanRequest",
    "Rejected",
    "best_mesh",
    "canonical",
    "is_auto",
    "is_file",
    "make_plan",
    "plan",
    "plan_meshes",
    "read_plan",
]
