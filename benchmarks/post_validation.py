"""The cost of the optimizer's barrier: steps behind it against post-validated ones.

python benchmarks/post_validation.py emulated     # runs on layers that sleep
python benchmarks/post_validation.py published    # simulated with the paper's times
python benchmarks/post_validation.py rollbacks    # simulated with a real O and V
"""

import argparse
import json
import statistics
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch.distributed as dist
from emulated import measure_steps
from parts import end_worker, show, spread, take_turns

import zbpp
from zbpp.core import Costs
from zbpp.schedules import post_validated
from zbpp.simulator import simulate, span, steady_step_time

TABLES = Path(__file__).parents[1] / "tests" / "data" / "paper_tables.json"
MODES = ("1F1B", "ZBH1", "ZBH2", "ZBV")
PUBLISHED = {
    "1.5B": (14.5, 13.11),
    "6.2B": (4.32, 4.00),
    "14.6B": (1.81, 1.68),
    "28.3B": (0.99, 0.91),
}
"""arXiv 2401.10241: samples per GPU and second under ZB-2p, post-validated and behind
an all-reduce."""
PLAIN, SPECULATIVE, VALIDATION = 1.0, 1.6, 1.1
"""Times of a plain O, of one that can be undone, and of V, in plain ones: fused AdamW
on a CPU, measured at 88fdac3b."""


def work(args: argparse.Namespace) -> None:
    """Be one process of a run: jobs and O of --job_ms, messages a twentieth of it."""
    dist.init_process_group("gloo")
    mode, how = args.worker.split("-")
    schedule = zbpp.plan(mode, n_stages=args.stages, n_microbatches=2 * args.stages)
    each = args.job_ms * (schedule.placement.n_chunks // args.stages)
    costs = Costs(each, each, each, comm=args.job_ms / 20, optimizer=args.job_ms)
    found = measure_steps(
        schedule, costs, n_steps=args.steps, post_validation=how == "validated"
    )
    end_worker(found, args.out)


def emulated(args: argparse.Namespace) -> None:
    """Measured step times against each other and against the simulator."""
    names = [f"{mode}-{how}" for mode in MODES for how in ("barrier", "validated")]
    words = ("emulated", "--stages", args.stages, "--job_ms", args.job_ms)
    runs = take_turns(
        __file__, args.stages, names, args.runs, *words, "--steps", args.steps
    )
    rows = []
    for mode in MODES:
        cells, measured, simulated = [], [], []
        for how in ("barrier", "validated"):
            of_mode = runs[f"{mode}-{how}"]
            simulated.append(of_mode[0]["simulated_step_ms"])
            measured.append(statistics.median(run["step_ms"] for run in of_mode))
            ratios = [run["step_ms"] / simulated[-1] for run in of_mode]
            cells += [f"{measured[-1]:.0f}", spread(ratios)]
        gains = (f"{one[0] / one[1] - 1:+.1%}" for one in (measured, simulated))
        rows.append((mode, *cells, *gains))
    columns = ("mode", "barrier ms", "measured / simulated", "post-validated ms",
               "measured / simulated", "faster", "simulated")  # fmt: skip
    show(f"p {args.stages}, m 2p, {args.runs} runs", columns, rows)


def published(args: argparse.Namespace) -> None:
    """The paper's models, simulated with its times."""
    rows = []
    for row in json.loads(TABLES.read_text(encoding="utf-8"))["rows"]:
        costs = Costs(
            row["tf"], row["tb"], row["tw"], row["tcomm"], m_w=row["m_w_over_m_b"]
        )
        schedule = zbpp.plan(
            "ZBH2", n_stages=row["p"], n_microbatches=row["m"], costs=costs
        )
        barrier = steady_step_time(schedule, costs)
        validated = steady_step_time(post_validated(schedule), costs)
        fast, slow = PUBLISHED[row["model"]]
        rows.append((
            row["model"], row["p"], row["m"], f"{span(simulate(schedule, costs)):.0f}",
            f"{validated:.0f}", f"{barrier:.0f}", f"{barrier / validated - 1:+.1%}",
            f"{fast / slow - 1:+.1%}" if row["m"] == 3 * row["p"] else "",
        ))  # fmt: skip
    columns = ("model", "p", "m", "span ms", "V ms", "barrier ms", "simulated",
               "published")  # fmt: skip
    show("ZB-2p, times of arXiv 2401.10241", columns, rows)


def rollbacks(args: argparse.Namespace) -> None:
    """Gain with an O and a V that cost nothing, and with real ones; m = 3p."""
    rows = []
    for share, p, mode in product((1, 0.2), (4, 8), (*MODES, "VHalf", "VMin")):
        barrier = Costs(comm=0.1, optimizer=share * PLAIN)
        schedule = zbpp.plan(mode, n_stages=p, n_microbatches=3 * p, costs=barrier)
        step = steady_step_time(schedule, barrier)
        real = replace(
            barrier, optimizer=SPECULATIVE * share, validation=VALIDATION * share
        )
        gains = (
            step / steady_step_time(post_validated(schedule), costs) - 1
            for costs in (barrier, real)
        )
        rows.append((mode, p, f"{share:g}", *(f"{gain:+.1%}" for gain in gains)))
    columns = ("mode", "p", "optimizer / pass", "free", "with rollback")
    show("gain over the barrier, simulated", columns, rows)


def main() -> None:
    """Print one table; or be one process of a run."""
    parts = {part.__name__: part for part in (emulated, published, rollbacks)}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=parts)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--job_ms", type=float, default=20)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        work(args)
    else:
        parts[args.part](args)


if __name__ == "__main__":
    main()
