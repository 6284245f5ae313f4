"""Plans of layers that exchange data, beside DualPipeV, combined 1F1B, VPP and 1F1B.

    python benchmarks/planner/lanes.py 4x8 8x16 16x32

A row for each share of exchange in F and B, and each memory limit (in p M_B): the
longest span of a stage over its ideal, the work of its busiest lane. Ours is the best
of V and interleaved with 2 chunks a stage, and with 4. Peers have 2 chunks; pairs of
combined 1F1B and DualPipeV are laid out by `lay_out`, and their jobs wait for no other
lane than their own. Peers are given where they fit, or need half an M_B more.
"""

import sys
import time

from zbpp.core import Costs, Lane, Parts, Placement, lower_bound
from zbpp.schedules import (
    lay_out,
    plan_combined_1f1b,
    plan_dual_pipe_v,
    plan_one_f_one_b,
    plan_placement,
    plan_vpp,
)
from zbpp.simulator import peak_memory, simulate, span

LAYERS = 4  # of a stage


def moe_costs(share: float, limit: float) -> Costs:
    """F = B = W = 1 a stage, and exchanges that take a share of F and of B."""
    half, exchange = 0.5 / LAYERS, 0.5 * share / (1 - share) / LAYERS
    compute, network = (Lane.COMPUTE, half), (Lane.NETWORK, exchange)
    f = (compute, network, compute, network)
    b = (network, compute, network, compute)
    return Costs(parts=Parts(f, b, (compute, compute), LAYERS), memory_limit=limit)


def ours(p: int, m: int, chunks: int, costs: Costs) -> tuple[float, float]:
    """Span of the best placement of so many chunks, and the seconds it took."""
    begun = time.process_time()
    placements = Placement.wave(p, chunks), Placement.interleaved(p, chunks)
    plans = [
        plan_placement(placement=one, n_microbatches=m, costs=costs)
        for one in placements
    ]
    best = min(span(simulate(plan, costs)) for plan in plans)
    return best, time.process_time() - begun


def peers(p: int, m: int, costs: Costs) -> dict[str, float]:
    """Spans of the peers that fit, with their free overlap; a half M_B is allowed."""
    sizes = {"n_stages": p, "n_microbatches": m}
    free = Costs(parts=costs.parts)
    schedules = {
        "1F1B": plan_one_f_one_b(**sizes),
        "VPP": plan_vpp(**sizes),
        "combined": lay_out(plan_combined_1f1b(**sizes), free),
        "DualPipeV": lay_out(plan_dual_pipe_v(**sizes), free),
    }
    found = {}
    for name, schedule in schedules.items():
        timeline = simulate(schedule, free)
        if max(peak_memory(timeline, free)) <= float(str(costs.limit)) + 0.5:
            found[name] = span(timeline)
    return found


def main(sizes: list[str]) -> None:
    """Print the table."""
    print("p, m, share, limit/p: 2 chunks, 4 chunks (CPU s), bound; peers")
    for size in sizes:
        p, m = map(int, size.split("x"))
        for share in (0.2, 0.4, 0.6):
            ideal = m * max(3.0, 2 * share / (1 - share))
            for factor in (1.0, 1.5, 2.0):
                costs = moe_costs(share, factor * p)
                two, of_two = ours(p, m, 2, costs)
                four, of_four = ours(p, m, 4, costs)
                bound = lower_bound(Placement.wave(p), m, costs)
                others = ", ".join(
                    f"{name} {one / ideal:.3f}"
                    for name, one in peers(p, m, costs).items()
                )
                print(
                    f"{p}, {m}, {share}, {factor}: {two / ideal:.3f}, "
                    f"{four / ideal:.3f} ({of_two:.1f}, {of_four:.1f}), "
                    f"{bound / ideal:.3f}; {others}",
                    flush=True,
                )


if __name__ == "__main__":
    main(sys.argv[1:] or ["4x8", "8x16"])
