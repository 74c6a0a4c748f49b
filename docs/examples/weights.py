"""Starts from a file of full weights, which rank 0 alone reads, and writes another.

torchrun --nproc-per-node 2 docs/examples/weights.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import zero

if "RANK" in os.environ:  # torchrun sets it
    dist.init_process_group("gloo")
first = int(os.environ.get("RANK", 0)) == 0

net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
if first:
    torch.save(net.state_dict(), "start.pt")  # such as the file of another project
model, optimizer = zero.setup(net, torch.optim.AdamW, stage=3, lr=1e-3)

weights = torch.load("start.pt", weights_only=True) if first else None
zero.load_full_state_dict(model, weights)  # the others receive what is theirs

for _ in range(20):
    inputs = torch.randn(16, 8)
    loss = (model(inputs) - inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()

weights = zero.full_state_dict(model)  # on every rank: full on rank 0's CPU
state = zero.full_optimizer_state_dict(model, optimizer)
if first:
    torch.save(weights, "weights.pt")  # net.load_state_dict takes it
    torch.save(state, "optimizer.pt")  # AdamW(...).load_state_dict takes it
