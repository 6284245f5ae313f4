"""The share of the project that one training step runs: files, functions, frames.

    python benchmarks/walk.py            # 1F1B, ZBH1 and ZBV

A pipeline of two stages in one process takes a few steps, and the next one runs under
`sys.setprofile`. Counted are the distinct files and functions of the project that it
calls, and the project's frames that lie above the forward of a layer, `step` included.
"""

import argparse
import sys
from dataclasses import dataclass, field
from types import FrameType

import torch
from parts.table import Table
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import zbpp

WARM_UP_STEPS = 3
"""The first steps compare buffers and plan backwards; later ones repeat them."""


@dataclass
class Walk:
    """The calls of a step into the project."""

    functions: set[tuple[str, int, str]] = field(default_factory=set)
    """File, line and qualified name of each."""
    frames_above_layer: int = 0

    @property
    def n_files(self) -> int:
        """Distinct files."""
        return len({file for file, _, _ in self.functions})

    def note_call(self, frame: FrameType, event: str, _: object) -> None:
        """Note a call; a function for `sys.setprofile`."""
        if event == "call" and is_project(frame):
            code = frame.f_code
            self.functions.add(
                (code.co_filename, code.co_firstlineno, code.co_qualname)
            )


class Layer(nn.Linear):
    """A layer that counts the project's frames above its forward."""

    walk: Walk | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Run the Linear."""
        if self.walk is not None:
            depth = 0
            above: FrameType | None = sys._getframe(1)
            while above is not None:
                depth += is_project(above)
                above = above.f_back
            self.walk.frames_above_layer = max(self.walk.frames_above_layer, depth)
        return super().forward(x)


def is_project(frame: FrameType) -> bool:
    """True for a frame of the project's own code."""
    return str(frame.f_globals.get("__name__")).startswith("zbpp.")


def walk_step(mode: str, n_microbatches: int = 4) -> Walk:
    """Profile one step of a warm pipeline."""
    torch.manual_seed(0)
    layers = [Layer(8, 8) for _ in range(4)]
    pipeline = zbpp.Pipeline(
        nn.Sequential(*layers),
        loss_fn=mse_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        clip_grad_norm=1.0,
        schedule=mode,
        n_stages=2,
        n_microbatches=n_microbatches,
    )
    batch = torch.randn(4 * n_microbatches, 8), torch.randn(4 * n_microbatches, 8)
    for _ in range(WARM_UP_STEPS):
        pipeline.step(*batch)
    walk = Walk()
    for layer in layers:
        layer.walk = walk
    sys.setprofile(walk.note_call)
    try:
        pipeline.step(*batch)
    finally:
        sys.setprofile(None)
        pipeline.close()
    return walk


def main() -> None:
    """Print a row for each mode."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modes", nargs="*", default=["1F1B", "ZBH1", "ZBV"])
    parser.add_argument("--names", action="store_true", help="name the functions too")
    args = parser.parse_args()
    table = Table("one step", ("mode", "files", "functions", "frames above a layer"))
    for mode in args.modes:
        walk = walk_step(mode)
        table.add(mode, walk.n_files, len(walk.functions), walk.frames_above_layer)
        if args.names:
            for file, line, name in sorted(walk.functions):
                print(f"  {file}:{line} {name}")
    table.show()


if __name__ == "__main__":
    main()
