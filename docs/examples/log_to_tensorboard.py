"""Logs the loss, the norm of the gradients, memory, and histograms of weights and gradients: alike at every stage.

torchrun --nproc-per-node 2 docs/examples/log_to_tensorboard.py 3
tensorboard --logdir runs
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import zero

device = "cuda" if torch.cuda.is_available() else "cpu"
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:  # started by torchrun
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")

stage, steps, log_every = map(int, sys.argv[1:] or (3, 200, 10))
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 32)).to(device)
model, optimizer = zero.setup(net, torch.optim.AdamW, stage=stage, lr=1e-3)
data = torch.Generator().manual_seed(1 + rank)
writer = SummaryWriter(f"runs/stage {stage}") if rank == 0 else None
for step in range(steps):
    inputs = torch.randn(64, 32, generator=data).to(device)
    loss = (model(inputs) - inputs.sin()).square().mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), max_norm=1.0)

    if step % log_every == 0:
        # What reads losses, gradients and weights is for every rank, and what writes is for rank 0.
        mean = loss.detach().clone()
        if world > 1:
            dist.all_reduce(mean)
        scalars = {"loss": mean.item() / world, "gradient norm": norm.item()}
        # Of this rank, and sends nothing. Between backward and step there are gradients to count.
        scalars |= zero.report(model, optimizer).numbers()
        if writer:
            for name, value in scalars.items():
                writer.add_scalar(name, value, step)
        for name, param in net.named_parameters():
            for kind, tensor in (("weights", param), ("gradients", param.grad)):
                full = None if tensor is None else tensor.float().numpy(force=True)  # gathered, one at a time
                if writer and full is not None:
                    writer.add_histogram(f"{kind}/{name}", full, step)

    optimizer.step()
    optimizer.zero_grad()

if writer:
    writer.close()
    print(f"loss {scalars['loss']:.4f}")
if world > 1:
    dist.destroy_process_group()
