"""Trains a model of transformers, saves the run, and exports it for from_pretrained.

torchrun --nproc-per-node 2 docs/examples/pretrained.py
"""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import zero

if "RANK" in os.environ:  # torchrun sets it
    dist.init_process_group("gloo")
torch.manual_seed(0)
rows = (torch.randint(256, (64, 1)) + torch.arange(32)) % 256
net = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=32, n_embd=64, n_layer=2, n_head=2))
model, optimizer = zero.setup(net, torch.optim.AdamW, stage=3, lr=3e-3)
for _ in range(20):
    optimizer.zero_grad()
    model(input_ids=rows, labels=rows).loss.backward()
    optimizer.step()
zero.checkpoint.save("run", model, optimizer)

model.eval()
with torch.no_grad():
    trained = model(input_ids=rows, labels=rows).loss.item()
if int(os.environ.get("RANK", 0)) == 0:
    subprocess.run([sys.executable, "-m", "zero.checkpoint", "export", "run", "out"], check=True)
    exported = AutoModelForCausalLM.from_pretrained("out")
    with torch.no_grad():
        loss = exported.eval()(input_ids=rows, labels=rows).loss.item()
    print(f"loss {trained:.6f} of the run, {loss:.6f} of the export")
