"""Schedules chosen for what is measured: `auto` in a run.

choose   LayerCosts -> the best placement, split, recompute and order, and why
watch    windows of steps -> the best order of the present placement
"""
