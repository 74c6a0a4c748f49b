"""A training run that goes on from its latest checkpoint whenever it is started again, on any number of ranks.

    torchrun --nproc-per-node 2 --max-restarts 100 docs/examples/resume.py runs/first --steps 1000

When a rank fails, torchrun ends the others and starts all of them anew. All that the next step needs comes back. On as
many ranks as before the weights are bit for bit those of a run that was never interrupted.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

import zero


def train(folder: str, *, stage: int, steps: int, save_every: int) -> dict[str, torch.Tensor]:
    """Returns the weights after `steps` steps, of which it takes those that come after the latest checkpoint."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    model, optimizer = zero.setup(model, torch.optim.AdamW, stage=stage, lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    data = torch.Generator().manual_seed(1)  # the same on every rank: each takes its share of the same batch

    step = 0
    if os.path.exists(f"{folder}/latest"):
        extra = zero.checkpoint.load(folder, model, optimizer)
        step = extra["step"]
        schedule.load_state_dict(extra["schedule"])
        data.set_state(extra["data"])
    while step < steps:
        inputs = torch.randn(12, 32, generator=data)[dist.get_rank() :: dist.get_world_size()]
        optimizer.zero_grad()
        (model(inputs) - inputs.sin()).square().mean().backward()
        optimizer.step()
        schedule.step()
        step += 1
        if step % save_every == 0 or step == steps:
            extra = {"step": step, "schedule": schedule.state_dict(), "data": data.get_state()}
            zero.checkpoint.save(folder, model, optimizer, extra=extra, keep=2)
    return zero.full_state_dict(model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    for name, default in {"--stage": 3, "--steps": 1000, "--save-every": 10}.items():
        parser.add_argument(name, type=int, default=default)
    options = vars(parser.parse_args())
    # All starts share torchrun's store: without a prefix a rank may find the address of one that was killed, and hang.
    store, rank, world = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", store=store, rank=rank, world_size=world)
    weights = train(**options)
    if rank == 0:
        torch.save(weights, f"{options['folder']}/weights.pt")
    dist.destroy_process_group()
