"""Trains a small model by Accelerate; started again, it goes on at any stage.

torchrun --nproc-per-node 2 docs/examples/accelerate_train.py 3
accelerate launch --config_file fsdp.yaml docs/examples/accelerate_train.py
"""

import os
import sys

import torch
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, get_constant_schedule_with_warmup

from zero.integrations.accelerate import Accelerator  # was: from accelerate


def train(folder, stage=None):
    cpu = not torch.cuda.is_available()
    accelerator = Accelerator(zero_plugin=stage, gradient_accumulation_steps=2, cpu=cpu)
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = get_constant_schedule_with_warmup(optimizer, 10)
    rows = (torch.randint(256, (320, 1)) + torch.arange(32)) % 256
    loader = DataLoader(TensorDataset(rows), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    schedule = accelerator.prepare(schedule)
    if os.path.exists(folder):
        accelerator.load_state(folder)
    for (tokens,) in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    accelerator.save_state(folder)
    weights = accelerator.get_state_dict(model)  # collective, as save_state
    if accelerator.is_main_process:
        plain = accelerator.unwrap_model(model)
        plain.save_pretrained(f"{folder}/model", state_dict=weights)
    accelerator.print(f"{type(model).__name__}: loss {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    train("run", int(sys.argv[1]) if sys.argv[1:] else None)
