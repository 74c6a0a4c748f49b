"""A training run that saves and ends when a signal reaches any one of its ranks, and goes on when it is started again.

    torchrun --nproc-per-node 2 docs/examples/save_on_signal.py runs/first --steps 1000

A cluster sends SIGUSR1 or SIGTERM before it takes a machine away, often to one process alone. On as many ranks as
before the weights are bit for bit those of a run that was never stopped, with dropout, schedule and random data.
"""

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch import nn

import zero


def train(folder: str, *, steps: int, device: str = "cpu") -> dict[str, torch.Tensor] | None:
    """Returns the weights after `steps` steps, or None if a signal came before."""
    signals: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda received, frame: signals.append(received))  # in the middle of a step: only noted
    of_cpus = dist.new_group(backend="gloo")  # over NCCL, reading the answer would wait for the GPU in every step

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32)).to(device)
    model, optimizer = zero.setup(model, torch.optim.AdamW, stage=3, lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    torch.manual_seed(1 + dist.get_rank())  # each rank draws its own data and dropout
    step = 0
    if os.path.exists(f"{folder}/latest"):
        step = zero.checkpoint.load(folder, model, optimizer, resume=schedule)["step"]
    while step < steps:
        inputs = torch.randn(12, 32).to(device)
        optimizer.zero_grad()
        (model(inputs) - inputs.sin()).square().mean().backward()
        optimizer.step()
        schedule.step()
        step += 1
        told = torch.tensor(len(signals))
        dist.all_reduce(told, dist.ReduceOp.MAX, of_cpus)  # so that all ranks stop after the same step
        if told or step == steps:
            zero.checkpoint.save(folder, model, optimizer, resume=schedule, extra={"step": step}, keep=2)
        if told:
            return None
    return zero.full_state_dict(model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=1000)
    given = parser.parse_args()
    gpu = torch.cuda.is_available()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) if gpu else None
    dist.init_process_group("nccl" if gpu else "gloo")
    train(given.folder, steps=given.steps, device="cuda" if gpu else "cpu")
    dist.destroy_process_group()
