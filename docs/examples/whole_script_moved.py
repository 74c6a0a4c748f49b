"""Trains a small model with all that a training script has: torchrun --nproc-per-node 2 whole_script.py --epochs 4"""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import zero

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--fp16", action="store_true")
args = parser.parse_args()

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
inputs = torch.randn(640, 32)
data = TensorDataset(inputs, 3 * inputs.roll(1, dims=1).sin())
training, held_out = torch.utils.data.random_split(data, [512, 128])
sampler: DistributedSampler = DistributedSampler(training)
loader = DataLoader(training, batch_size=16, sampler=sampler)
held_out_loader = DataLoader(held_out, batch_size=16, sampler=DistributedSampler(held_out))

net = nn.Sequential(nn.Linear(32, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 32)).to(device)
decayed = [param for param in net.parameters() if param.dim() > 1]
others = [param for param in net.parameters() if param.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=3e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
model, optimizer = zero.setup(net, optimizer, stage=3)
average = zero.EMA(model, decay=0.9)
scaler = torch.amp.GradScaler(device.type, enabled=args.fp16)
autocast = torch.autocast(device.type, torch.float16, enabled=args.fp16)
if rank == 0:
    print(f"{sum(param.numel() for param in model.parameters())} parameters")


def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    with autocast:
        outputs = model(inputs.to(device))
    return nn.functional.mse_loss(outputs.float(), targets.to(device))


def evaluate() -> float:
    model.eval()
    with torch.no_grad():
        loss = torch.stack([loss_of(*batch) for batch in held_out_loader]).mean()
    model.train()
    dist.all_reduce(loss)
    return loss.item() / world


saved = zero.checkpoint.load("run", model, [optimizer, average], resume=[schedule, scaler], missing_ok=True)
for epoch in range(saved["epoch"] if saved else 0, args.epochs):
    sampler.set_epoch(epoch)
    for number, batch in enumerate(loader, 1):
        steps = number % args.accumulate == 0
        with nullcontext() if steps else model.no_sync():
            loss = loss_of(*batch) / args.accumulate
            scaler.scale(loss).backward()
        if steps:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            average.update()
            optimizer.zero_grad()
    evaluated, weight = evaluate(), next(net.parameters()).norm().item()
    if rank == 0:
        print(f"epoch {epoch}: loss {evaluated:.4f}, gradients {norm:.4f}, first weight {weight:.4f}")
    zero.checkpoint.save("run", model, [optimizer, average], resume=[schedule, scaler], extra={"epoch": epoch + 1})
dist.destroy_process_group()
