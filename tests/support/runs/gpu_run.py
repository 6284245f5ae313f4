"""Train in processes that share a GPU (gloo, through the host's memory)."""

import sys
from pathlib import Path

import torch
from small_model import batch, make_pipeline


def train_to(file: str, mode: str, device: str) -> None:
    """Write the bits of losses and parameters that this process's stages end with."""
    pipeline = make_pipeline(mode, None, device=device, clip_grad_norm=0.5)
    losses = [pipeline.step(*batch(step)).loss for step in range(5)]
    parameters = {n: p.detach().cpu() for n, p in pipeline.named_parameters()}
    torch.save((losses, parameters), Path(f"{file}{pipeline.rank}"))
    pipeline.close()


if __name__ == "__main__":
    train_to(*sys.argv[1:])
