"""Improve any plan by moving single F's and B's; the W's are placed anew each time.

A step changes how late the W's of a stage may be, or moves one F or B by up to three
places within its stage, or swaps two neighbours there and, as the steady state
repeats, the same two at their next 1, 3, 7 or all later meetings. Every result that is
valid and not worse is taken.
"""

from random import Random

from zbpp.schedules.wave_fixed import place_weights, retime, without_weights
from zbpp.schedules.wave_problem import Plan, Rows, WaveProblem

__all__ = ["polish"]

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def polish(
    problem: WaveProblem, plan: Plan, n_steps: int, target: float, rng: Random
) -> Plan:
    """Climb from a plan; stop at the target span."""
    rows = without_weights(problem, plan.rows)
    late: list[float] = []
    best = plan
    current = float("inf")
    for share in SHARES:
        result = place_weights(problem, rows, [share] * problem.n_stages, current)
        if result is not None and result.span < current:
            current, late = result.span, [share] * problem.n_stages
    if not late:
        return plan
    for _ in range(n_steps):
        if best.span <= target:
            break
        trial, trial_late = _changed(problem, rows, late, rng)
        result = place_weights(problem, trial, trial_late, current * (1 + 1e-12))
        if result is None or result.span > current * (1 + 1e-12):
            continue
        rows, late, current = trial, trial_late, result.span
        if current < best.span:
            best = retime(problem, result.rows, best.span) or best
    return best


def _changed(
    problem: WaveProblem, rows: Rows, late: list[float], rng: Random
) -> tuple[Rows, list[float]]:
    stage = rng.randrange(problem.n_stages)
    if rng.random() < 0.15:
        late = late.copy()
        late[stage] = rng.choice(SHARES)
        return rows, late
    row = rows[stage].copy()
    at = rng.randrange(len(row) - 1)
    if rng.random() < 0.5:
        to = at + rng.choice((-3, -2, -1, 1, 2, 3))
        row.insert(max(0, to), row.pop(at))
    else:
        _swap_again(row, at, rng.choice((1, 2, 4, 8, len(row))))
    return [row if s == stage else old for s, old in enumerate(rows)], late


def _swap_again(row: list[int], at: int, times: int) -> None:
    pair = row[at : at + 2]
    while times > 0 and at < len(row) - 1:
        if row[at : at + 2] == pair:
            row[at : at + 2] = reversed(pair)
            times -= 1
            at += 1
        at += 1
