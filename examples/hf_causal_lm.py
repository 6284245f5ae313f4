"""Train a causal language model of transformers on bytes, saved and resumed.

python examples/hf_causal_lm.py README.md --stages 2
torchrun --nproc-per-node 2 examples/hf_causal_lm.py README.md --mode ZBV
"""

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import zbpp

parser = argparse.ArgumentParser()
parser.add_argument("text", type=Path)
parser.add_argument("--mode", default="ZBH1")
parser.add_argument("--stages", type=int, help="all in this process, without torchrun")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
args = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)  # with other numbers of threads, sums round differently
config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=6,
    num_attention_heads=4,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
text = torch.tensor(list(args.text.read_bytes()))  # a token is a byte
pipeline = zbpp.Pipeline(
    LlamaForCausalLM(config),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    schedule=args.mode,
    n_stages=args.stages,
    n_microbatches=4,
    clip_grad_norm=1.0,
)
cosine = [
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    for optimizer in pipeline.optimizers
]
pipeline.attach(*cosine)
if args.folder.exists():
    pipeline.load(args.folder)
for step in range(pipeline.n_steps, args.steps):
    places = torch.Generator().manual_seed(step)  # the place in the data is the step
    starts = torch.randint(len(text) - 64, (16,), generator=places)
    rows = torch.stack([text[start : start + 64] for start in starts.tolist()])
    result = pipeline.step({"input_ids": rows, "labels": rows})
    for scheduler in cosine:
        scheduler.step()
    if pipeline.rank == 0:
        print(f"step {step + 1}  loss {result.loss:.6f}")
    if (step + 1) % 10 == 0:
        pipeline.save(args.folder, keep=2)
pipeline.close()
