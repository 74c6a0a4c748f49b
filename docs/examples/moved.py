"""Trains a small model: by `python` alone, or by `torchrun --nproc-per-node 2` on two ranks."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zero

device = "cuda" if torch.cuda.is_available() else "cpu"
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:  # started by torchrun
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(640, 64)[rank::world]), batch_size=32)
net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
model, optimizer = zero.setup(net, optimizer, stage=3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
for _ in range(5):
    for (inputs,) in loader:
        loss = (model(inputs.to(device)) - inputs.to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), max_norm=1.0)
        optimizer.step()
    schedule.step()

weights = zero.full_state_dict(model)
if rank == 0:
    torch.save(weights, "weights.pt")
    print(f"loss {loss.item():.4f} on {world} rank(s)")
if world > 1:
    dist.destroy_process_group()
