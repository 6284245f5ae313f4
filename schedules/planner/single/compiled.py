"""The list scheduler of a line, and times of its orders, compiled if they can be."""

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
from zbpp.schedules.planner.single import list_scheduler, problem
from zbpp.schedules.planner.single.list_scheduler import Rules, Run
from zbpp.schedules.planner.single.problem import (
    Kinds,
    Line,
    memory_by_kind,
    most_held,
)

__all__ = ["list_schedule_line", "time_orders"]

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


class _Orders(ctypes.Structure):
    """`Orders` of line.c."""

    _fields_ = (
        ("n_stages", ctypes.c_int64),
        ("n_microbatches", ctypes.c_int64),
        *(
            (name, ctypes.c_void_p)
            for name in ("f", "b", "w", "hop", "change", "inside", "most")
        ),
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


def time_orders(line: Line, kinds: Kinds) -> float:
    """Return the largest span, as `problem.time_orders` does, to the last bit."""
    if library is None:
        return problem.time_orders(line, kinds)
    stages = range(line.n_stages)
    changes, insides = zip(*(memory_by_kind(line, s) for s in stages), strict=True)
    arrays = (
        *map(floats, (line.f, line.b, line.w, line.hop)),
        *map(floats, map(chain.from_iterable, (changes, insides))),
        floats(most_held(line, s) for s in stages),
    )
    rows, lengths = b"".join(kinds), whole_numbers(map(len, kinds))
    span = ctypes.c_double()
    orders = _Orders(line.n_stages, line.n_microbatches, *map(address, arrays))
    is_done = check(
        library.zbpp_time_orders(
            *(ctypes.byref(orders), ctypes.c_char_p(rows)),
            *(address(lengths), ctypes.byref(span)),
        )
    )
    return span.value if is_done else math.inf
