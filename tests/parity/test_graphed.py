"""Replays of a step as one CUDA graph train to the bits of steps by the host; on the CPU nothing is recorded."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

import gpus
import ranks
import zero
from runs import STAGES
from zero.graphs import WARM_UP
from zoo import Stack, batch

GRAPHED: dict[str, Callable[..., Any]] = {
    "0": partial(zero.setup, stage=0),
    "1": partial(zero.setup, stage=1),
    "2": partial(zero.setup, stage=2),
    "3": partial(zero.setup, stage=3),
    "3 kept": STAGES["3 kept"],
    "2 bf16": partial(zero.setup, stage=2, precision="bf16"),
    "3 bf16": partial(zero.setup, stage=3, precision="bf16"),
}


@pytest.mark.parametrize("stage", GRAPHED)
@ranks.on(2, timeout=60)
def test_replays_train_to_the_bits_of_steps_by_the_host(rank, world, stage):
    found = []
    for wraps in (lambda step, *_: step, zero.graphed):
        torch.manual_seed(0)
        rate = torch.tensor(1e-2)
        adam = partial(AdamW, lr=rate, capturable=gpus.ON)
        # DistributedDataParallel is not recorded on the default stream; the others may have been built there.
        stream = torch.cuda.Stream() if gpus.ON and stage in "01" and wraps is zero.graphed else None
        with torch.cuda.stream(stream):
            model, optimizer = GRAPHED[stage](Stack(), adam)

        def train(inputs: Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            loss = model(inputs).float().square().mean()
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        with torch.cuda.stream(stream):
            step, losses = wraps(train, model, optimizer), []
        for number in range(WARM_UP + 6):
            rate.fill_(1e-2 / (number + 1))
            losses.append(step(batch(rank, number)))
        found.append([float(loss.detach()) for loss in losses])
        found.append({name: value.tolist() for name, value in zero.full_state_dict(model, to=None).items()})
    assert found[0] == found[2] and found[1] == found[3]
