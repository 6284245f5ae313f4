"""Judge the planner: peers, proved optima, the paper, limits, random cases, speed.

    python benchmarks/planner/public.py [--effort fast] [--mode ZB ...] [peers ...]

Every plan is written as a schedule file and judged by `judge.py`, which shares no code
with zbpp. The files in tests/data, one request a row:

    peers_public.json    p stages, m micro-batches, costs per whole stage (wfrac is
                         M_W / M_B), limit in M_B; the smallest bubble of the published
                         generators with one chunk a stage ("single"), with two ("v")
    optimum_public.json  obj: the smallest largest-stage span, proved by a solver
    paper_tables.json    the bubbles that the paper prints for its planners

Random cases and timings are in `planner/random_cases.py`.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))

from judge import judge

from zbpp.core import Costs, Schedule, lower_bound, read_costs, schedule_text
from zbpp.planning import plan

DATA = Path(__file__).parents[2] / "tests" / "data"
KINDS = {"ZB": "single", "ZBV": "v"}
MODELS = {  # times in ms, M_W / M_B
    "unit": ({"f": 1.0, "b": 1.0, "w": 1.0, "comm": 0.0}, 0.5),
    "1.5B": ({"f": 18.522, "b": 18.086, "w": 9.337, "comm": 0.601}, 0.366412),
    "28.3B": ({"f": 10.408, "b": 10.204, "w": 7.703, "comm": 0.408}, 0.432432),
}
Case = dict[str, Any]
"""A costs file, with its memory and limit."""


def rows(name: str) -> list[dict[str, Any]]:
    """Read the rows of a data file."""
    found: list[dict[str, Any]] = json.loads((DATA / name).read_text())["rows"]
    return found


def case_of(row: dict[str, Any], limit: float) -> Case:
    """Make a costs file of a row."""
    c = row["costs"]
    times = {"f": c["F"], "b": c["B"], "w": c["W"], "comm": c["comm"]}
    return {**times, "m_b": 1.0, "m_w": c["wfrac"], "memory_limit": limit}


def costs_of(case: Case) -> Costs:
    """Read a costs file."""
    return read_costs(case)


def planned(mode: str, p: int, m: int, case: Case, effort: str) -> Schedule:
    """Plan a case."""
    return plan(mode, n_stages=p, n_microbatches=m, costs=costs_of(case), effort=effort)


def judged(mode: str, p: int, m: int, case: Case, effort: str) -> tuple[float, float]:
    """Plan, and judge the file alone: the bubble rate and its lower bound."""
    schedule = planned(mode, p, m, case, effort)
    verdict = judge(json.loads(schedule_text(schedule)), case)
    bound = lower_bound(schedule.placement, m, costs_of(case))
    return verdict.bubble, 1 - max(verdict.work) / bound


def gap(bubble: float, least: float) -> float:
    """Gap of a span to its bound, from the bubble rates of both."""
    return (1 - least) / (1 - bubble) - 1


def peers(mode: str, effort: str) -> None:
    """Compare with the best published generator in every row."""
    count = {"better": 0, "same": 0, "not better": 0, "WORSE": 0}
    for row in rows("peers_public.json"):
        kinds = [kind for kind in KINDS.values() if kind in row]
        if mode in KINDS:
            kinds = [kind for kind in kinds if kind == KINDS[mode]]
        if not kinds:
            continue
        peer = min(row[kind]["bubble"] for kind in kinds)
        case = case_of(row, row["limit"])
        ours, least = judged(mode, row["p"], row["m"], case, effort)
        verdict = "better" if ours < peer - 1e-5 else "same"  # five digits are given
        if ours > peer + 1e-5:
            verdict = "WORSE"
        elif verdict == "same" and gap(peer, least) > 0.01:
            verdict = "not better"  # the peer is over 1 % above the bound
        count[verdict] += 1
        print(
            f"{mode} p {row['p']:<2} m {row['m']:<3} {row['costs']['name']:9} limit "
            f"{row['limit']:<7g} peer {peer:.5f} ours {ours:.5f} bound {least:.5f} "
            f"{verdict}"
        )
    print(f"peers, {mode}: {count}\n")


def optima(mode: str, effort: str) -> None:
    """Compare with the proved optima."""
    gaps = []
    for row in rows("optimum_public.json"):
        if row["kind"] == KINDS.get(mode):
            case = case_of(row, row["mem_limit"])
            bubble, _ = judged(mode, row["p"], row["m"], case, effort)
            # the V's are in units of a chunk's pass, half of a stage's
            unit = 1.0 if mode == "ZB" else 2.0
            work = row["m"] * (case["f"] + case["b"] + case["w"])
            gaps.append(unit * work / (1 - bubble) / row["obj"] - 1)
    if gaps:
        met = sum(abs(one) < 1e-9 for one in gaps)
        print(
            f"optima, {mode}: {met} of {len(gaps)} met, worst {max(gaps):.2%} above\n"
        )


def paper(mode: str, effort: str) -> None:
    """Compare with the bubbles that the paper prints."""
    columns = {"ZB": (("ZB-1p", 1), ("ZB-2p", 2)), "ZBV": (("ZB-V", 1), ("ZB-V", 1.5))}
    for row in rows("paper_tables.json"):
        p, m = row["p"], row["m"]
        times = {"f": row["tf"], "b": row["tb"], "w": row["tw"], "comm": row["tcomm"]}
        line = f"{mode} {row['model']:6} p {p:<3} m {m:<4}"
        for name, part in columns.get(mode, ()):
            memory = {"m_b": 1.0, "m_w": row["m_w_over_m_b"], "memory_limit": part * p}
            bubble, least = judged(mode, p, m, {**times, **memory}, effort)
            theirs = row["bubble"].get(name) if part != 1.5 else None
            line += f" | {name} at {part:g} p: {bubble:.4f} (bound {least:.4f}"
            line += f", paper {theirs:.4f})" if theirs is not None else ")"
        print(line)
    print()


def limits(mode: str, effort: str) -> None:
    """Raise the limit from 1 to 2.5 p by quarters: the bubble may never rise."""
    p, m = 8, 24
    for name in ("unit", "1.5B"):
        (times, share), before, rises = MODELS[name], 1.0, []
        for quarter in range(4, 10 * p + 1):
            limit = quarter / 4
            case = {**times, "m_b": 1.0, "m_w": share, "memory_limit": limit}
            bubble, least = judged(mode, p, m, case, effort)
            if bubble > before + 1e-9:
                rises.append((limit, round(bubble - before, 5)))
            before = bubble
            if quarter % 4 == 0 and limit <= 2 * p:
                share_above = gap(bubble, least)
                print(
                    f"{mode} {name:5} limit {limit:<4g} bubble {bubble:.4f} "
                    f"bound {least:.4f} gap {share_above:.2%}"
                )
        print(f"limits, {mode} {name}: rises at {rises or 'none'}\n")


def unequal_cases(spread: float, limit: float) -> Iterator[Case]:
    """Eight stages whose times differ by a share."""
    for seed in range(36):
        rng = random.Random(seed)
        times, share = list(MODELS.values())[seed % 3]
        varied = {
            key: [times[key] * rng.uniform(1 - spread, 1 + spread) for _ in range(8)]
            for key in ("f", "b", "w")
        }
        memory = {"m_b": 1.0, "m_w": share, "memory_limit": limit}
        yield {**varied, "comm": times["comm"], **memory}


def unequal(mode: str, effort: str) -> None:
    """Stages that differ: the gap to the lower bound."""
    if mode != "ZB":
        return
    for spread in (0.1, 0.3):
        for part in (0.5, 1.0, 1.5):
            found = [
                judged(mode, 8, 24, case, effort)
                for case in unequal_cases(spread, 8 * part)
            ]
            gaps = [gap(*one) for one in found]
            print(
                f"{mode} stages +-{spread:.0%}, limit {part:g} p: mean gap "
                f"{sum(gaps) / len(gaps):.2%}, worst {max(gaps):.2%}"
            )
    print()


PARTS: dict[str, Callable[[str, str], None]] = {
    "peers": peers,
    "optima": optima,
    "paper": paper,
    "limits": limits,
    "unequal": unequal,
}


def main() -> None:
    """Run the named parts, or all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--effort", default="default")
    parser.add_argument("--mode", nargs="*", default=["ZB", "ZBV"])
    chosen = parser.parse_args()
    for name in chosen.parts or PARTS:
        for mode in chosen.mode:
            PARTS[name](mode, chosen.effort)


if __name__ == "__main__":
    main()
