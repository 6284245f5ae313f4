"""Estimated memory against the allocator's own events, pass by pass.

python benchmarks/memory/estimates.py passes [names of configurations]
python benchmarks/memory/estimates.py steps --stages 2 --microbatches 4 [names]
python benchmarks/memory/estimates.py megatron
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))

from parts.memory_events import Piece, inputs_of, measure_passes, measure_step
from parts.memory_models import CONFIGURATIONS, Configuration
from parts.memory_steps import real_peaks
from parts.table import Table

from zbpp.core import PassKind
from zbpp.memory.estimate import Steps, estimate_schedule, plan_mode
from zbpp.memory.layers import model_memory
from zbpp.memory.model import default_optimizer
from zbpp.runtime.partition import partition_layers


def error(estimated: int, measured: int, held: int) -> float:
    """Relative to all that the chunk holds then, besides parameters.

    Args:
        estimated: what a pass adds, left or peak.
        measured: the same.
        held: before the pass.
    """
    return (estimated - measured) / max(1, held + measured)


def compare(
    name: str, one: Configuration, n_chunks: int
) -> dict[str, tuple[float, float]]:
    """Errors of left and peak of each pass, the worst over the chunks."""
    torch.manual_seed(0)
    layers, batch, loss_fn = one.build()
    memory = model_memory(layers, batch, loss_fn, autocast=one.autocast)
    inputs = inputs_of(layers, batch[0], one.autocast)
    worst: dict[str, tuple[float, float]] = {}
    for own in partition_layers(len(layers), n_chunks):
        is_last = own.stop == len(layers)
        piece = Piece(
            layers[own.start : own.stop],
            inputs[own.start],
            batch[1] if is_last else None,
            own.start == 0,
            is_last,
        )
        real = measure_passes(piece, loss_fn, one.autocast)
        chunk = memory.chunk(own)
        m_b, m_w, made = chunk.m_b, chunk.m_w, chunk.gradients
        rows = {
            "F": ((m_b, chunk.peak(PassKind.F)), real["F2"], made),
            "B": ((m_w - m_b, chunk.peak(PassKind.B)), real["B2"], made + m_b),
            "W": ((-m_w, chunk.peak(PassKind.W)), real["W2"], made + m_w),
            "BW": ((-m_b, chunk.peak(PassKind.BW)), real["BW3"], made + m_b),
        }
        for kind, deferred in (("O", False), ("O deferred", True)):
            step = memory.optimizer(own, default_optimizer)
            state, copies, peak = measure_step(piece.layers, deferred=deferred)
            found = (
                (step.rollback if deferred else step.state),
                (step.speculative_peak if deferred else step.peak),
            )
            rows[kind] = found, (copies if deferred else state, peak), made
        for kind, (found, real_one, held) in rows.items():
            pairs = zip(found, real_one, worst.get(kind, (0.0, 0.0)), strict=True)
            left, most = (max(error(a, b, held), old, key=abs) for a, b, old in pairs)
            worst[kind] = left, most
    return worst


def passes(names: Sequence[str]) -> None:
    """Print a row per configuration and number of chunks."""
    kinds = ("F", "B", "W", "BW", "O", "O deferred")
    table = Table("passes: of what they leave, of their peak", ("model", "n", *kinds))
    for name, one in CONFIGURATIONS.items():
        if names and name not in names:
            continue
        for n_chunks in (1,) if name == "tied ends" else (1, 2, 3, 4):
            worst = compare(name, one, n_chunks)
            cells = (f"{a:+.1%} {b:+.1%}" for a, b in (worst[k] for k in kinds))
            table.add(name, n_chunks, *cells)
    table.show()


def steps(names: Sequence[str], n_stages: int, n_microbatches: int) -> None:
    """Print the peak of every stage in real, post-validated steps of five modes."""
    table = Table(
        "peaks of stages", ("model", "mode", "estimated / measured, MiB", "worst")
    )
    for name in names or ("head and loss", "zbpp train"):
        one = CONFIGURATIONS[name]
        torch.manual_seed(0)
        layers, batch, loss_fn = one.build()
        memory = model_memory(layers, batch, loss_fn, autocast=one.autocast)
        for mode in ("1F1B", "ZBH1", "ZBH2", "ZBV", "VHalf"):
            schedule = plan_mode(mode, n_stages, n_microbatches, None, "default")
            found = estimate_schedule(memory, Steps(default_optimizer), schedule)
            real = real_peaks(name, mode, n_stages, n_microbatches)
            pairs = [(s.peak, r) for s, r in zip(found, real, strict=True)]
            worst = max((a / b - 1 for a, b in pairs), key=abs)
            cells = ", ".join(f"{a / 2**20:.1f} / {b / 2**20:.1f}" for a, b in pairs)
            table.add(name, mode, cells, f"{worst:+.1%}")
    table.show()


def megatron() -> None:
    """Print what Megatron's formula gives for blocks: s b h (18 + 4 ffn / h)."""
    table = Table(
        "a block's F", ("model", "leaves, MiB", "Megatron's formula", "error")
    )
    for name, one in CONFIGURATIONS.items():
        if one.megatron is None:
            continue
        seq, samples, width, _ = one.megatron
        layers, batch, loss_fn = one.build()
        memory = model_memory(layers, batch, loss_fn, autocast=one.autocast)
        own = memory.whole.layers[1].m_b
        formula = seq * samples * width * (18 + 4 * 4)
        mib = (f"{one / 2**20:.2f}" for one in (own, formula))
        table.add(name, *mib, f"{formula / own - 1:+.0%}")
    table.show()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["passes", "steps", "megatron"])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    arguments = parser.parse_intermixed_args()
    if arguments.what == "passes":
        passes(arguments.names)
    elif arguments.what == "steps":
        steps(arguments.names, arguments.stages, arguments.microbatches)
    else:
        megatron()
