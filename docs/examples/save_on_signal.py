"""Saves and ends when a signal reaches any one rank; started again, it goes on.

torchrun --nproc-per-node 2 docs/examples/save_on_signal.py run
"""

import signal
import sys

import torch
import torch.distributed as dist
from torch import nn

import zero

dist.init_process_group("gloo")
signals: list[int] = []
for number in (signal.SIGUSR1, signal.SIGTERM):  # what clusters send
    signal.signal(number, lambda received, frame: signals.append(received))
of_cpus = dist.new_group(backend="gloo")  # NCCL's answer would wait for the GPU

run, steps = sys.argv[1], 1000
net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(), nn.Linear(64, 32))
model, optimizer = zero.setup(net, torch.optim.AdamW, stage=3, lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
torch.manual_seed(1 + dist.get_rank())  # of this rank's data and dropout
saved = zero.checkpoint.load(run, model, optimizer, resume=schedule, missing_ok=True)
step, told = saved["step"] if saved else 0, torch.tensor(0)
while step < steps and not told:
    inputs = torch.randn(12, 32)
    (model(inputs) - inputs.sin()).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    step, told = step + 1, torch.tensor(len(signals))
    dist.all_reduce(told, group=of_cpus)  # so that all stop after the same step
zero.checkpoint.save(run, model, optimizer, resume=schedule, extra={"step": step})
dist.destroy_process_group()
