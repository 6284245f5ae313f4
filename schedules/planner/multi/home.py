"""A stage whose limit holds little more than one micro-batch: look at each pass.

F | W W | B W B W B W | F B W B W     one more F, the W's that are pending, then
          first         second        one micro-batch after the other
"""

from collections.abc import Sequence

from zbpp.schedules.planner.multi.problem import PlacementProblem

__all__ = ["comes_home"]


def comes_home(
    problem: PlacementProblem,
    forward: int,
    held: float,
    done: Sequence[int],
    weights: Sequence[int],
) -> bool:
    """True if all in flight on a stage can be finished in turn after one more F.

    Args:
        problem: numbers, memories and limits.
        forward: number of that F; its peak must fit too.
        held: memory of the stage before it.
        done: passes done of each number.
        weights: numbers of the W's that are pending; they go first.
    """
    stage, n_chunks = problem.stage[forward], problem.n_chunks
    mine, peak, change = problem.numbers[stage], problem.peak, problem.change
    row = [forward, *weights]
    for i in range(done[mine[-1]], done[mine[0]] + (forward == mine[0])):
        for q in mine:
            if done[q] + (q == forward) <= i:
                row.append(q)
                if q >= n_chunks and stage not in problem.joint:
                    row.append(q + n_chunks)
    for q in row:
        if held + peak[q] > problem.limits[stage]:
            return False
        held += change[q]
    return True
