"""Do real steps take what the simulator predicts?

    python benchmarks/prediction.py emulated --stages 4 --microbatches 8 --job_ms 20
    python benchmarks/prediction.py real         # 2 processes that compute

``emulated``: the runtime on layers that sleep, so four stages run on two cores; a job
(F, B or W of one chunk) takes --job_ms. ``real``: layers are measured
(`zbpp.plan_model`), the mode is planned for their times, and its step is compared
with real steps.
"""

import argparse
import statistics
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from emulated import measure_steps
from parts import end_worker, show, spread, take_turns
from torch import Tensor, nn

import zbpp
from zbpp.core import Costs

MODES = ("1F1B", "ZBH1", "ZBH2", "ZBV", "VHalf")
WIDTH, SAMPLES, LAYERS = 512, 128, 8


class Block(nn.Module):
    """Norm, two Linears, a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Any shape of this width to the same."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def build(layers: range) -> list[nn.Module]:
    """The layers of a chunk, with the weights that they have in any chunk."""
    blocks = []
    for index in layers:
        torch.manual_seed(index)
        blocks.append(Block())
    return blocks


def emulated(args: argparse.Namespace) -> dict[str, float]:
    """One run of one mode, as one process of it."""
    schedule = zbpp.plan(
        args.worker, n_stages=args.stages, n_microbatches=args.microbatches
    )
    time_ms = args.job_ms * (schedule.placement.n_chunks // args.stages)
    costs = Costs(time_ms, time_ms, time_ms)
    found = measure_steps(schedule, costs, n_steps=args.steps)
    return {
        "predicted": found["simulated_step_ms"],
        "measured": found["step_ms"],
        "bubble predicted": found["simulated_bubble_rate"],
        "bubble": found["bubble_rate"],
    }


def real(args: argparse.Namespace) -> dict[str, float]:
    """Measure, plan and run one mode, as one process of it."""
    torch.manual_seed(0)  # all stages have the same batch
    batch = torch.randn(args.microbatches * SAMPLES, WIDTH)
    model = zbpp.layers_from(build, n_layers=LAYERS)
    settings = {
        "n_microbatches": args.microbatches,
        "loss_fn": nn.functional.mse_loss,
        "optimizer": partial(torch.optim.AdamW, fused=True),
        "device": "cpu",
        "step": zbpp.StepPolicy(post_validation=False),
    }
    plan = zbpp.plan_model(model, args.worker, example=(batch, batch), **settings)
    pipeline = zbpp.Pipeline(model, plan, **settings)
    for _ in range(2 + args.steps):  # the first ones do not count
        pipeline.step(batch, batch)
    found = zbpp.diagnostics.prediction(pipeline, plan.costs, n=args.steps)
    pipeline.close()
    return {
        "predicted": found.step_predicted,
        "measured": found.step_measured,
        "bubble predicted": found.bubble_predicted,
        "bubble": found.bubble_measured,
    }


def main() -> None:
    """Run all modes in turns and print a table; or be one process of a run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("emulated", "real"))
    parser.add_argument("--stages", type=int)
    parser.add_argument("--microbatches", type=int)
    parser.add_argument("--job_ms", type=float, default=20)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--modes", nargs="+", default=MODES)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.stages = args.stages or (4 if args.what == "emulated" else 2)
    args.microbatches = args.microbatches or 2 * args.stages
    if args.worker is not None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        found = (emulated if args.what == "emulated" else real)(args)
        end_worker(found, args.out)
    words = [args.what, "--stages", args.stages, "--microbatches", args.microbatches]
    words += ["--job_ms", args.job_ms, "--steps", args.steps]
    runs = take_turns(__file__, args.stages, args.modes, args.runs, *words)
    rows = []
    for mode, of_mode in runs.items():
        ratios = [one["measured"] / one["predicted"] for one in of_mode]
        predicted = statistics.median(one["predicted"] for one in of_mode)
        shares = [
            statistics.median(one[key] for one in of_mode)
            for key in ("bubble predicted", "bubble")
            if key in of_mode[0]
        ] or [None, None]
        rows.append((mode, predicted, spread(ratios), *shares))
    columns = ("mode", "predicted ms", "measured / predicted", "bubble predicted",
               "bubble measured")  # fmt: skip
    sizes = f"p {args.stages}, m {args.microbatches}, {args.runs} runs"
    show(f"{args.what}: {sizes}", columns, rows)


if __name__ == "__main__":
    main()
