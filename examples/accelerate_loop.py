"""Train a causal language model on bytes, in a loop of accelerate.

torchrun --nproc-per-node 2 examples/accelerate_loop.py README.md
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from replica_loader import replica_loader
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import zbpp

torch.set_num_threads(1)  # with other numbers of threads, sums round differently
accelerator = Accelerator(cpu=True)
set_seed(0)
text = torch.tensor(list(Path(sys.argv[1]).read_bytes()[:4096]))
rows = [{"input_ids": row, "labels": row} for row in text.view(-1, 32)]
sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64}
config = LlamaConfig(**sizes, num_hidden_layers=4, num_attention_heads=2)
pipeline = zbpp.Pipeline(
    LlamaForCausalLM(config),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    schedule="ZBV",
    n_stages=2,
    n_microbatches=4,
    clip_grad_norm=1.0,
)
loader = replica_loader(DataLoader(rows, batch_size=16, shuffle=True), pipeline)
cosine = [
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=16)
    for optimizer in pipeline.optimizers
]
for epoch in range(2):
    loader.set_epoch(epoch)
    for step, batch in enumerate(loader):
        result = pipeline.step(batch)
        for scheduler in cosine:
            scheduler.step()
        accelerator.print(f"epoch {epoch}  step {step}  loss {result.loss:.4f}")
pipeline.close()
accelerator.end_training()
