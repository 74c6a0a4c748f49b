"""Saves every few steps, and once a signal reaches any one rank. Started again, on any number of ranks, it goes on.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 2 --max-restarts 100 \
    docs/examples/resume.py run
"""

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import zero

signals: list[int] = []
for number in (signal.SIGUSR1, signal.SIGTERM):  # what clusters send
    signal.signal(number, lambda received, frame: signals.append(received))
timeout = timedelta(minutes=5)  # after which a host that is lost ends the others; longer than a save takes
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timeout)
rank, world = dist.get_rank(), dist.get_world_size()
of_cpus = dist.new_group(backend="gloo", timeout=timeout)  # NCCL's answer would wait for the GPU


def summed(*numbers: float) -> list[float]:
    """Over all ranks."""
    sums = torch.tensor(numbers)
    dist.all_reduce(sums, group=of_cpus)
    return [*map(float, sums)]


run, stage, steps, save_every = sys.argv[1], *map(int, sys.argv[2:] or (3, 1000, 10))
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(device)
model, optimizer = zero.setup(net, torch.optim.AdamW, stage=stage, lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
data = torch.Generator().manual_seed(1)  # alike everywhere: ranks share a batch
resume = [schedule, data]
saved = zero.checkpoint.load(run, model, optimizer, resume=resume, missing_ok=True)
step, told = saved["step"] if saved else 0, 0.0
while step < steps and not told:
    inputs = torch.randn(12, 32, generator=data)[rank::world].to(device)
    loss = (model(inputs) - inputs.sin()).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    step += 1
    told, total = summed(len(signals), loss.item())  # all stop after the same step
    if rank == 0:
        print(f"step {step} loss {total / world}", flush=True)
    if step % save_every == 0 or told:
        extra = {"step": step}
        zero.checkpoint.save(run, model, optimizer, resume=resume, extra=extra, keep=2)
dist.destroy_process_group()
if told and not signals:  # torchrun is to start anew, without the machine that leaves
    sys.exit("another rank was told to end")
