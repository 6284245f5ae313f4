"""B + W against one full backward on the device: its time, and the host's."""

from collections.abc import Callable

import torch
from gpu.clock import ratio_row, seconds
from gpu.sizes import Sizes
from parts.split_models import blocks, conv_net, mlp
from parts.table import Table
from split_backward import TECHNIQUES, start
from torch import nn

__all__ = ["measure"]

Build = Callable[[], nn.Module]

MODELS: dict[str, tuple[Build, tuple[int, ...], torch.dtype]] = {
    "MLP x4, 4096": (lambda: mlp(4096), (4096, 4096), torch.bfloat16),
    "block x4, 2048": (lambda: blocks(4, 2048), (2, 2048, 2048), torch.bfloat16),
    "block x4, 1024, fp32": (lambda: blocks(4, 1024), (2, 1024, 1024), torch.float32),
    "conv net": (conv_net, (32, 32, 64, 64), torch.float32),
    "MLP x4, 64": (lambda: mlp(64), (16, 64), torch.float32),
}
TINY: dict[str, tuple[Build, tuple[int, ...], torch.dtype]] = {
    "MLP x4, 8": (lambda: mlp(8), (2, 8), torch.float32)
}


def measure(sizes: Sizes) -> list[Table]:
    """Ratios to the full backward of the same turn; techniques in turns."""
    rows: list[list[object]] = []
    for name, (build, shape, dtype) in (TINY if sizes.is_tiny else MODELS).items():
        torch.manual_seed(0)
        module = build().to(sizes.device, dtype)
        for technique, (device, host) in _ratios(
            module, shape, dtype, sizes.device, 2 if sizes.is_tiny else 15
        ).items():
            rows.append([name, technique, *ratio_row(device), *ratio_row(host)])
    return [
        Table(
            "B + W against one full backward",
            note="Each of B and W issued in a row, behind a kernel that lets the host "
            "run ahead. Time of the device by events, of the host by its thread.",
            columns=[
                "model",
                "split",
                "device (B+W)/full",
                "lower quartile",
                "upper",
                "host (B+W)/full",
                "lower quartile",
                "upper",
            ],
            rows=rows,
        )
    ]


def _ratios(
    module: nn.Module,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    runs: int,
) -> dict[str, tuple[list[float], list[float]]]:
    found: dict[str, tuple[list[float], list[float]]] = {
        name: ([], []) for name in TECHNIQUES
    }
    for turn in range(runs + 2):
        taken = {}
        for name in sorted(TECHNIQUES, key=lambda n: hash((n, turn))):
            torch.set_default_dtype(dtype)
            try:
                with torch.device(device):
                    _, (b, w) = start(module, shape, TECHNIQUES[name])
            finally:
                torch.set_default_dtype(torch.float32)
            taken[name] = seconds(device, lambda b=b, w=w: (b(), w()))
        for name, (on_device, on_host) in taken.items() if turn >= 2 else ():
            found[name][0].append(on_device / taken["full"][0])
            found[name][1].append(on_host / max(taken["full"][1], 1e-9))
    del found["full"]
    return found
