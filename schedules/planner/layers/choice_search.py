"""Search for the choice of recomputed layers with the shortest planned step.

Lower bounds are cheap, and tell well where memory hurts: of several choices that with
the least bound is planned first, and none whose bound is not below the best step.
"""

from collections.abc import Iterable, Iterator

from zbpp.core import Placement
from zbpp.schedules.planner.budget import Budget
from zbpp.schedules.planner.layers.choices import Choices, Counts
from zbpp.schedules.planner.layers.trials import Trial

__all__ = ["ChoiceSearch", "profiles"]

_AT_FIRST = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0)
_AT_LAST = (1.0, 0.75, 0.5, 0.25, 0.0, -0.5, -1.0, -2.0, -4.0, -8.0)
_ROUNDING = 1e-9  # relative
_BOUND = 1 / 60  # of a plan's price: a lower bound


class ChoiceSearch:
    """Profiles first, then small changes of the best one.

    Args:
        choices: of one split.
        budget: in passes placed; see `Choices.price`.
        below: the step of a plan that there is; longer ones are of no use.
    """

    def __init__(self, choices: Choices, budget: Budget, *, below: float) -> None:
        self._choices = choices
        self._budget = budget
        self._below = below
        self._found: list[tuple[Trial, Counts]] = []

    def run(self) -> list[Counts]:
        """Choices that deserve the effort that is wanted, best first."""
        choices = self._choices
        self._try(profiles(choices.placement, choices.most), until_better=False)
        while self._found and self._budget.is_left:
            _, best = self._ranked()[0]
            if not self._try(self._neighbours(best), until_better=True):
                break
        return [counts for _, counts in self._ranked()]

    def _ranked(self) -> list[tuple[Trial, Counts]]:
        return sorted(
            self._found, key=lambda one: (one[0].step, one[0].barrier_step, sum(one[1]))
        )

    def _try(self, several: Iterable[Counts], *, until_better: bool) -> bool:
        """Plan from the least bound on; True if one is better than all before."""
        choices, is_better = self._choices, False
        for counts in self._by_bound(several):
            best = min([one.step for one, _ in self._found], default=self._below)
            if choices.bound(counts) >= best * (1 - _ROUNDING):
                break
            if not self._budget.is_left:
                break
            self._budget.spend(choices.price)
            trial = choices.of(counts)
            if trial is None:
                continue
            self._found.append((trial, counts))
            if trial.step < best * (1 - _ROUNDING):
                is_better = True
                if until_better:
                    break
        return is_better

    def _by_bound(self, several: Iterable[Counts]) -> list[Counts]:
        """Those that are not planned yet; of equal bounds the fewest layers first."""
        choices = self._choices
        few: list[Counts] = []
        for counts in several:
            if choices.is_done(counts):
                continue
            self._budget.spend(_BOUND * choices.price)
            if few and not self._budget.is_left:
                break
            few.append(counts)
        return sorted(few, key=lambda one: (choices.bound(one), sum(one)))

    def _neighbours(self, counts: Counts) -> Iterator[Counts]:
        """A layer more or less in a chunk, or moved to a chunk nearby."""
        most, stage_of = self._choices.most, self._choices.placement.stage_of
        chunks = range(len(counts))
        steps = sorted({1, max(1, max(most) // 4)})
        moves = [{c: sign * step} for step in steps for c in chunks for sign in (-1, 1)]
        moves += [
            {a: -1, b: 1}
            for a in chunks
            for b in chunks
            if a != b and (abs(a - b) == 1 or abs(stage_of[a] - stage_of[b]) <= 1)
        ]
        for move in moves:
            changed = tuple(n + move.get(c, 0) for c, n in enumerate(counts))
            if all(0 <= n <= top for n, top in zip(changed, most, strict=True)):
                yield changed


def profiles(placement: Placement, most: Counts) -> Iterator[Counts]:
    """Choices that fall, or rise, along the model or along the stages.

    Early chunks hold their micro-batches longest. With shares y of a chunk's layers::

        1 |------.                  from y of the first to y of the last chunk,
          |       `-.               cut at 0 and 1
        0 |__________`-.____
           first       last chunk
    """
    n_chunks = len(most)
    ways = [[c / max(1, n_chunks - 1) for c in range(n_chunks)]]
    if n_chunks > placement.n_stages:
        last = max(1, placement.n_stages - 1)
        ways.append([stage / last for stage in placement.stage_of])
    seen = set()
    for way in ways:
        for first in _AT_FIRST:
            for end in _AT_LAST:
                shares = [first + (end - first) * at for at in way]
                counts = tuple(
                    round(n * min(1.0, max(0.0, share)))
                    for n, share in zip(most, shares, strict=True)
                )
                if counts not in seen:
                    seen.add(counts)
                    yield counts
    for k in range(n_chunks + 1):
        yield tuple(n if c < k else 0 for c, n in enumerate(most))
