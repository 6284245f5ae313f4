"""Train torchtitan's Llama debug model on bytes, in a plain loop."""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torchtitan.models.llama3 import Transformer, llama3_args

torch.set_num_threads(1)  # with other numbers of threads, sums round differently
torch.manual_seed(0)
text = torch.tensor(list(Path(sys.argv[1]).read_bytes()[: 8 * 8 * 33]))
model = Transformer(replace(llama3_args["debugmodel"], max_seq_len=32))
with torch.no_grad():
    model.init_weights()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, rows in enumerate(text.view(8, 8, 33)):
    x, y = model(rows[:, :-1]), rows[:, 1:]
    loss = nn.functional.cross_entropy(x.flatten(0, 1), y.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}  loss {loss.item():.4f}")
