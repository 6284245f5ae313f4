"""Schedules chosen for what is measured: `auto` in a run.

measure  a model and a batch -> costs of its layers, before the first step
watch    windows of steps -> the best order of the present placement
"""

from zbpp.tuning.watch import Watch, Watcher, replan

__all__ = ["Watch", "Watcher", "replan"]
