"""Estimated memory beside the allocator's peak, all stages in this process."""

import gc

import torch
from gpu.sizes import Sizes
from parts.memory_models import Parts, language, llama
from parts.table import Table
from torch import Tensor

import zbpp
from zbpp.memory.api import estimate
from zbpp.memory.model import default_optimizer

__all__ = ["errors", "measure"]

BF16 = torch.bfloat16
_STEPS = 4
MODES = ("FThenB", "1F1B", "ZBH1")


def measure(sizes: Sizes) -> list[Table]:
    """Peak of a step of one stage, in MiB."""
    rows = []
    for name, (parts, autocast, m) in _models(sizes).items():
        for mode in MODES[:1] if sizes.is_tiny else MODES:
            estimated, measured = _pair(parts, autocast, m, mode, sizes.device)
            off = None if measured is None else estimated / measured - 1
            found = None if measured is None else measured / 2**20
            rows.append([name, mode, estimated / 2**20, found, off])
    return [
        Table(
            "Estimated memory beside the allocator",
            note="One stage, AdamW, micro-batches as given; MiB of "
            "`torch.cuda.max_memory_allocated` in a step after some others, less what "
            "was there before the model (cuBLAS keeps workspaces).",
            columns=[
                "model",
                "mode",
                "estimated",
                "measured",
                "estimated / measured - 1",
            ],
            rows=rows,
        )
    ]


def errors(sizes: Sizes) -> dict[tuple[str, str], float]:
    """Relative errors by model and mode, where they can be measured."""
    (table,) = measure(sizes)
    return {(row[0], row[1]): row[4] for row in table.rows if isinstance(row[4], float)}


def _models(sizes: Sizes) -> dict[str, tuple[Parts, torch.dtype | None, int]]:
    torch.manual_seed(0)
    if sizes.is_tiny:
        return {"zbpp train": (llama(1, 16, 1, 8), None, 2)}
    return {
        "zbpp train": (llama(6, 1024, 4, 512), None, 8),
        "zbpp train, bf16": (llama(6, 1024, 4, 512), BF16, 8),
        "head and loss": (language(4, 1024, 2, 512, 16384), None, 4),
        "head and loss, bf16": (language(4, 1024, 2, 512, 16384), BF16, 4),
    }


def _pair(
    parts: Parts,
    autocast: torch.dtype | None,
    m: int,
    mode: str,
    device: torch.device,
) -> tuple[int, int | None]:
    """Bytes that are estimated, and measured."""
    layers, batch, loss_fn = parts
    found = estimate(
        layers,
        batch,
        loss_fn,
        n_stages=1,
        n_microbatches=m,
        modes=[mode],
        autocast=autocast,
        device=device.type,
    )
    before = _held(device)
    pipeline = zbpp.Pipeline(
        layers,
        loss_fn=loss_fn,
        optimizer=default_optimizer,
        schedule=mode,
        n_stages=1,
        n_microbatches=m,
        device=device,
        numerics=zbpp.Numerics(autocast=autocast),
        execution=zbpp.Execution(watch=False),
    )
    x, y = (_times(part, m).to(device) for part in batch)
    for _ in range(_STEPS):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        pipeline.step(x, y)
    measured = None
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        measured = torch.cuda.max_memory_allocated(device) - before
    pipeline.close()
    for layer in layers:
        layer.to("cpu")
        layer.zero_grad()
    return found.peak(mode), measured


def _times(part: Tensor, m: int) -> Tensor:
    return torch.cat([part] * m)


def _held(device: torch.device) -> int:
    """Bytes that are there before the model, cuBLAS's workspaces among them."""
    if device.type != "cuda":
        return 0
    for dtype in (torch.float32, BF16):
        square = torch.ones(64, 64, device=device, dtype=dtype)
        torch.nn.functional.linear(square, square, square[0])
    del square
    gc.collect()
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)
