"""Planners: who does what in which order."""

from zbpp.schedules.auto import plan_auto
from zbpp.schedules.certify import Certificate, certify
from zbpp.schedules.effort import check_effort
from zbpp.schedules.fthenb import plan_fthenb
from zbpp.schedules.lower import check_channels, lower, lower_forward
from zbpp.schedules.one_f_one_b import plan_one_f_one_b
from zbpp.schedules.post_validation import post_validated, without_checks
from zbpp.schedules.torch_csv import to_torch_csv
from zbpp.schedules.v_modes import plan_v_half, plan_v_min, plan_zbv, plan_zbvpp
from zbpp.schedules.vpp import plan_vpp
from zbpp.schedules.wave import plan_placement, plan_wave
from zbpp.schedules.zb import plan_zb, plan_zb1p, plan_zb2p
from zbpp.schedules.zb_h1 import plan_zb_h1
from zbpp.schedules.zb_h2 import plan_zb_h2
from zbpp.schedules.zb_v import plan_zb_v

__all__ = [
    "Certificate",
    "certify",
    "check_channels",
    "check_effort",
    "lower",
    "lower_forward",
    "plan_auto",
    "plan_fthenb",
    "plan_one_f_one_b",
    "plan_placement",
    "plan_v_half",
    "plan_v_min",
    "plan_vpp",
    "plan_wave",
    "plan_zb",
    "plan_zb1p",
    "plan_zb2p",
    "plan_zb_h1",
    "plan_zb_h2",
    "plan_zb_v",
    "plan_zbv",
    "plan_zbvpp",
    "post_validated",
    "to_torch_csv",
    "without_checks",
]
