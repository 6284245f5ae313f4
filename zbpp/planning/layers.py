"""Plan a mode, the split of the layers, and the layers that are recomputed together.

A recomputed layer leaves less memory from F to B, and its B takes f longer: more
micro-batches in flight against more work. Of a chunk those layers come first that save
most memory, m_b - m_r, for their time f; of equal ones the first, whose backward runs
last, when the others have freed their memory.

1. Starts: `balance`, under a limit also with room for more micro-batches in flight, and
   even chunks; and of the best one recomputed layers that fall along the chunks.
2. A climb from each start: a layer moves to another chunk, or one more or less is
   recomputed, while plans with effort fast get shorter. A choice is planned only if its
   lower bound is not above the best step.
3. The best choice is planned with the effort that is wanted, and so are even chunks,
   and the balanced ones that recompute none and all: no plan is longer than these.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, reduce
from itertools import permutations, product
from typing import NamedTuple

from zbpp.core import (
    Costs,
    LayerCosts,
    LimitError,
    Pass,
    PassKind,
    Placement,
    Recompute,
    RequestError,
    Schedule,
    even_split,
    lower_bound_on,
    ranges_of,
)
from zbpp.planning.answer import Plan
from zbpp.planning.request import Recomputing, Split
from zbpp.schedules.planner.balance import Loads, balance, moved
from zbpp.schedules.planner.problem import (
    ROUNDING,
    Budget,
    check_limits,
    needs,
    parse_effort,
)

_PASSES = {"fast": 3e4, "default": 2e5, "best": math.inf}
_PLANS = {"fast": (2, 30), "default": (8, 60), "best": (0, math.inf)}
_SEARCH_SHARE = 0.4  # of the seconds of best; the others are for the plan at the end
_BOUND = 1 / 60  # of a plan's work: a lower bound
_AT_FIRST = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0)
_AT_LAST = (1.0, 0.75, 0.5, 0.25, 0.0, -0.5, -1.0, -2.0, -4.0, -8.0)


class Choice(NamedTuple):
    """Layers of each chunk, and layers of the whole model that are recomputed."""

    split: tuple[int, ...]
    recompute: frozenset[int]


class Trial(NamedTuple):
    """A choice, and its plan."""

    choice: Choice
    plan: Plan

    def or_better(self, rival: "Trial") -> "Trial":
        """The better of two choices; this one if they tie."""
        return rival if rival.plan.is_better_than(self.plan) else self


def plan_split(
    planner: Callable[[Costs, str], Schedule],
    layers: LayerCosts,
    placement: Placement,
    n_microbatches: int,
    *,
    mode: str,
    split: Split,
    recompute: Recomputing,
    effort: str,
) -> Plan:
    """Plan one placement with a split of the layers, and some of them recomputed.

    The planner of the mode plans for costs of chunks, with an effort. Seconds of
    ``best`` are shared by the search and the plan at the end.
    """
    if recompute == "auto":
        _check_auto(layers)
    every = range(layers.n_layers)
    words = {"auto": ((), every), "all": (every,), "none": ((),)}
    sets = words[recompute] if isinstance(recompute, str) else (recompute,)
    kind, seconds = parse_effort(effort)
    search = _Search(planner, layers, placement, n_microbatches, mode)
    starts = search.starts(list(map(frozenset, sets)), split)
    chosen = starts
    if split in (None, "balanced") or len(sets) > 1:
        budget = search.budget(kind, _SEARCH_SHARE * seconds, len(sets))
        best = search.climb(starts, split in (None, "balanced"), len(sets) > 1, budget)
        chosen = [best.choice, *starts] if best else starts
    if kind != "best":
        return search.finished(search.best(chosen, effort), effort)
    best = search.best(chosen, "default")
    last = search.best([best.choice], f"best:{(1 - _SEARCH_SHARE) * seconds:g}")
    return search.finished(best.or_better(last), "default")


def _check_auto(layers: LayerCosts) -> None:
    if layers.m_r is None:
        raise RequestError(
            "recompute auto needs m_r, the memory that F leaves of a recomputed part "
            "(usually its input); add it to the costs, or choose all or none"
        )
    if layers.memory_limit is None:
        raise RequestError(
            "recompute auto needs a memory limit: without one it is best to "
            "recompute nothing; give a memory_limit"
        )


class _Search:
    """Plans and bounds of choices; each is made once for an effort."""

    def __init__(
        self,
        planner: Callable[[Costs, str], Schedule],
        layers: LayerCosts,
        placement: Placement,
        n_microbatches: int,
        mode: str,
    ) -> None:
        self._planner = planner
        self._layers = layers
        self._placement = placement
        self._m, self._mode = n_microbatches, mode
        self._even = even_split(layers.n_layers, placement.n_chunks)
        self._error: LimitError | None = None
        self._tried: set[Choice] = set()
        self.plan = cache(self._plan)
        self.loads = cache(self._loads)

    def _loads(self, recompute: frozenset[int]) -> Loads:
        return Loads.of(self._layers, self._placement, self._m, recompute=recompute)

    def _load(self, choice: Choice) -> float:
        return self.loads(choice.recompute).largest(choice.split)

    def _on_chunks(self, choice: Choice) -> Costs:
        split, recompute = choice
        return self._layers.on(
            self._placement, split, n_microbatches=self._m, recompute=recompute
        )

    def _plan(self, choice: Choice, effort: str) -> Trial | None:
        """Plan; None if it does not fit the memory."""
        costs = self._on_chunks(choice)
        ideal = self.loads(choice.recompute).total / self._placement.n_stages
        try:
            schedule = self._planner(costs, effort)
            return Trial(choice, Plan(schedule, costs, self._mode, ideal_step=ideal))
        except LimitError as error:
            if self._error is None or error.smallest < self._error.smallest:
                self._error = error
            return None

    def best(self, choices: Iterable[Choice], effort: str) -> Trial:
        """Plan all, and return the best."""
        trials = [t for c in dict.fromkeys(choices) if (t := self.plan(c, effort))]
        if not trials:
            assert self._error is not None
            raise self._error
        return reduce(Trial.or_better, trials)

    def budget(self, kind: str, seconds: float, n_sets: int) -> Budget:
        """The plans that climbs may make, from each set and then from all together."""
        n_chunks = self._placement.n_chunks
        runs = 1 if n_chunks == self._placement.n_stages else 6
        n_passes = 3 * runs * n_chunks * self._m  # that a plan with effort fast places
        least, most = _PLANS[kind]
        n_plans = min(max(_PASSES[kind] / n_passes, least), most)
        return Budget((2 * n_sets - 1) * n_plans, seconds)

    def starts(self, sets: list[frozenset[int]], split: Split) -> list[Choice]:
        """Of each set that is recomputed the balanced split, and the even one.

        Under a memory limit also a split with room for what the mode uses without one.
        """
        if split not in (None, "balanced"):
            fixed = self._even if isinstance(split, str) else tuple(split or ())
            return [Choice(fixed, recompute) for recompute in sets]
        sizes = self._layers, self._placement, self._m
        starts, errors = [], []
        for recompute in sets:
            even = Choice(self._even, recompute)
            try:
                splits = [balance(*sizes, recompute=recompute).split]
            except LimitError as error:
                errors.append(error)
                continue
            if self._layers.memory_limit is not None:
                with suppress(LimitError):
                    room = self._in_flight(even)
                    roomy = balance(*sizes, recompute=recompute, in_flight=room)
                    splits.append(roomy.split)
            starts += [*(Choice(each, recompute) for each in splits), even]
        if not starts:
            raise min(errors, key=lambda error: error.smallest)
        return starts

    def _in_flight(self, choice: Choice) -> tuple[float, ...]:
        """Most micro-batches in flight on each chunk without a memory limit."""
        costs = replace(self._on_chunks(choice), memory_limit=None)
        most = [0.0] * self._placement.n_chunks
        for order in self._planner(costs, "fast").orders:
            n_open = [0.0] * len(most)
            for job in order:
                if isinstance(job, Pass) and job.kind is not PassKind.W:
                    n_open[job.chunk] += 1 if job.kind is PassKind.F else -1
                    most[job.chunk] = max(most[job.chunk], n_open[job.chunk])
        return tuple(most)

    def climb(
        self, starts: list[Choice], is_free: bool, is_auto: bool, budget: Budget
    ) -> Trial | None:
        """Climb from each start, the best one first; None: none fits.

        The split may change, and the recomputed layers if these are automatic.
        """
        tried = [self._quick(choice, budget) for choice in dict.fromkeys(starts)]
        trials = sorted(filter(None, tried), key=lambda trial: trial.plan.step)
        if is_auto:
            best = trials[0] if trials else None
            profiles = self._profiles(best.choice.split if best else starts[0].split)
            while (better := self._next(profiles, best, budget)) is not None:
                best = better
                trials.insert(0, best)
        unlimited = replace(self._layers, memory_limit=None)
        least = frozenset() if is_auto else starts[0].recompute
        sizes = unlimited, self._placement, self._m
        target = balance(*sizes, recompute=least).bound * (1 + ROUNDING)
        ends = []
        for trial in trials:
            end, better = trial, trial
            while better is not None and (end := better).plan.step > target:
                moves = self._moves(end, is_free, is_auto)
                better = self._next(moves, end, budget)
            ends.append(end)
        return reduce(Trial.or_better, ends) if ends else None

    def _quick(self, choice: Choice, budget: Budget) -> Trial | None:
        budget.spend(1)
        self._tried.add(choice)
        return self.plan(choice, "fast")

    def _next(
        self, choices: Iterable[Choice], best: Trial | None, budget: Budget
    ) -> Trial | None:
        """The first choice that is better, from the least load on; None: none is."""
        step = math.inf if best is None else best.plan.step * (1 + ROUNDING)
        for choice in sorted(choices, key=self._load):
            if not budget.is_left or self._load(choice) > step:
                break
            if choice in self._tried:
                continue
            budget.spend(_BOUND)
            if self._can_be_shorter(choice, step):
                trial = self._quick(choice, budget)
                if trial and (best is None or best.or_better(trial) is trial):
                    return trial
        return None

    def _can_be_shorter(self, choice: Choice, step: float) -> bool:
        """True if a micro-batch fits, and the lower bound is not above a step."""
        on_stages = self._on_chunks(choice).on(self._placement)
        try:
            check_limits("split", needs(on_stages), on_stages, self._m)
        except LimitError:
            return False
        return lower_bound_on(on_stages, self._m) <= step

    def _worthwhile(self, split: Sequence[int]) -> list[list[int]]:
        """Layers of each chunk that save memory, most for their time first."""
        m_b, m_r, f = (self._layers.of(name) for name in ("m_b", "m_r", "f"))

        def worth(layer: int) -> float:
            saved = m_b[layer] - m_r[layer]
            return saved / f[layer] if f[layer] > 0 else math.inf

        return [
            sorted(
                (i for i in chunk if m_b[i] > m_r[i]),
                key=lambda i: (-worth(i), i),
            )
            for chunk in ranges_of(split)
        ]

    def _profiles(self, split: tuple[int, ...]) -> list[Choice]:
        """Shares of recomputed layers that fall, or rise, along the chunks.

        Early chunks keep their micro-batches longest, so most profiles fall.
        """
        ranked, profiles = self._worthwhile(split), set()
        last = max(1, len(split) - 1)
        for at_first, at_last in product(_AT_FIRST, _AT_LAST):
            line = (at_first + (at_last - at_first) * c / last for c in range(last + 1))
            shares = [min(1.0, max(0.0, share)) for share in line]
            pairs = zip(ranked, shares, strict=False)
            profiles.add(tuple(round(len(chunk) * share) for chunk, share in pairs))
        order = sorted(profiles, key=lambda counts: (sum(counts), counts))
        return [_choice(split, ranked, counts) for counts in order]

    def _moves(self, best: Trial, is_free: bool, is_auto: bool) -> Iterator[Choice]:
        """Choices a move away: layers from the critical stage to the idle one first."""
        split, recompute = best.choice
        stage_of = self._placement.stage_of
        chunks = range(len(stage_of))
        if is_free:
            load, _ = self.loads(recompute).by_stage(split)
            steps = best.plan.steps
            givers = sorted(chunks, key=lambda c: (-steps[stage_of[c]], c))
            takers = sorted(chunks, key=lambda c: (load[stage_of[c]], c))
            for source, target in product(givers, takers):
                neighbour = moved(split, source, target)
                if neighbour is not None:
                    yield Choice(neighbour, recompute)
        if is_auto:
            ranked = self._worthwhile(split)
            counts = [len(recompute.intersection(chunk)) for chunk in ranked]
            changes = [{c: n} for c in chunks for n in (-1, 1)]
            changes += [{a: -1, b: 1} for a, b in permutations(chunks, 2)]
            for change in changes:
                after = [n + change.get(c, 0) for c, n in enumerate(counts)]
                pairs = zip(after, ranked, strict=True)
                if all(0 <= n <= len(chunk) for n, chunk in pairs):
                    yield _choice(split, ranked, after)

    def finished(self, best: Trial, effort: str) -> Plan:
        """The plan with its choice, compared with even chunks."""
        split, recompute = best.choice
        even = self.plan(Choice(self._even, recompute), effort)
        chunks = _by_chunk(split, recompute)
        return replace(
            best.plan,
            schedule=replace(best.plan.schedule, split=split, recompute=chunks),
            even_step=None if even is None else even.plan.step,
        )


def _choice(
    split: tuple[int, ...], ranked: Sequence[Sequence[int]], counts: Sequence[int]
) -> Choice:
    """The choice of so many layers of each chunk."""
    pairs = zip(ranked, counts, strict=True)
    return Choice(split, frozenset(layer for chunk, n in pairs for layer in chunk[:n]))


def _by_chunk(
    split: Sequence[int], recompute: Collection[int]
) -> tuple[Recompute, ...] | None:
    """Layers that are recomputed, as a `Schedule` has them; None: none."""
    if not recompute:
        return None
    chunks: list[Recompute] = []
    for chunk in ranges_of(split):
        numbers = tuple(i - chunk.start for i in chunk if i in recompute)
        is_part = 0 < len(numbers) < len(chunk)
        chunks.append(numbers if is_part else bool(numbers))
    return tuple(chunks)
