"""Recompute as a choice: step and memory, planned and run.

    python benchmarks/recompute.py planned   # 28.3B times, p 8 m 24, by memory limit
    python benchmarks/recompute.py chosen    # its plans at .25 p, run with real layers
    python benchmarks/recompute.py real      # a small Llama: the same bits, peak beside

Planned: a step in units of its work without recompute, m (F + B + W). A stage's M_B is
74 sbh a layer (arXiv 2401.10241, section 2), of which 32 stay for W, and 2, its input,
if the layer is recomputed; 8 layers a stage. What B computes again counts while B runs.
`judge.py`, which shares no code with zbpp, replays every plan.

Real: one process holds both stages, so that one allocator sees all.
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from parts.options import read_options
from parts.runs import judged
from parts.table import Table

from zbpp.core import LayerCosts
from zbpp.planning import PlanRequest, make_plan
from zbpp.schedules import LayerPlan

F, B, W, MESSAGE = 10.419, 10.207, 7.715, 0.408  # of a stage; table 9, 28.3B
M_W, M_R = 32 / 74, 2 / 74
P, M, LAYERS = 8, 24, 8
MODES = {"one": "ZB", "two": "ZBV"}


def paper(limit: float, *, whole: bool, chunks: int) -> LayerCosts:
    """Layers of all stages; whole: a chunk is one layer, recomputed as a whole."""
    n = chunks if whole else LAYERS
    return LayerCosts(
        P * n,
        F / n,
        B / n,
        W / n,
        m_b=1 / n,
        m_w=M_W / n,
        m_r=M_R / n,
        message=1.0,
        delay=MESSAGE,
        memory_limit=limit,
    )


def judged_span(planned: LayerPlan) -> float:
    """Span of a plan by the independent judge, which also holds it to its limit."""
    span = judged(planned.schedule, planned.costs).span
    assert abs(span - planned.step) < 1e-6 * span, (span, planned.step)
    return span


@dataclass(frozen=True)
class Planned:
    """None, all, and what the planner chooses, by memory limit."""

    effort: str = "default"
    limits: tuple[float, ...] = (0.25, 0.5, 0.75)
    """In p M_B."""

    def run(self) -> None:
        """Print a table."""
        table = Table(
            f"step / work, effort {self.effort}",
            ("limit", "chunks a stage", "none", "all", "chosen: chunks",
             "chosen: layers", "of each chunk", "seconds"),
        )  # fmt: skip
        for share in self.limits:
            for name, mode in MODES.items():
                table.add(f"{share:g} p", name, *self._row(share * P, mode))
        table.show()

    def _row(self, limit: float, mode: str) -> list[str]:
        chunks = 1 if mode == "ZB" else 2
        cells, start = [], time.perf_counter()
        for recompute, whole in (
            ("none", True), ("all", True), ("auto", True), ("auto", False)
        ):  # fmt: skip
            start = time.perf_counter()
            found = make_plan(
                PlanRequest(
                    schedule=mode,
                    costs=paper(limit, whole=whole, chunks=chunks),
                    n_stages=P,
                    n_microbatches=M,
                    split="even",
                    recompute=recompute,  # type: ignore[arg-type]
                    effort=self.effort,
                )
            )
            cells.append(f"{judged_span(found) / (M * (F + B + W)):.3f}")
        n = LAYERS // chunks
        counts = [len(found.schedule.recomputes(c, n)) for c in range(P * chunks)]
        seconds = time.perf_counter() - start
        return [*cells, " ".join(map(str, counts)), f"{seconds:.1f}"]


@dataclass(frozen=True)
class Chosen:
    """Run the plans at a limit on 64 small layers, and without recompute."""

    effort: str = "fast"
    limit: float = 0.25
    """In p M_B."""

    def run(self) -> None:
        """Print a line for each plan."""
        import torch

        torch.set_num_threads(1)
        for mode in MODES.values():
            found = make_plan(
                PlanRequest(
                    schedule=mode,
                    costs=paper(
                        self.limit * P, whole=False, chunks=1 if mode == "ZB" else 2
                    ),
                    n_stages=P,
                    n_microbatches=M,
                    split="even",
                    recompute="auto",
                    effort=self.effort,
                )
            )
            some, none = _run_small(found, None), _run_small(found, "none")
            assert some == none, mode
            print(
                f"{mode}: step / work {judged_span(found) / (M * (F + B + W)):.3f}, "
                f"{len(found.recompute)} of {P * LAYERS} layers recomputed; losses "
                f"{some[0]} and parameters {some[1][:12]} as without"
            )


def _run_small(found: LayerPlan, recompute: Any) -> tuple[list[float], str]:
    """Losses and hash of two steps of 64 layers, 8 stages in one process."""
    import torch
    from torch.optim import AdamW

    from zbpp.models import layers_from
    from zbpp.pipeline import Pipeline, plan_model
    from zbpp.training.fingerprint import combine, fingerprints
    from zbpp.training.llama import LlamaConfig, build_layers, cross_entropy

    config = LlamaConfig(
        dim=32, n_blocks=P * LAYERS - 2, n_heads=2, hidden=64, seq=16, seed=0
    )
    model = layers_from(partial(build_layers, config), n_layers=config.n_layers)
    pipeline = Pipeline(
        model,
        plan_model(model, found.schedule, device="cpu", recompute=recompute),
        loss_fn=cross_entropy,
        optimizer=partial(AdamW, fused=True),
        clip_grad_norm=1.0,
        device="cpu",
    )
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(256, (2, M, 17), generator=generator)
    losses = [pipeline.step(one[:, :-1], one[:, 1:]).loss for one in tokens]
    pipeline.synchronize()
    bits = combine([fingerprints(pipeline.named_parameters())])
    pipeline.close()
    return losses, bits


@dataclass(frozen=True)
class Real:
    """A small Llama on two stages: losses, parameters, step and peak memory."""

    steps: int = 3
    n_blocks: int = 4
    dim: int = 128
    seq: int = 128
    microbatches: int = 8

    def run(self) -> None:
        """Print a table."""
        import torch

        torch.set_num_threads(1)
        table = Table(
            "bits, step and peak memory",
            ("mode", "recompute", "layers", "same bits", "step",
             "peak above the start, MiB"),
        )  # fmt: skip
        for mode in ("1F1B", "ZBH1", "ZBV"):
            first: tuple[Any, float] | None = None
            for recompute in ("none", tuple(range(1, 1 + self.n_blocks // 2)), "all"):
                bits, seconds, peak, n = self._train(mode, recompute)
                first = first or (bits, seconds)
                same = bits == first[0]
                table.add(
                    mode if recompute == "none" else "",
                    recompute if isinstance(recompute, str) else "first half",
                    n,
                    "yes" if same else "NO",
                    f"{seconds / first[1]:.2f}",
                    f"{peak / 2**20:.1f}",
                )
                assert same, (mode, recompute)
        table.show()

    def _train(self, mode: str, recompute: Any) -> tuple[Any, float, int, int]:
        """Losses and hash; median step; peak of one more step; layers recomputed."""
        import torch
        from parts.memory_events import events_of, profiled
        from torch.optim import AdamW

        from zbpp.models import layers_from
        from zbpp.pipeline import Pipeline, plan_model
        from zbpp.planning.answer import recomputed_layers
        from zbpp.runtime.policies import StepPolicy
        from zbpp.training.fingerprint import combine, fingerprints
        from zbpp.training.llama import LlamaConfig, build_layers, cross_entropy

        config = LlamaConfig(
            dim=self.dim, n_blocks=self.n_blocks, n_heads=4, hidden=3 * self.dim,
            seq=self.seq, seed=0,
        )  # fmt: skip
        model = layers_from(partial(build_layers, config), n_layers=config.n_layers)
        pipeline = Pipeline(
            model,
            plan_model(
                model,
                mode,
                n_stages=2,
                n_microbatches=self.microbatches,
                device="cpu",
                recompute=recompute,
            ),
            loss_fn=cross_entropy,
            optimizer=partial(AdamW, fused=True),
            device="cpu",
            step=StepPolicy(post_validation=False),
        )
        generator = torch.Generator().manual_seed(1)
        shape = (self.steps + 2, self.microbatches, self.seq + 1)
        tokens = torch.randint(256, shape, generator=generator)
        losses, seconds = [], []
        for step in range(self.steps + 1):
            start = time.perf_counter()
            batch = tokens[step, :, :-1], tokens[step, :, 1:]
            losses.append(pipeline.step(*batch).loss)
            seconds.append(time.perf_counter() - start)
        with profiled() as run:
            pipeline.step(tokens[-1, :, :-1], tokens[-1, :, 1:])
        held = most = 0
        for _, n_bytes in events_of(run)[0]:
            held += n_bytes
            most = max(most, held)
        bits = losses, combine([fingerprints(pipeline.named_parameters())])
        n = len(recomputed_layers(pipeline.schedule, list(map(len, pipeline.split))))
        pipeline.close()
        return bits, sorted(seconds[1:])[self.steps // 2], most, n


if __name__ == "__main__":
    read_options(Planned, Chosen, Real).run()
