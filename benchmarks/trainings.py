"""Eighteen small trainings: a hash of losses, norms and parameters of each.

    python benchmarks/trainings.py > after.txt
    PYTHONPATH=../other/src python benchmarks/trainings.py > before.txt
    diff before.txt after.txt

All stages run in this process, without dropout. A change that should change no numbers
leaves every line as it is (same machine, same torch).
"""

import hashlib
import itertools
import struct
from typing import Any

import torch
from torch import Tensor, nn

import zbpp

STAGES, MICROBATCHES, STEPS, WIDTH = 2, 4, 6, 16
MODES = ("1F1B", "ZBH1", "ZBH2", "ZBV", "VHalf", "DualPipeV")
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=5e-2, momentum=0.9),
    "AdamW, bf16": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
}


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to the same."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 2, -1)).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def digest(mode: str, optimizer: str) -> str:
    """Train, and hash what came out."""
    torch.manual_seed(0)
    blocks = [Block() for _ in range(6)]
    layers = [nn.Embedding(64, WIDTH), *blocks, nn.Linear(WIDTH, 64)]
    bf16 = optimizer.endswith("bf16")
    pipeline = zbpp.Pipeline(
        layers,
        mode,
        n_stages=STAGES,
        n_microbatches=MICROBATCHES,
        loss_fn=lambda y, t: nn.functional.cross_entropy(y.flatten(0, 1), t.flatten()),
        optimizer=OPTIMIZERS[optimizer],
        clip_grad_norm=0.5,  # below some of the norms
        device="cpu",
        numerics=zbpp.Numerics(autocast=torch.bfloat16 if bf16 else None),
    )
    found = hashlib.sha256()
    draw = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(0, 64, (2 * MICROBATCHES, 9), generator=draw)
        result = pipeline.step(tokens[:, :-1], tokens[:, 1:])
        found.update(struct.pack("dd", result.loss, result.grad_norm))
    pipeline.synchronize()
    named = dict(pipeline.named_parameters())
    for name in sorted(named):
        found.update(named[name].detach().numpy().tobytes())
    pipeline.close()
    return found.hexdigest()[:16]


def main() -> None:
    """Print a line for each training."""
    torch.set_num_threads(1)
    for mode, optimizer in itertools.product(MODES, OPTIMIZERS):
        print(f"{mode:10} {optimizer:12} {digest(mode, optimizer)}", flush=True)


if __name__ == "__main__":
    main()
