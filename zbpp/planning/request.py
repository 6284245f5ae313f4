"""The request: modes or orders, sizes, times and memory."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from zbpp.core import (
    Costs,
    LayerCosts,
    Placement,
    RequestError,
    Schedule,
    a_kind,
    even_split,
)
from zbpp.core.columns import PerRow, listed, whole_number
from zbpp.core.files import either_of
from zbpp.core.placement import check_split
from zbpp.planning.answer import Plan

Split = Literal["balanced", "even"] | Sequence[int] | None
"""Layers of each chunk, or how to choose them; None: balanced."""

Recomputing = Literal["auto", "all", "none"] | Collection[int]
"""Layers of the whole model that are recomputed, or how to choose them."""

_CHOICES = {
    "split": (
        ("balanced", "even"),
        "balanced or even, or give the layers of each chunk, as 3,4,5",
    ),
    "recompute": (
        ("auto", "all", "none"),
        "auto, all or none, or give numbers, as 0,2,5",
    ),
}
"""Words for split and recompute, and the suggestion of an error."""

MemoryLimit = str | float | Sequence[float]
"""Of a stage: a number, a text such as ``"16GiB"``, or a list by stage."""

CostsLike = Costs | LayerCosts | Mapping[str, Any] | str | Path
"""Costs, a costs or layers file, or the JSON object of such a file."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """All that a plan depends on; `zbpp.make_plan` answers it.

    Args:
        schedule: any spelling of a mode, the path of a schedule or plan file, a
            `Schedule`, or a `Plan`.
        n_stages: stages; with a schedule or plan it may be left out, or must agree.
        n_microbatches: micro-batches in a step, as above.
        chunks_per_stage: for VPP, ZBVPP and auto; None: 2 (auto: 1 and 2).
        costs: of chunks, or of layers, which are then split for the plan; if they have
            a limit, the plan keeps it or is refused. None: those of a plan file, or F,
            B and W take 1.
        memory_limit: of a stage, in place of that of the costs: a number in their unit,
            a text such as ``"16GiB"``, or a list with one entry a stage.
        split: ``"balanced"`` (with costs of layers), ``"even"`` or the layers of each
            chunk; None: those of the file, else balanced with costs of layers, and even
            without.
        n_layers: of the model, where there are costs of chunks: layers share those of
            their chunk evenly; None: they are not known.
        recompute: ``"auto"``, ``"all"``, ``"none"``, or numbers: layers of the whole
            model if these are known, else chunks, whose forward B computes again; None:
            those of the file, else none.
        effort: how hard to search: ``fast``, ``default``, ``best`` (a minute) or
            ``best:SECONDS``.
        placement: for auto with costs of chunks: the only placement to plan.
    """

    schedule: str | Path | Schedule | Plan
    n_stages: int | None = None
    n_microbatches: int | None = None
    chunks_per_stage: int | None = None
    costs: Costs | LayerCosts | None = None
    memory_limit: PerRow | None = None
    split: Split = None
    n_layers: int | None = None
    recompute: Recomputing | None = None
    effort: str = "default"
    placement: Placement | None = None

    def __post_init__(self) -> None:
        """Convert values that are unambiguous; only here."""
        if not isinstance(self.schedule, str | Path | Schedule | Plan):
            raise RequestError(
                f"schedule is {self.schedule!r:.60}; give a mode such as 'ZBH1', the "
                "path of a schedule or plan file, a Schedule, or a Plan"
            )
        costs = costs_like(self.costs)
        limited = (costs or Costs()).with_limit(self.memory_limit)
        values: dict[str, Any] = {
            "costs": limited if costs else None,
            "memory_limit": None if costs else limited.memory_limit,
        }
        for name in ("n_stages", "n_microbatches", "chunks_per_stage"):
            if (size := getattr(self, name)) is not None:
                values[name] = whole_number(name, size)
        split = listed(self.split)
        if isinstance(split, str):
            values["split"] = _parse("split", split)
        elif split is not None:
            values["split"] = tuple(whole_number("split", n) for n in split)
        values["recompute"] = _recompute_like(self.recompute)
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def chunk_costs(self) -> Costs:
        """Costs of chunks; the defaults if the request has none."""
        assert not isinstance(self.costs, LayerCosts)
        if self.costs is not None:
            return self.costs
        return Costs().with_limit(self.memory_limit)

    def sizes(self, name: str) -> tuple[int, int]:
        """Stages and micro-batches, which a mode needs."""
        return (
            at_least_one(name, "n_stages", self.n_stages),
            at_least_one(name, "n_microbatches", self.n_microbatches),
        )


def costs_like(value: CostsLike | None) -> Costs | LayerCosts | None:
    """Return costs, or read those of a file or of its object."""
    match value:
        case None | Costs() | LayerCosts():
            return value
        case str() | Path() | Mapping():
            return either_of(value)
    raise RequestError(
        f"costs is {a_kind(value)}; give zbpp.Costs, a dict with the keys of a costs "
        "file, or the path of one"
    )


def _recompute_like(value: Any) -> Any:
    """Numbers of chunks or layers, or one of the words for all of them."""
    value = listed(value)
    if isinstance(value, str):
        return _parse("recompute", value)
    if value is not None and isinstance(value, bool | int | float):
        raise RequestError(f"recompute is {value!r}; choose {_CHOICES['recompute'][1]}")
    if value is None:
        return None
    numbers = [whole_number("recompute", number) for number in value]
    return frozenset(numbers) if isinstance(value, set | frozenset) else tuple(numbers)


def at_least_one(mode: str, name: str, number: int | None) -> int:
    """Return a size that a mode needs."""
    if number is None or number < 1:
        raise RequestError(f"{name} is {number}; {mode} needs at least 1")
    return number


def split_on(split: Split, n_layers: int, placement: Placement) -> tuple[int, ...]:
    """Layers of each chunk of a placement, as asked for, or even."""
    if split == "balanced":
        raise RequestError(
            "split is balanced, but there are no costs per layer; give costs of "
            "layers, or leave split out"
        )
    if split is None or split == "even":
        return even_split(n_layers, placement.n_chunks)
    check_split(split, n_layers, placement.n_chunks)
    return tuple(split)


def split_of(schedule: Schedule, split: Split, n_layers: int) -> tuple[int, ...]:
    """Layers of each chunk of a schedule, where there are no costs per layer."""
    if split is not None or schedule.split is None:
        return split_on(split, n_layers, schedule.placement)
    if sum(schedule.split) != n_layers:
        raise RequestError(
            f"the schedule's split {list(schedule.split)} is for {sum(schedule.split)} "
            f"layers, but the model has {n_layers}; plan again, or give the split"
        )
    return schedule.split


def _parse(name: str, text: str) -> Any:
    """Read a word of split or recompute, or numbers, as ``0,2,5``."""
    words, choices = _CHOICES[name]
    if text in words:
        return text
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        message = f"{name} {text!r} is not known; choose {choices}"
        raise RequestError(message) from None
