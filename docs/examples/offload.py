"""Keeps what the optimizer steps in the memory of the host, and steps it there.

torchrun --nproc-per-node 2 docs/examples/offload.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import zero

device = "cuda" if torch.cuda.is_available() else "cpu"
if "RANK" in os.environ:  # torchrun sets it
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")

net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)  # fast on CPUs
host = zero.CPUOffload()  # for GPUs; zero.DiskOffload("scratch") works anywhere
model, optimizer = zero.setup(net, optimizer, stage=2, precision="bf16", offload=host)
for _ in range(20):
    inputs = torch.randn(32, 64, device=device)
    loss = (model(inputs) - inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
print(f"loss {loss.item():.4f}\n{zero.report(model, optimizer)}")
