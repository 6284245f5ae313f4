"""The list scheduler of a line, compiled if it can be."""

import ctypes
import math
from dataclasses import dataclass
from itertools import chain

from zbpp.schedules.planner.compiled.library import (
    Buffer,
    address,
    check,
    floats,
    library,
    whole_numbers,
)
from zbpp.schedules.planner.single import list_scheduler
from zbpp.schedules.planner.single.list_scheduler import Rules, Run
from zbpp.schedules.planner.single.problem import Line

__all__ = ["list_schedule_line"]

_MARGIN = 1e-9  # as in `list_scheduler`


class _Line(ctypes.Structure):
    """`Line` of line.c."""

    _fields_ = (
        ("n_stages", ctypes.c_int64),
        ("n_microbatches", ctypes.c_int64),
        ("eps", ctypes.c_double),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("f", "b", "w", "hop", "works"),
                *("forward_room", "backward_room", "splits"),
            )
        ),
    )


class _Rules(ctypes.Structure):
    """`Rules` of line.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("ahead", "early", "late", "slack")),
        ("is_fair", ctypes.c_int64),
    )


@dataclass(frozen=True)
class _Flat:
    """A line as C sees it, and the arrays that it points to."""

    line: _Line
    arrays: "tuple[Buffer | bytes, ...]"


def _flat(line: Line) -> _Flat:
    """Make it once: it is kept with the line, as its own properties are."""
    kept = vars(line)
    if "flat" not in kept:
        kept["flat"] = _flatten(line)
    flat: _Flat = kept["flat"]
    return flat


def _flatten(line: Line) -> _Flat:
    p, m = line.n_stages, line.n_microbatches
    arrays = (
        *map(floats, (line.f, line.b, line.w, line.hop, line.works)),
        whole_numbers(chain.from_iterable(line.forward_room)),
        whole_numbers(chain.from_iterable(line.backward_room)),
    )
    splits = bytes(line.splits)
    pointers = [address(one) for one in arrays]
    structure = _Line(
        p,
        m,
        _MARGIN * (max(line.works) / m),
        *pointers,
        ctypes.cast(ctypes.c_char_p(splits), ctypes.c_void_p),
    )
    return _Flat(structure, (*arrays, splits))


def list_schedule_line(line: Line, rules: Rules, *, cut: float = math.inf) -> Run:
    """Plan once, as `list_scheduler.list_schedule_line` does, to the last bit."""
    if library is None:
        return list_scheduler.list_schedule_line(line, rules, cut=cut)
    flat = _flat(line)
    arrays = (
        *map(whole_numbers, (rules.ahead, rules.early)),
        *map(floats, (rules.late, rules.slack)),
    )
    span, n_steps = ctypes.c_double(), ctypes.c_int64()
    size, lengths = 3 * line.n_microbatches, whole_numbers([0] * line.n_stages)
    kinds = bytearray(size * line.n_stages)
    is_done = check(
        library.zbpp_line(
            ctypes.byref(flat.line),
            ctypes.byref(_Rules(*map(address, arrays), rules.is_fair)),
            ctypes.c_double(cut),
            (ctypes.c_char * len(kinds)).from_buffer(kinds),
            address(lengths),
            ctypes.byref(span),
            ctypes.byref(n_steps),
        )
    )
    if not is_done:
        return Run([], math.inf, n_steps.value)
    rows = [kinds[s * size : s * size + n] for s, n in enumerate(lengths)]
    return Run(rows, span.value, n_steps.value)
