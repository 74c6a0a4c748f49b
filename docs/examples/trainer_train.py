"""Trains a small model by transformers' Trainer; started again it goes on at any stage.

torchrun --nproc-per-node 2 docs/examples/trainer_train.py 3
accelerate launch --config_file fsdp.yaml docs/examples/trainer_train.py
"""

import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from zero.integrations.transformers import Trainer  # was: from transformers

set_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=2))
rows = (torch.randint(256, (512, 1)) + torch.arange(32)) % 256
data = [{"input_ids": row, "labels": row} for row in rows]
arguments = TrainingArguments(
    output_dir="run",
    max_steps=20,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    learning_rate=3e-3,
    warmup_steps=5,
    eval_strategy="steps",
    eval_steps=10,
    save_steps=10,
    load_best_model_at_end=True,
    use_cpu=not torch.cuda.is_available(),
)
stage = int(sys.argv[1]) if sys.argv[1:] else None
parts = {"train_dataset": data[64:], "eval_dataset": data[:64]}
trainer = Trainer(model, arguments, **parts, zero_plugin=stage)
trainer.train(resume_from_checkpoint=any(Path("run").glob("checkpoint-*")))
trainer.save_model("run/model")  # collective: what from_pretrained loads
loss = trainer.evaluate()["eval_loss"]
if trainer.is_world_process_zero():
    print(f"{type(trainer.model_wrapped).__name__}: loss {loss:.4f}")
trainer.end()
