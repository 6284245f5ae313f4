"""Move single passes of a plan for a line, as those of any placement are moved."""

from zbpp.schedules.planner.budget import Budget, parse_effort
from zbpp.schedules.planner.draws import Draws
from zbpp.schedules.planner.multi.compiled import improve, retime
from zbpp.schedules.planner.multi.moves import few_moves, moves_of
from zbpp.schedules.planner.multi.problem import PlacementProblem, Plan
from zbpp.schedules.planner.single.problem import Kinds

__all__ = ["move_passes"]

_HEAT = 0.03
_TURNS = 10  # each with other moves; 2 where moves take long
_FEW = 3000


def move_passes(problem: PlacementProblem, kinds: Kinds, effort: str) -> Kinds:
    """Improve a plan on its critical path: see `multi.critical_path`."""
    n = problem.n_stages
    names = [(s, 2 * n - 1 - s, 3 * n - 1 - s) for s in range(n)]
    rows = [[own[kind] for kind in row] for own, row in zip(names, kinds, strict=True)]
    plan = retime(problem, Plan(0.0, rows))
    n_passes = float(sum(map(len, rows)))
    is_fast = parse_effort(effort)[0] == "fast"
    moves = few_moves(n_passes) if is_fast else moves_of(n_passes)
    turns = 1 if is_fast else _TURNS if n_passes < _FEW else 2
    for turn in range(turns):
        plan = improve(problem, plan, Budget(moves), Draws(turn), _HEAT)
    return [bytearray(q // n for q in row) for row in plan.rows]
