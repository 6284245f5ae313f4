"""Runs of several modes that take turns, and the ratios of what they have measured.

A slow spell of the machine then hits all modes, and figures of one turn are compared
with those of the same turn.
"""

import json
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Runs", "quartiles_of", "spread_of", "take_turns"]

Runs = dict[str, list[dict[str, Any]]]
"""Figures of every run, by mode."""


def take_turns(
    modes: Iterable[str], n_runs: int, measure: Callable[[str, Path], None]
) -> Runs:
    """Run every mode once, then all once more, and so on; print what is found.

    Args:
        modes: in the order of a turn.
        n_runs: of each mode.
        measure: runs a mode, in processes of its own, and has its figures written to
            a file as JSON.
    """
    found: Runs = {mode: [] for mode in modes}
    with tempfile.TemporaryDirectory() as folder:
        for run in range(n_runs):
            for mode, runs in found.items():
                file = Path(folder) / f"{mode}{run}.json"
                measure(mode, file)
                runs.append(json.loads(file.read_text()))
                print(
                    mode, {k: _short(v) for k, v in runs[-1].items() if v}, flush=True
                )
    return found


def _short(value: object) -> object:
    return round(value, 1) if isinstance(value, float) else value


def spread_of(ratios: Sequence[float]) -> str:
    """Median, and the extremes in brackets."""
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"


def quartiles_of(ratios: Sequence[float]) -> str:
    """Median, and the quartiles in brackets; of one, itself."""
    if len(ratios) < 2:
        return spread_of(ratios)
    low, _, high = statistics.quantiles(ratios, n=4)
    return f"{statistics.median(ratios):.3f} ({low:.3f}-{high:.3f})"
