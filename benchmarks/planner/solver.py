"""Prove how good a plan is, or find a better one: CP-SAT from OR-tools.

Every pass is an interval on its stage; what it reads must have arrived. Memory is a
second resource: M_B is used from the start of F to the end of B, then M_W to the end of
W; and a pass uses its peak above that while it runs. The largest span of a stage is
minimised, starting from the given plan.

    M_W <= M_B  F0 .......... B0        M_B - M_W
                F0 ............... W0   M_W
    M_W > M_B   F0 .......... B0        M_B
                            B0 ... W0   M_W, from the end of B

Small cases are solved to the optimum; on others the solver gives a bound within the
time it has. It is a judge of planners, not a planner: 8 stages with 16 micro-batches
are rarely closed.

A pair that takes as long as its passes is no better than these one after the other, F
first: so the solver puts such passes in turn. Pairs that are shorter it does not know.

Passes that take no time take one *tick* here, all of them less than the unit of time
together: so they use their memory, and have an order, though they share an instant.
"""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from math import lcm
from typing import Any

from zbpp.core import (
    ChunkCosts,
    Costs,
    JobGraph,
    Order,
    Pair,
    Pass,
    PassKind,
    RequestError,
    Schedule,
    Slot,
    Step,
    lower_bound,
    members_of,
    peaks,
    reads,
    writes,
)

__all__ = ["Certificate", "certify"]

_MAX_TIME = 2**40  # sums of times in the solver stay far below 2**63
_MAX_MEMORY = 2**55  # bytes of GPUs, thousands of times


@dataclass(frozen=True)
class Certificate:
    """Result of the solver; times in the unit of the costs.

    ``schedule`` is the given plan, or a better one; no schedule with this placement,
    memory and number of micro-batches has a span below ``bound``.
    """

    schedule: Schedule
    span: float
    bound: float

    def __str__(self) -> str:
        if self.is_optimal:
            return f"proved optimal (span {self.span:.6g})"
        return f"at most {self.gap:.2%} above the optimum (bound {self.bound:.6g})"

    @property
    def is_optimal(self) -> bool:
        """True if no schedule is better (but for rounding)."""
        return self.span <= self.bound * (1 + 1e-9)

    @property
    def gap(self) -> float:
        """Largest distance of the span to the optimum, as a share of the bound."""
        return self.span / self.bound - 1


def certify(
    schedule: Schedule,
    costs: Costs,
    *,
    seconds: float = 60.0,
    workers: int | None = None,
) -> Certificate:
    """Ask the solver for the best schedule of this placement.

    Args:
        schedule: a plan to start from; it defines which passes are split and must keep
            the memory limit.
        costs: times, which are turned into whole numbers exactly, and memories;
            without a limit, that of every stage is the largest peak of the plan.
        seconds: how long the solver may search.
        workers: threads; None: one per core.

    Raises:
        RequestError: OR-tools is missing, the plan exceeds the memory limit, the times
            have too many digits, its pairs have separate times, or the costs have
            parts.
    """
    try:
        from ortools.sat.python import cp_model
    except ModuleNotFoundError:
        raise RequestError(
            "the solver needs OR-tools; install it: pip install ortools"
        ) from None
    chunk_costs = costs.on(schedule.placement)
    if chunk_costs.parts:
        raise RequestError("the solver knows no parts; leave them out of the costs")
    schedule = replace(schedule, parts=None)
    if costs.memory_limit is None:
        costs = replace(costs, memory_limit=max(peaks(schedule.orders, chunk_costs)))
        chunk_costs = costs.on(schedule.placement)
    has_pairs = any(isinstance(job, Pair) for order in schedule.orders for job in order)
    if has_pairs and chunk_costs.fb:
        raise RequestError(
            f"{schedule.name} runs pairs, and the solver knows none that are shorter "
            "than their passes; leave fb out of the costs"
        )
    in_turn = tuple(
        tuple(part for job in order for part in members_of(job))
        for order in schedule.orders
    )
    # refused if it exceeds the limit
    schedule = replace(schedule, orders=in_turn)
    problem = _Problem(schedule, chunk_costs, cp_model.CpModel())
    problem.add_order()
    problem.add_memory(chunk_costs)
    problem.minimise_span()
    problem.hint()
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers or 0
    status = solver.solve(problem.model)
    ours = lower_bound(schedule.placement, schedule.n_microbatches, costs)
    least = math.ceil(solver.best_objective_bound - 1e-6) - problem.n_ticks
    bound = max(ours, -(-least // problem.ticks) / problem.time_scale)
    span = problem.given_span / problem.time_scale
    solved = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    if solved and solver.objective_value // problem.ticks < problem.given_span:
        schedule = problem.read(solver)
        span = problem.span_of(schedule) / problem.time_scale
    return Certificate(schedule, span, bound)


class _Problem:
    """The model under construction; times and memories as whole numbers."""

    def __init__(self, schedule: Schedule, times: ChunkCosts, model: Any) -> None:
        self.schedule = schedule
        self.model = model
        self._placement = schedule.placement
        self._passes = [
            job for order in schedule.orders for job in order if isinstance(job, Pass)
        ]
        exactly = {job: _exact(times.of(job)) for job in self._passes}
        hops = [_exact(hop) for hop in times.hops]
        self.time_scale = _scale_of([*exactly.values(), *hops])
        self.n_ticks = sum(not time for time in exactly.values())
        self.ticks = self.n_ticks + 1  # of a unit of time
        scale = self.time_scale * self.ticks
        self._duration = {job: int(time * scale) or 1 for job, time in exactly.items()}
        self._hops = [int(hop * scale) for hop in hops]
        self._times = times
        self.given_span = self.span_of(schedule)
        self._given = {
            slot.job: round(slot.start * scale)
            for row in _rows(schedule, _at_least(times, 1 / scale))
            for slot in row
            if isinstance(slot.job, Pass)
        }
        waits = max(self._hops, default=0) * len(self._passes)
        self._horizon = sum(self._duration.values()) + waits
        self._start = {job: self._time(str(job)) for job in self._passes}

    def span_of(self, schedule: Schedule) -> int:
        """The largest span of a stage, each pass as early as it can be."""
        return round(
            JobGraph(schedule.orders, self._times).run().span * self.time_scale
        )

    def _time(self, name: str) -> Any:
        return self.model.new_int_var(0, self._horizon, name)

    def _end(self, job: Pass) -> Any:
        return self._start[job] + self._duration[job]

    def _of(self, *kinds: PassKind, chunk: int, microbatch: int) -> Pass:
        """The pass that does this work: B and W may be one BW."""
        candidates = (Pass(kind, chunk, microbatch) for kind in kinds)
        return next(job for job in candidates if job in self._start)

    def add_order(self) -> None:
        """One pass at a time on a stage, inputs first, micro-batches in order."""
        model, n_chunks = self.model, self._placement.n_chunks
        for order in self.schedule.orders:
            model.add_no_overlap(
                model.new_fixed_size_interval_var(
                    self._start[job], self._duration[job], str(job)
                )
                for job in order
                if isinstance(job, Pass)
            )
        producer = {v: job for job in self._passes for v in writes(job, n_chunks)}
        for job in self._passes:
            for value in reads(job, n_chunks):
                source = producer[value]
                ends = source.chunk, job.chunk
                delay = 0 if ends[0] == ends[1] else self._hops[min(ends)]
                model.add(self._start[job] >= self._end(source) + delay)
            later = Pass(job.kind, job.chunk, job.microbatch + 1)
            if later in self._start:  # identical micro-batches: first come first
                model.add(self._start[later] >= self._end(job))

    def add_memory(self, memory: ChunkCosts) -> None:
        """Let B and W give back what F takes, within the stage's limit."""
        memory = memory.above_fixed()
        for stage, chunks in enumerate(self._placement.chunks_of):
            limit = memory.limit[stage]
            if limit == float("inf"):
                continue
            parts: list[tuple[Any, Fraction]] = []
            for chunk in chunks:
                for i in range(self.schedule.n_microbatches):
                    forward = Pass(PassKind.F, chunk, i)
                    b = self._of(PassKind.B, PassKind.BW, chunk=chunk, microbatch=i)
                    w = self._of(PassKind.W, PassKind.BW, chunk=chunk, microbatch=i)
                    parts += self._left(memory, forward, b, w)
                    for job in {forward, b, w}:
                        parts += self._inside(memory, job)
            scale = _scale_of([share for _, share in parts], _MAX_MEMORY)
            self.model.add_cumulative(
                [interval for interval, _ in parts],
                [int(share * scale) for _, share in parts],
                int(_exact(limit) * scale * (1 + Fraction(5, 10**10))),
            )

    def _left(
        self, memory: ChunkCosts, forward: Pass, b: Pass, w: Pass
    ) -> list[tuple[Any, Fraction]]:
        """Intervals of what F and B leave, and how much that is."""
        m_b, m_w = (
            _exact(memory.m_b[forward.chunk]),
            _exact(memory.m_w[forward.chunk]),
        )
        if b == w:
            return [(self._held(forward, b), m_b)]
        if m_w <= m_b:
            return [
                (self._held(forward, b), m_b - m_w),
                (self._held(forward, w), m_w),
            ]
        name = f"after {b} to {w}"
        length = self._time(f"time from {name}")
        after = self.model.new_interval_var(self._end(b), length, self._end(w), name)
        return [(self._held(forward, b), m_b), (after, m_w)]

    def _inside(self, memory: ChunkCosts, job: Pass) -> list[tuple[Any, Fraction]]:
        """The interval of a pass, and its peak above what is counted otherwise."""
        peak = _exact(memory.peak(job))
        if job.kind is PassKind.F:
            peak -= _exact(memory.m_b[job.chunk])
        if peak <= 0:
            return []
        name = f"inside {job}"
        start, duration = self._start[job], self._duration[job]
        return [(self.model.new_fixed_size_interval_var(start, duration, name), peak)]

    def _held(self, first: Pass, last: Pass) -> Any:
        name = f"{first} to {last}"
        length = self._time(f"time from {name}")
        return self.model.new_interval_var(
            self._start[first], length, self._end(last), name
        )

    def minimise_span(self) -> None:
        """Minimise the largest time between a stage's first F and its last pass."""
        most = self.given_span * self.ticks + self.n_ticks
        span = self.model.new_int_var(0, most, "span")
        for order in self.schedule.orders:
            first = self._time("first start")
            passes = [job for job in order if isinstance(job, Pass)]
            self.model.add_min_equality(first, [self._start[job] for job in passes])
            for job in passes:
                self.model.add(span >= self._end(job) - first)
        self.model.minimize(span)

    def hint(self) -> None:
        """Start the search from the given plan."""
        for job, start in self._given.items():
            self.model.add_hint(self._start[job], start)

    def read(self, solver: Any) -> Schedule:
        """Make a schedule of the starts that the solver found."""
        orders: list[Order] = []
        for stage, order in enumerate(self.schedule.orders):
            passes = [job for job in order if isinstance(job, Pass)]
            passes.sort(key=lambda job: solver.value(self._start[job]))
            last: Order = (Step(stage),) if Step(stage) in order else ()
            orders.append((*passes, *last))
        return replace(self.schedule, orders=tuple(orders))


def _rows(schedule: Schedule, times: ChunkCosts) -> list[list[Slot]]:
    return JobGraph(schedule.orders, times).run().slots()


def _at_least(times: ChunkCosts, least: float) -> ChunkCosts:
    """The times, with ``least`` for passes that take none."""
    kinds = times.f, times.b, times.w
    f, b, w = (tuple(max(duration, least) for duration in kind) for kind in kinds)
    return replace(times, f=f, b=b, w=w)


def _exact(number: float) -> Fraction:
    """A number as it was written: sums such as B + W have digits from rounding."""
    return Fraction(f"{number:.12g}")


def _scale_of(numbers: list[Fraction], largest: int = _MAX_TIME) -> int:
    """The factor that makes all numbers whole, if that is not too large."""
    scale = lcm(*(number.denominator for number in numbers))
    if max(numbers, default=Fraction(0)) * scale * len(numbers) > largest:
        raise RequestError(
            "the costs have too many digits for the solver; round them to six or so"
        )
    return scale
