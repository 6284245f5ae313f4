"""Planners of schedules, and the passes that make programs of them."""

from zbpp.schedules.passes.collectives import add_collectives
from zbpp.schedules.passes.lower import lower, lower_forward
from zbpp.schedules.passes.parts import lay_out
from zbpp.schedules.passes.post_validation import post_validated
from zbpp.schedules.passes.torch_csv import to_torch_csv, torch_schedule_name
from zbpp.schedules.patterns.interleaved import plan_combined_1f1b, plan_vpp
from zbpp.schedules.patterns.one_chunk import (
    plan_fthenb,
    plan_one_f_one_b,
    plan_zb_h1,
    plan_zb_h2,
)
from zbpp.schedules.patterns.waves import plan_dual_pipe_v, plan_zb_v
from zbpp.schedules.planner.balance import Balance, balance
from zbpp.schedules.planner.placement import plan_placement

__all__ = [
    "Balance",
    "add_collectives",
    "balance",
    "lay_out",
    "lower",
    "lower_forward",
    "plan_combined_1f1b",
    "plan_dual_pipe_v",
    "plan_fthenb",
    "plan_one_f_one_b",
    "plan_placement",
    "plan_vpp",
    "plan_zb_h1",
    "plan_zb_h2",
    "plan_zb_v",
    "post_validated",
    "to_torch_csv",
    "torch_schedule_name",
]
