"""Values that every layer shares; standard library only."""

from zbpp.core.amounts import format_bytes, format_memory
from zbpp.core.bounds import lower_bound, lower_bound_on, lower_bounds
from zbpp.core.clock import Clock, replay, step_behind_barrier
from zbpp.core.costs import (
    ChunkMemory,
    Costs,
    LayerCosts,
    MemoryModel,
    PassTimes,
    parse_memory,
)
from zbpp.core.errors import LimitError, RequestError, ScheduleError, WorkerError
from zbpp.core.files import (
    is_layers_file,
    parse_costs,
    parse_layers,
    parse_schedule,
    read_costs,
    read_layers,
    read_schedule,
    schedule_text,
    write_costs,
    write_layers,
    write_schedule,
)
from zbpp.core.jobs import (
    Check,
    Job,
    Pass,
    PassKind,
    Step,
    Value,
    What,
    input_of,
    output_of,
    reader,
    reads,
    writes,
)
from zbpp.core.memory import held_during, peaks
from zbpp.core.placement import Placement
from zbpp.core.program import (
    Instruction,
    Program,
    Receive,
    Reduce,
    Send,
    at_check,
)
from zbpp.core.recomputed import recomputed
from zbpp.core.schedule import Order, Schedule
from zbpp.core.text import draw, format_job, grid, parse_job
from zbpp.core.timeline import Slot, Timeline, longest_span, pass_span
from zbpp.core.validation import Recompute

__all__ = [
    "Check",
    "ChunkMemory",
    "Clock",
    "Costs",
    "Instruction",
    "Job",
    "LayerCosts",
    "LimitError",
    "MemoryModel",
    "Order",
    "Pass",
    "PassKind",
    "PassTimes",
    "Placement",
    "Program",
    "Receive",
    "Recompute",
    "Reduce",
    "RequestError",
    "Schedule",
    "ScheduleError",
    "Send",
    "Slot",
    "Step",
    "Timeline",
    "Value",
    "What",
    "WorkerError",
    "at_check",
    "draw",
    "format_bytes",
    "format_job",
    "format_memory",
    "grid",
    "held_during",
    "input_of",
    "is_layers_file",
    "longest_span",
    "lower_bound",
    "lower_bound_on",
    "lower_bounds",
    "output_of",
    "parse_costs",
    "parse_job",
    "parse_layers",
    "parse_memory",
    "parse_schedule",
    "pass_span",
    "peaks",
    "read_costs",
    "read_layers",
    "read_schedule",
    "reader",
    "reads",
    "recomputed",
    "replay",
    "schedule_text",
    "step_behind_barrier",
    "write_costs",
    "write_layers",
    "write_schedule",
    "writes",
]
