"""Trains a LoRA adapter over a sharded base, saves the run and the adapter without it, and loads the adapter.

torchrun --nproc-per-node 2 docs/examples/lora.py
"""

import os

import peft
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import zero


def base():
    torch.manual_seed(0)  # stands for from_pretrained
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=32, n_layer=2, n_head=2))


if "RANK" in os.environ:  # torchrun sets it
    dist.init_process_group("gloo")

lora = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
net = peft.get_peft_model(base(), lora)
model, optimizer = zero.setup(net, torch.optim.AdamW, stage=3, lr=1e-2)
for _ in range(20):
    tokens = (torch.randint(256, (8, 1)) + torch.arange(16)) % 256
    loss = model(input_ids=tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()

zero.checkpoint.save("run", model, optimizer, frozen=False)

weights = zero.full_tensors(model)  # pairs of name and tensor, on rank 0
adapter = {name: value for name, value in weights if "lora_" in name}
if int(os.environ.get("RANK", 0)) == 0:
    net.save_pretrained("adapter", state_dict=adapter)
    net = peft.PeftModel.from_pretrained(base(), "adapter", is_trainable=True)
    print(f"loss {loss.item():.4f}")  # zero.setup(net, ...) trains it on
