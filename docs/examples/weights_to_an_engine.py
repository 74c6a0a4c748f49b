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


def main(stage: int = 3, rounds: int = 3) -> float:
    engine = Engine(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
    model, optimizer = zero.setup(net, torch.optim.Adam, stage=stage, lr=1e-2)
    for step in range(10 * rounds):
        inputs = torch.randn(32, 8)
        (model(inputs) - inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:  # collective: the other ranks send, and get nothing
            engine.load_weights(zero.full_tensors(model, to=0))
    return float((engine(inputs) - model(inputs)).detach().abs().max())


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun sets it
        dist.init_process_group("gloo")
    print(f"the engine differs from the trainer by {main()}")  # 0.0 on rank 0
