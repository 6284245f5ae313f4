"""Train a causal language model of transformers on bytes, by its Trainer."""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.set_num_threads(1)  # with other numbers of threads, sums round differently
torch.manual_seed(0)
text = torch.tensor(list(Path(sys.argv[1]).read_bytes()[:4096]))
rows = [{"input_ids": row, "labels": row} for row in text.view(-1, 32)]
sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64}
config = LlamaConfig(**sizes, num_hidden_layers=4, num_attention_heads=2)
arguments = TrainingArguments(
    sys.argv[2],
    use_cpu=True,
    disable_tqdm=True,
    report_to="none",
    max_steps=10,
    per_device_train_batch_size=16,
    learning_rate=1e-2,
    weight_decay=0.1,
    lr_scheduler_type="cosine",
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=5,
    save_steps=5,
)
trainer = Trainer(
    LlamaForCausalLM(config),
    arguments,
    train_dataset=rows[:100],
    eval_dataset=rows[100:],
)
trainer.train(resume_from_checkpoint=sys.argv[3] if sys.argv[3:] else None)
