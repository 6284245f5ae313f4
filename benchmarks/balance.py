"""Layers dealt evenly, balanced by their load, and planned together with the schedule.

    python benchmarks/balance.py simulated    # unequal layers, p 4 and 8, single and V
    python benchmarks/balance.py possible     # what any split can gain, and what is
    python benchmarks/balance.py llama        # 32 layers, the last with a heavy head
    python benchmarks/balance.py emulated     # the first table on layers that sleep

Each row plans three splits for one mode: even numbers of layers, the least largest load
(exact), and the split that is polished with the planner in the loop. `judge.py`, which
shares no code with zbpp, replays every plan.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from parts.options import read_options
from parts.runs import judged, run_zbpp
from parts.table import Table
from parts.turns import Runs, spread_of, take_turns
from parts.unequal_layers import TIMES, least_of_one_chunk, llama, unequal

from zbpp.core import LayerCosts, write_layers
from zbpp.planning import Plan, PlanRequest, make_plan
from zbpp.schedules import balance

MODES = {"single": "ZB", "V": "ZBV"}


def three(
    mode: str, layers: LayerCosts, n_stages: int, n_microbatches: int, effort: str
) -> Iterator[tuple[str, Plan, float]]:
    """Even, balanced and joint plans, and the seconds that each took."""
    request = PlanRequest(
        schedule=mode,
        n_stages=n_stages,
        n_microbatches=n_microbatches,
        costs=layers,
        effort=effort,
    )
    even = make_plan(replace(request, split="even"))
    yield "even", even, 0.0
    start = time.perf_counter()
    placement = even.schedule.placement
    split = balance(layers, placement, n_microbatches).split
    one = make_plan(replace(request, split=split))
    yield "balanced", one, time.perf_counter() - start
    start = time.perf_counter()
    joint = make_plan(request)
    yield "joint", joint, time.perf_counter() - start


def table_of(title: str, first: str) -> Table:
    """The columns of all simulated tables."""
    return Table(
        title,
        (first, "split of", "layers of each chunk", "step", "shorter", "idle",
         "seconds"),
    )  # fmt: skip


def add_rows(
    table: Table,
    name: str,
    mode: str,
    layers: LayerCosts,
    sizes: tuple[int, int],
    effort: str,
) -> None:
    """Three rows; idle is the share of the step beyond the mean work of a stage."""
    even_step = 0.0
    for kind, planned, seconds in three(mode, layers, *sizes, effort):
        even_step = even_step or planned.step
        span = judged(planned.schedule, planned.costs).span
        assert abs(span - planned.step) < 1e-6 * span, (span, planned.step)
        table.add(
            name if kind == "even" else "",
            kind,
            " ".join(map(str, planned.split)),
            f"{planned.step:.5g}",
            "" if kind == "even" else f"{1 - planned.step / even_step:.1%}",
            f"{1 - planned.ideal_step / planned.step:.3f}",
            "" if kind == "even" else f"{seconds:.2f}",
        )


@dataclass(frozen=True)
class Simulated:
    """Unequal layers: embedding .5, head 3, one layer in the middle 2."""

    effort: str = "default"
    more: bool = False
    """All places of the heavy layer, for several numbers of layers; only shares."""

    def run(self) -> None:
        """Print a table."""
        if self.more:
            self._all_places()
            return
        table = table_of("embedding .5, head 3, a layer of 2; m = 3p", "p, placement")
        for p in (4, 8):
            n_layers = 4 * p + 1
            layers = unequal(n_layers, n_layers // 2)
            for name, mode in MODES.items():
                row = f"{p}, {name}, {mode}"
                add_rows(table, row, mode, layers, (p, 3 * p), self.effort)
        table.show()

    def _all_places(self) -> None:
        table = Table(
            "joint, shorter than even, over all places of the layer",
            ("p", "layers", "placement", "least", "median", "most"),
        )
        for p in (4, 8):
            for n_layers in (2 * p + 1, 3 * p + 1, 4 * p, 4 * p + 1, 4 * p + 2):
                for name, mode in MODES.items():
                    gains = []
                    for heavy in range(1, n_layers - 1, 1 if p == 4 else 3):
                        found = make_plan(
                            PlanRequest(
                                schedule=mode,
                                n_stages=p,
                                n_microbatches=3 * p,
                                costs=unequal(n_layers, heavy),
                                effort="fast",
                            )
                        )
                        gains.append(found.gain or 0.0)
                    shares = (min(gains), statistics.median(gains), max(gains))
                    table.add(p, n_layers, name, *(f"{one:.1%}" for one in shares))
        table.show()


@dataclass(frozen=True)
class Possible:
    """Gain over even chunks by number of layers, and what no split can exceed.

    No step is below the least largest load of all splits, which `balance` proves.
    """

    effort: str = "default"

    def run(self) -> None:
        """Print a table."""
        table = Table(
            "heavy layer in the middle, m = 3p",
            ("p", "layers", "mode", "even", "joint", "least load", "shorter",
             "at most"),
        )  # fmt: skip
        for p in (4, 8):
            for n in (2 * p + 1, 3 * p + 1, 4 * p, 4 * p + 1, 4 * p + 2, 6 * p, 8 * p):
                for mode in MODES.values():
                    layers = unequal(n, n // 2)
                    found = make_plan(
                        PlanRequest(
                            schedule=mode,
                            n_stages=p,
                            n_microbatches=3 * p,
                            costs=layers,
                            effort=self.effort,
                        )
                    )
                    assert found.even_step is not None
                    least = balance(layers, found.schedule.placement, 3 * p)
                    assert least.is_proved
                    table.add(
                        p,
                        n,
                        mode,
                        f"{found.even_step:.5g}",
                        f"{found.step:.5g}",
                        f"{least.load:.5g}",
                        f"{1 - found.step / found.even_step:.1%}",
                        f"{1 - least.load / found.even_step:.1%}",
                    )
        table.show()


@dataclass(frozen=True)
class Llama:
    """Llama-8B-like: 32 equal layers, and a head worth 2.4 in the last one."""

    effort: str = "default"
    stages: int = 8
    microbatches: int = 24

    def run(self) -> None:
        """Print a table."""
        sizes = self.stages, self.microbatches
        table = table_of(f"p{sizes[0]} m{sizes[1]}, memory limit p M_B", "times, mode")
        for times in TIMES:
            for mode in MODES.values():
                layers = llama(times, self.stages)
                add_rows(table, f"{times}, {mode}", mode, layers, sizes, self.effort)
        table.show()
        for times in TIMES:
            layers = llama(times, self.stages)
            step = make_plan(
                PlanRequest(
                    schedule="ZB",
                    n_stages=sizes[0],
                    n_microbatches=sizes[1],
                    costs=layers,
                    effort="fast",
                )
            )
            assert step.ideal_step is not None
            least = least_of_one_chunk(layers, *sizes, below=step.step)
            print(
                f"{times}, ZB: no split has a step below {least:.5g}, "
                f"idle {1 - step.ideal_step / least:.4f}"
            )


@dataclass(frozen=True)
class Emulated:
    """Unequal layers that sleep, even and joint in turns; steps in a row."""

    stages: int = 4
    layer_ms: float = 10.0
    runs: int = 5
    steps: int = 6
    microbatches: int | None = None
    """None: 3p."""

    def run(self) -> None:
        """Measure and print a table."""
        p = self.stages
        n_layers = 4 * p + 1
        layers = unequal(n_layers, n_layers // 2, self.layer_ms)
        table = Table(
            f"p={p}, layers of {self.layer_ms:g} ms",
            ("placement", "split of", "simulated ms", "measured ms",
             "measured / simulated", "shorter than even"),
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            for name, mode in MODES.items():
                found = self._measure(mode, layers, Path(folder))
                for kind, runs in found.items():
                    cells = _cells(runs, found["even"], kind)
                    table.add(name if kind == "even" else "", kind, *cells)
        table.show()

    def _measure(self, mode: str, layers: LayerCosts, folder: Path) -> Runs:
        path = folder / "layers.json"
        write_layers(layers, path)
        m = self.microbatches or 3 * self.stages
        splits = {"even": "even", "joint": "balanced"}
        for kind, split in splits.items():
            run_zbpp(
                "plan", mode, "--layers", path, "--split", split, "--stages",
                self.stages, "--microbatches", m, "--out", folder / f"{kind}.json",
            )  # fmt: skip

        def measure(kind: str, metrics: Path) -> None:
            run_zbpp(
                "train", "--emulate", path, "--steps", self.steps,
                "--pipeline_schedule_mode", folder / f"{kind}.json",
                "--metrics", metrics, "--timeout_s", 300,
                "--enable_optimizer_post_validation",
            )  # fmt: skip

        return take_turns(splits, self.runs, measure)


def _cells(
    runs: list[dict[str, float]], even: list[dict[str, float]], kind: str
) -> Iterator[str]:
    ratios = [run["step_ms"] / run["simulated_step_ms"] for run in runs]
    step, step_of_even = (
        statistics.median(run["step_ms"] for run in one) for one in (runs, even)
    )
    yield f"{runs[0]['simulated_step_ms']:.0f}"
    yield f"{step:.0f}"
    yield spread_of(ratios)
    yield "" if kind == "even" else f"{1 - step / step_of_even:.1%}"


def main() -> None:
    """Run one of the tables."""
    read_options(Simulated, Possible, Llama, Emulated).run()


if __name__ == "__main__":
    main()
