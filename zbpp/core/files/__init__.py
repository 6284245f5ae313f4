"""Files: schedules, costs, and costs of layers, in JSON that other tools read.

schedule_file   rows of jobs, one a stage
costs_file      times and memories of chunks, or of layers
json_text       reading JSON, and saying what is wrong with it
"""

from zbpp.core.files.costs_file import (
    is_layers_file,
    parse_costs,
    parse_layers,
    read_costs,
    read_layers,
    write_costs,
    write_layers,
)
from zbpp.core.files.schedule_file import (
    parse_schedule,
    read_schedule,
    schedule_text,
    write_schedule,
)

__all__ = [
    "is_layers_file",
    "parse_costs",
    "parse_layers",
    "parse_schedule",
    "read_costs",
    "read_layers",
    "read_schedule",
    "schedule_text",
    "write_costs",
    "write_layers",
    "write_schedule",
]
