"""Train a LoRA of a causal language model on bytes, by peft."""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)  # with other numbers of threads, sums round differently
torch.manual_seed(0)
text = torch.tensor(list(Path(sys.argv[1]).read_bytes()[:4096]))
sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64}
config = LlamaConfig(**sizes, num_hidden_layers=4, num_attention_heads=2)
model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, lora_alpha=16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step, rows in enumerate(text.view(8, 16, 32)):
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}  loss {loss.item():.4f}")
model.save_pretrained(sys.argv[2])
