"""Train a causal language model on bytes, in a loop of accelerate."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)  # with other numbers of threads, sums round differently
accelerator = Accelerator(cpu=True)
set_seed(0)
text = torch.tensor(list(Path(sys.argv[1]).read_bytes()[:4096]))
rows = [{"input_ids": row, "labels": row} for row in text.view(-1, 32)]
sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64}
config = LlamaConfig(**sizes, num_hidden_layers=4, num_attention_heads=2)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(rows, batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.optimizer, T_max=16)
for epoch in range(2):
    loader.set_epoch(epoch)
    for step, batch in enumerate(loader):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        cosine.step()
        accelerator.print(f"epoch {epoch}  step {step}  loss {loss.item():.4f}")
accelerator.end_training()
