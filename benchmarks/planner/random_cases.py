"""Plan random pipelines and judge each plan; compare two versions; time the planner.

    python benchmarks/planner/random_cases.py random [--cases 3000] [--effort fast]
    python benchmarks/planner/random_cases.py speed [--mode ZB ...] [--large]
    PYTHONPATH=../other/src python benchmarks/planner/random_cases.py plans --out x.json
    python benchmarks/planner/random_cases.py plans --before x.json   # 60 plans each

A random case has 1 to 12 stages whose times differ by up to 30 %, 1 to 40
micro-batches, a limit per stage from one micro-batch to 2.5 p, a delay per link, a loss
time, and stages that cannot split their backward. `judge.py` checks order and memory.
"""

import argparse
import json
import random
import resource
import statistics
import time
from collections import defaultdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from public import MODELS, Case, gap, judge, judged, planned

from zbpp.core import schedule_text


def random_case(rng: random.Random, p: int) -> Case:
    """Draw a costs file for p stages with one or two chunks each (numbers or lists)."""
    times, share = rng.choice(list(MODELS.values()))

    def varied(value: float, n: int) -> list[float]:
        return [value * rng.uniform(0.7, 1.3) for _ in range(n)]

    chunks = rng.choice((1, 2))
    work = {key: varied(times[key] / chunks, p * chunks) for key in ("f", "b", "w")}
    part = rng.choice((1.0 / p, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5))
    limits = [max(1.0, part * p * rng.uniform(0.8, 1.2)) for _ in range(p)]
    links = [times["f"] * rng.choice((0.0, 0.03, 0.3, 2.0)) for _ in range(p - 1)]
    return {
        **work,
        # A V passes each link twice, and none where it turns.
        "comm": (links if chunks == 1 else [*links, 0.0, *links[::-1]]) or 0.0,
        "loss": times["f"] * rng.choice((0.0, 0.2, 0.5)),
        "splits": [rng.random() < 0.85 for _ in range(p)],
        "m_b": 1.0,
        "m_w": share,
        "memory_limit": limits if rng.random() < 0.5 else limits[0],
    }


def random_cases(n_cases: int, effort: str, seed: int) -> None:
    """Plan and judge; print the gaps by mode and by memory."""
    rng = random.Random(seed)
    gaps = defaultdict(list)
    for _ in range(n_cases):
        p, m = rng.randint(1, 12), rng.randint(1, 40)
        case = random_case(rng, p)
        single = len(case["f"]) == p
        mode = "ZB" if single else rng.choice(("ZBV", "auto"))
        bubble, least = judged(mode, p, m, case, effort)
        limit = case["memory_limit"]
        least_limit = min(limit) if isinstance(limit, list) else limit
        memory = "below p" if least_limit < p else "p and more"
        gaps[mode, memory].append(gap(bubble, least))
        gaps[mode, "all"].append(gap(bubble, least))
    for (mode, memory), found in sorted(gaps.items()):
        print(
            f"{mode:4} memory {memory:10} {len(found):5} cases: mean gap "
            f"{statistics.mean(found):.2%}, median {statistics.median(found):.2%}, "
            f"worst {max(found):.2%}"
        )


def plans(n_cases: int, effort: str, seed: int, out: Path | None) -> dict[str, Any]:
    """Plan; the judged spans by case, each with a hash of its file."""
    rng, found = random.Random(seed), {}
    for number in range(n_cases):
        p, m = rng.randint(1, 12), rng.randint(1, 40)
        case = random_case(rng, p)
        mode = "ZB" if len(case["f"]) == p else rng.choice(("ZBV", "auto"))
        text = schedule_text(planned(mode, p, m, case, effort))
        span = judge(json.loads(text), case).span
        found[f"{number} {mode} {p}x{m}"] = [span, sha256(text.encode()).hexdigest()]
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")
    return found


def compare(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Print the plans that differ, and how much longer they are in the mean."""
    ratios = [after[case][0] / span for case, (span, _) in before.items()]
    for (case, old), ratio in zip(before.items(), ratios, strict=True):
        if old != after[case]:
            print(f"{case}: span {old[0]:g} -> {after[case][0]:g}, {ratio - 1:+.2%}")
    same = sum(old == after[case] for case, old in before.items())
    print(
        f"{same} of {len(before)} plans are equal; spans "
        f"{statistics.mean(ratios) - 1:+.3%} in the mean, worst {max(ratios) - 1:+.2%}"
    )


def speed(mode: str, effort: str, *, large: bool) -> None:
    """CPU seconds of a plan, its validation included."""
    times, share = MODELS["28.3B"]
    sizes = [(8, 24), (32, 128), (64, 512)] + [(1024, 4096)] * large
    for p, m in sizes:
        for part in (0.5, 1.0, 1.25, 2.0):
            case = {**times, "m_b": 1.0, "m_w": share, "memory_limit": part * p}
            start = time.process_time()
            planned(mode, p, m, case, effort)
            seconds = time.process_time() - start
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            n_passes = 3 * p * m * (1 if mode == "ZB" else 2)
            print(
                f"{mode} {effort} {p} x {m}, limit {part:g} p: {seconds:.3f} s CPU, "
                f"{seconds / n_passes * 1e6:.1f} us a pass; memory {peak:.2f} GiB",
                flush=True,
            )


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=["random", "plans", "speed"])
    parser.add_argument("--effort", default="fast")
    parser.add_argument("--cases", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", nargs="*", default=["ZB", "ZBV"])
    parser.add_argument("--large", action="store_true", help="also time 1024 x 4096")
    parser.add_argument("--out", type=Path, help="of plans: spans and hashes")
    parser.add_argument("--before", type=Path, help="of plans: those of an --out")
    chosen = parser.parse_args()
    if chosen.part == "random":
        random_cases(chosen.cases or 3000, chosen.effort, chosen.seed)
        return
    if chosen.part == "plans":
        found = plans(chosen.cases or 60, chosen.effort, chosen.seed, chosen.out)
        if chosen.before is not None:
            compare(json.loads(chosen.before.read_text()), found)
        return
    for mode in chosen.mode:
        speed(mode, chosen.effort, large=chosen.large)


if __name__ == "__main__":
    main()
