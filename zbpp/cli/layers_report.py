"""Splits of layers, and what they gain over even chunks, as text for a terminal."""

from collections.abc import Mapping

from zbpp.planning import Plan

__all__ = ["comparison_of_splits", "split_lines"]


def split_lines(planned: Plan) -> list[str]:
    """Three lines: layers of each chunk; step and idle share beside even chunks'."""
    step, even, ideal = planned.step, planned.even_step, planned.ideal_step or 0.0
    lines = {
        "split": f"{' '.join(map(str, planned.split or ()))} layers",
        "step": f"{step:.6g}",
        "idle": f"{_idle(ideal, step):.1%} of the stages' time, unequal work included",
    }
    if even is None:
        lines["step"] += "; even chunks do not fit the memory"
    elif planned.gain is not None:
        lines["step"] += f"; even chunks: {even:.6g}, so {_gain(planned.gain)}"
        lines["idle"] += f"; even chunks: {_idle(ideal, even):.1%}"
    return [f"{name:6} {text}" for name, text in lines.items()]


def comparison_of_splits(plans: Mapping[str, Plan]) -> list[str]:
    """A line a mode: its split, and its gain."""
    widest = max(map(len, plans))
    return [
        f"{mode:{widest}}  split {' '.join(map(str, one.split or ()))}"
        + ("" if one.gain is None else f": {_gain(one.gain)} than even chunks")
        for mode, one in plans.items()
    ]


def _gain(gain: float) -> str:
    return f"{abs(gain):.1%} {'shorter' if gain >= 0 else 'longer'}"


def _idle(ideal: float, step: float) -> float:
    """Share of a step in which a stage does not work, in the mean over the stages."""
    return 1 - ideal / step if step > 0 else 0.0
