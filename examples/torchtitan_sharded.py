"""Train torchtitan's Llama debug model on bytes, its parts in `fully_shard`.

torchrun --nproc-per-node 4 examples/torchtitan_sharded.py README.md
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchtitan.models.llama3 import Transformer, llama3_args

import zbpp

torch.set_num_threads(1)  # with other numbers of threads, sums round differently
torch.manual_seed(0)
text = torch.tensor(list(Path(sys.argv[1]).read_bytes()[: 8 * 8 * 33]))
model = Transformer(replace(llama3_args["debugmodel"], max_seq_len=32))
with torch.no_grad():
    model.init_weights()
layers = zbpp.cut(model, "layers", before=["tok_embeddings"], after=["norm", "output"])
n = int(os.environ.get("WORLD_SIZE", 1))
shards = max(1, n // 2)
mesh = zbpp.mesh(stages=n // shards, data_parallel=shards)
for part in (model.tok_embeddings, *model.layers.values(), model.norm, model.output):
    fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False)
pipeline = zbpp.Pipeline(
    layers,
    loss_fn=lambda x, y: nn.functional.cross_entropy(x.flatten(0, 1), y.flatten()),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    schedule="ZBV",
    n_microbatches=4,
    mesh=mesh,
)
for step, rows in enumerate(text.view(8, 8, 33)):
    share = rows.chunk(shards)[pipeline.place.replica]
    result = pipeline.step(share[:, :-1], share[:, 1:])
    if pipeline.rank == 0:
        print(f"step {step}  loss {result.loss:.4f}")
pipeline.close()
