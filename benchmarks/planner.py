"""Judge the planner for one chunk a stage: peers, proved optima, limits, speed.

    python benchmarks/planner.py [--effort fast|default] [--large] [peers optima ...]

Every plan is judged from its orders alone: `Schedule` checks the order and the memory,
`simulate` times it. The files in tests/data, one request a row:

    peers_public.json    p stages, m micro-batches, costs per whole stage (wfrac is
                         M_W / M_B), limit in M_B; "single": the smallest bubble of the
                         published generators with one chunk a stage under that limit,
                         or under a smaller one
    optimum_public.json  obj: the smallest largest-stage span, proved by a solver;
                         "single": one chunk a stage
    paper_tables.json    the bubbles that the paper prints for its own planner under p
                         (ZB-1p) and 2p (ZB-2p) M_B
"""

import argparse
import json
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zbpp.core import Costs, MemoryModel, Schedule, lower_bound
from zbpp.schedules import plan_zb
from zbpp.simulator import simulate, span

DATA = Path(__file__).parents[1] / "tests" / "data"
MODELS = {  # times in ms, M_W / M_B
    "unit": (Costs(), 0.5),
    "1.5B": (Costs(18.522, 18.086, 9.337, 0.601), 0.366412),
    "28.3B": (Costs(10.408, 10.204, 7.703, 0.408), 0.432432),
}


def rows(name: str) -> list[dict[str, Any]]:
    """Read the rows of a data file."""
    found: list[dict[str, Any]] = json.loads((DATA / name).read_text())["rows"]
    return found


def costs_of(row: dict[str, Any]) -> tuple[Costs, float]:
    """Read the costs of a row, and M_W / M_B."""
    c = row["costs"]
    times = (float(c[name]) for name in ("F", "B", "W", "comm"))
    return Costs(*times), c["wfrac"]


def judged(
    p: int, m: int, costs: Costs, memory: MemoryModel, effort: str
) -> tuple[float, float]:
    """Plan, and judge the orders alone: the largest span and its lower bound."""
    planned = plan_zb(
        n_stages=p, n_microbatches=m, costs=costs, memory=memory, effort=effort
    )
    again = Schedule("judged", planned.placement, m, planned.orders, memory)
    bound = lower_bound(planned.placement, m, costs, memory)
    return span(simulate(again, costs)), bound


def bubble(longest: float, costs: Costs, m: int) -> float:
    """Bubble rate of equal stages."""
    work = m * (float(costs.f) + float(costs.b) + float(costs.w))  # type: ignore[arg-type]
    return (longest - work) / longest


def peers(effort: str) -> None:
    """Compare with the best published generator in every row."""
    print("p  m   costs     limit   | peer    ours    bound   verdict")
    worse = 0
    for row in rows("peers_public.json"):
        if "single" not in row:
            continue
        (costs, share), p, m = costs_of(row), row["p"], row["m"]
        memory = MemoryModel(1.0, share, row["limit"])
        longest, bound = judged(p, m, costs, memory, effort)
        ours, least = bubble(longest, costs, m), bubble(bound, costs, m)
        peer = row["single"]["bubble"]
        # the peer's figure is rounded to five digits
        must_beat = (1 - least) / (1 - peer) > 1.01
        if ours > peer + 1e-5 or (must_beat and ours > peer - 1e-5):
            verdict, worse = "WORSE", worse + 1
        else:
            verdict = "better" if ours < peer - 1e-5 else "same"
        print(
            f"{p:<2} {m:<3} {row['costs']['name']:9} {row['limit']:<7g} | "
            f"{peer:.5f} {ours:.5f} {least:.5f} {verdict}"
        )
    print(f"peers: {worse} rows worse\n")


def optima(effort: str) -> None:
    """Compare with the proved optima."""
    gaps = []
    for row in rows("optimum_public.json"):
        if row["kind"] == "single":
            costs, share = costs_of(row)
            memory = MemoryModel(1.0, share, row["mem_limit"])
            longest, _ = judged(row["p"], row["m"], costs, memory, effort)
            gaps.append(longest / row["obj"] - 1)
    met = sum(gap < 1e-9 for gap in gaps)
    print(f"optima: {met} of {len(gaps)} met, worst {max(gaps):.2%} above\n")


def paper(effort: str) -> None:
    """Compare with the bubbles of the paper's planner."""
    for row in rows("paper_tables.json"):
        costs = Costs(row["tf"], row["tb"], row["tw"], row["tcomm"])
        p, m = row["p"], row["m"]
        line = f"{row['model']:6} p {p:<3} m {m:<4}"
        for name, limit in (("ZB-1p", p), ("ZB-2p", 2 * p)):
            memory = MemoryModel(1.0, row["m_w_over_m_b"], limit)
            ours = bubble(judged(p, m, costs, memory, effort)[0], costs, m)
            theirs = row["bubble"][name]
            verdict = "WORSE" if ours >= theirs + 5e-5 else "ok"
            line += f" {name} {theirs:.4f} ours {ours:.4f} {verdict:6}"
        print(line)
    print()


def limits(effort: str) -> None:
    """Raise the limit from 1 to 2.5 p by quarters: the bubble may never rise."""
    p, m = 8, 24
    for name in ("unit", "1.5B"):
        (costs, share), before, rises = MODELS[name], float("inf"), []
        for quarter in range(4, 10 * p + 1):
            memory = MemoryModel(1.0, share, quarter / 4)
            longest, bound = judged(p, m, costs, memory, effort)
            if longest > before * (1 + 1e-9):
                rises.append(quarter / 4)
            before = longest
            if quarter % 4 == 0 and quarter <= 8 * p:
                print(
                    f"{name:5} limit {quarter // 4:<3} bubble "
                    f"{bubble(longest, costs, m):.4f} gap {longest / bound - 1:.2%}"
                )
        print(f"limits, {name}: rises at {rises or 'none'}\n")


def unequal(effort: str) -> None:
    """Stages that differ: the gap to the lower bound."""
    for spread in (0.1, 0.3):
        for share_of_p in (0.5, 1.0, 1.5):
            gaps = []
            for seed in range(36):
                rng = random.Random(seed)
                costs, share = list(MODELS.values())[seed % 3]
                times = [
                    tuple(
                        float(time_) * rng.uniform(1 - spread, 1 + spread)  # type: ignore[arg-type]
                        for _ in range(8)
                    )
                    for time_ in (costs.f, costs.b, costs.w)
                ]
                memory = MemoryModel(1.0, share, 8 * share_of_p)
                longest, bound = judged(
                    8, 24, Costs(*times, costs.comm), memory, effort
                )
                gaps.append(longest / bound - 1)
            print(
                f"stages +-{spread:.0%}, limit {share_of_p:g} p: mean gap "
                f"{sum(gaps) / len(gaps):.2%}, worst {max(gaps):.2%}"
            )
    print()


def speed(effort: str, *, large: bool = False) -> None:
    """CPU seconds of a plan, its validation included."""
    costs, share = MODELS["28.3B"]
    sizes = [(8, 24), (32, 128), (64, 512), *([(1024, 4096)] if large else [])]
    for p, m in sizes:
        for part in (0.5, 1.0, 1.25, 2.0):
            memory = MemoryModel(1.0, share, part * p)
            start = time.process_time()
            plan_zb(
                n_stages=p, n_microbatches=m, costs=costs, memory=memory, effort=effort
            )
            seconds = time.process_time() - start
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            print(
                f"{p} x {m}, limit {part:g} p: {seconds:.3f} s CPU, "
                f"{seconds / (3 * p * m) * 1e6:.1f} us a pass; memory {peak:.2f} GiB"
            )


PARTS: dict[str, Callable[[str], None]] = {
    "peers": peers,
    "optima": optima,
    "paper": paper,
    "limits": limits,
    "unequal": unequal,
    "speed": speed,
}


def main() -> None:
    """Run the named parts, or all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--effort", default="default")
    parser.add_argument("--large", action="store_true", help="also time 1024 x 4096")
    chosen = parser.parse_args()
    for name in chosen.parts or PARTS:
        if name == "speed":
            speed(chosen.effort, large=chosen.large)
        else:
            PARTS[name](chosen.effort)


if __name__ == "__main__":
    main()
