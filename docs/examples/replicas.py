"""Replicas that train one model and may be killed and started again; docs/replicas.md says how.

python -m zero.features.replicas --port 29400 --replicas 2
torchrun --standalone --nproc-per-node 2 --max-restarts 100 docs/examples/replicas.py localhost:29400 a
torchrun --standalone --nproc-per-node 2 --max-restarts 100 docs/examples/replicas.py localhost:29400 b
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

import zero


def train(coordinator: str, name: str, *, stage: int, steps: int) -> dict[str, torch.Tensor]:
    """Returns the weights after `steps` steps of all replicas together."""
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    model, optimizer = zero.setup(model, torch.optim.AdamW, stage=stage, lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    replicas = zero.fault_tolerant(model, optimizer, coordinator, name=name, state={"schedule": schedule})
    while replicas.step < steps:
        data = torch.Generator().manual_seed(replicas.step)  # each rank takes its share of the same batch
        rank, world = dist.get_rank(), dist.get_world_size()
        inputs = torch.randn(24, 32, generator=data)[replicas.index * world + rank :: replicas.count * world]
        optimizer.zero_grad()
        (model(inputs) - inputs.sin()).square().mean().backward()
        optimizer.step()
        schedule.step()
    return zero.full_state_dict(model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("coordinator")
    parser.add_argument("name")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    options = vars(parser.parse_args())
    # All starts share torchrun's store: without a prefix a rank may find the address of one that was killed, and hang.
    store, rank, world = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    weights = train(**options)
    if rank == 0:
        torch.save(weights, f"weights-{options['name']}.pt")
    dist.destroy_process_group()
