"""A trainer hands its weights to an inference engine after every round, tensor by tensor, at any stage.

    python docs/examples/weights_to_an_engine.py
    torchrun --nproc-per-node 2 docs/examples/weights_to_an_engine.py

The engine is a plain module here. Engines take such an iterator of pairs of name and tensor, as vLLM's load_weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))


class Engine:
    """Holds full weights on rank 0."""

    def __init__(self) -> None:
        self.module = network()

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        own = dict(self.module.named_parameters())
        for name, value in weights:  # one tensor at a time: nobody holds a second model
            own[name].copy_(value)


def main(rounds: int = 3, stage: int = 3) -> float:
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, optimizer = zero.setup(network(), torch.optim.Adam, stage=stage, lr=1e-2)
    engine, loss = Engine(), torch.zeros(())
    for _ in range(rounds):
        for _ in range(10):
            inputs = torch.randn(32, 8)
            loss = (model(inputs) - inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        engine.load_weights(zero.full_tensors(model, to=0))  # collective: the others send, and iterate over nothing
    inputs, trained = torch.randn(32, 8), model.eval()
    with torch.no_grad():
        return float((engine.module(inputs) - trained(inputs)).abs().max())  # 0.0 on rank 0


if __name__ == "__main__":
    print(f"the engine differs from the trainer by {main()}")
