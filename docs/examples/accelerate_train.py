"""Trains a small model by Accelerate; started again, it goes on at any stage.

torchrun --nproc-per-node 2 docs/examples/accelerate_train.py 3
accelerate launch --config_file fsdp.yaml docs/examples/accelerate_train.py
"""

import os
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from zero.integrations.accelerate import Accelerator  # was: from accelerate

stage = int(sys.argv[1]) if sys.argv[1:] else None
accelerator = Accelerator(zero_plugin=stage, cpu=not torch.cuda.is_available())
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=2))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
rows = (torch.randint(256, (320, 1)) + torch.arange(32)) % 256
loader = DataLoader(TensorDataset(rows), batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if os.path.exists("run"):
    accelerator.load_state("run")

for (tokens,) in loader:
    loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

accelerator.save_state("run")
weights = accelerator.get_state_dict(model)  # collective, as save_state
if accelerator.is_main_process:
    accelerator.unwrap_model(model).save_pretrained("run/model", state_dict=weights)
accelerator.print(f"{type(model).__name__}: loss {loss.item():.4f}")
accelerator.end_training()
