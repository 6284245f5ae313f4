"""Train a LoRA of a causal language model on bytes, by peft.

torchrun --nproc-per-node 2 examples/peft_lora.py README.md runs/lora
"""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import zbpp.checkpoint

torch.set_num_threads(1)  # with other numbers of threads, sums round differently
torch.manual_seed(0)
text = torch.tensor(list(Path(sys.argv[1]).read_bytes()[:4096]))
sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64}
config = LlamaConfig(**sizes, num_hidden_layers=4, num_attention_heads=2)
model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, lora_alpha=16))
pipeline = zbpp.Pipeline(
    model,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    schedule="ZBV",
    n_stages=2,
    n_microbatches=4,
)
for step, rows in enumerate(text.view(8, 16, 32)):
    result = pipeline.step({"input_ids": rows, "labels": rows})
    if pipeline.rank == 0:
        print(f"step {step}  loss {result.loss:.4f}")
pipeline.save(sys.argv[2], trainable_only=True, wait=True)
if pipeline.rank == 0:
    whole = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, lora_alpha=16))
    zbpp.checkpoint.load(sys.argv[2], whole)
    whole.save_pretrained(sys.argv[2])
pipeline.close()
