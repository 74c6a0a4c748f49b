"""Hands its weights to an inference engine after every round, tensor by tensor.

torchrun --nproc-per-node 2 docs/examples/weights_to_an_engine.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import zero


class Engine(nn.Sequential):
    """Stands for one that takes pairs of name and tensor, as vLLM's load_weights."""

    def load_weights(self, weights):
        for name, value in weights:  # nobody holds a second model
            self.get_parameter(name).data.copy_(value)


if "RANK" in os.environ:  # torchrun sets it
    dist.init_process_group("gloo")
engine = Engine(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
model, optimizer = zero.setup(net, torch.optim.Adam, stage=3, lr=1e-2)
for step in range(30):
    inputs = torch.randn(32, 8)
    (model(inputs) - inputs).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 9:  # collective: the other ranks send, and get nothing
        engine.load_weights(zero.full_tensors(model))
differs = (engine(inputs) - model(inputs)).abs().max().item()
print(f"the engine differs from the trainer by {differs}")  # 0.0 on rank 0
