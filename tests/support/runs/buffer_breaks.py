"""Ways to break alternating buffers, or to see who reads what was given back."""

import sys
from typing import Any

import torch

from zbpp.runtime.parallel import buffers
from zbpp.runtime.parallel.buffers import GradientTurn, Turn
from zbpp.runtime.parallel.progress import LayerSums

__all__ = ["OF_BUFFERS"]


def _with_nans(method: str) -> tuple[type, str, Any]:
    """What a method of `Turn` has been called for is not a number from then on."""
    whole = getattr(Turn, method)

    def poisoned(turn: Any, *args: Any, **named: Any) -> Any:
        of_gradients = method == "finish"
        ends = not of_gradients or turn.is_summing
        result = whole(turn, *args, **named)
        if ends:
            turn.buffers[of_gradients].view(torch.float32).fill_(torch.nan)
        return result

    return Turn, method, poisoned


def _chain_two_ahead(units: Any, **_: Any) -> None:
    for unit, after in zip(units, units[2:], strict=False):
        unit.gather_ahead(after, None)


def _nothing(*_: Any) -> None:
    pass


OF_BUFFERS: dict[str, list[tuple[Any, str, Any]]] = {
    "poison": [_with_nans("release"), _with_nans("finish")],
    "released early": [_with_nans("begin")],
    "two ahead": [(buffers, "_chain", _chain_two_ahead)],
    "never freed": [(Turn, "release", _nothing)],
    "unwaited": [(Turn, "arrived", _nothing)],
    "summed early": [(GradientTurn, "filled", _nothing)],
    "never summed": [(GradientTurn, "release", _nothing)],
    "unwaited sums": [(Turn, "finish", _nothing)],
    "late": [(LayerSums, "done", lambda *_: sys.maxsize)],
}
"""Owner, name and stand-in of what is patched; ``poison`` breaks nothing."""
