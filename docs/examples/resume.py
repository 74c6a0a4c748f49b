"""Goes on from its latest checkpoint whenever it is started, on any number of ranks.

torchrun --nproc-per-node 2 --max-restarts 100 docs/examples/resume.py run
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import zero

# torchrun's starts share a store: keep this one from the addresses of the last.
store, rank, world = next(dist.rendezvous("env://"))
store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world)

run, stage, steps, save_every = sys.argv[1], *map(int, sys.argv[2:] or (3, 1000, 10))
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
model, optimizer = zero.setup(net, torch.optim.AdamW, stage=stage, lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
data = torch.Generator().manual_seed(1)  # alike everywhere: ranks share a batch
resume = [schedule, data]
saved = zero.checkpoint.load(run, model, optimizer, resume=resume, missing_ok=True)
step = saved["step"] if saved else 0
while step < steps:
    inputs = torch.randn(12, 32, generator=data)[rank::world]
    (model(inputs) - inputs.sin()).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    step += 1
    if step % save_every == 0:
        extra = {"step": step}
        zero.checkpoint.save(run, model, optimizer, resume=resume, extra=extra, keep=2)
dist.destroy_process_group()
