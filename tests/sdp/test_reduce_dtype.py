"""precision=MixedPrecision(reduce_dtype=): 16 bits on the wire alone, beside the same rounding done by hand."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

import ranks
import zero
from assertions import same
from zoo import OddNet, built, odd_loss


class Wide(nn.Module):
    """Has a gradient that is large enough to travel by itself, beside the odd ones of OddNet; one weight is unused."""

    def __init__(self):
        super().__init__()
        self.net = OddNet()
        self.wide = nn.Linear(37, 3000)
        self.unused = nn.Linear(3, 3)

    def forward(self, inputs):
        return torch.tanh(self.wide(self.net.first(inputs))).mean(1, keepdim=True) + self.net(inputs)


def by_hand(world, dtype, *numbers):
    """All ranks' gradients in one process, rounded, added up in float32 in the order of ranks and averaged; a step."""
    model, total = built(Wide), {}
    for rank in range(world):
        model.zero_grad()
        for number in numbers:
            odd_loss(model, rank, number).backward()
        for param in model.parameters():
            if param.grad is not None:
                gradient = param.grad.to(dtype).float()
                total[param] = total[param] + gradient if param in total else gradient
    for param, gradient in total.items():
        param.data -= gradient * (1 / world)
    return dict(model.state_dict())


CASES = [(2, 0, "even", torch.float16), (3, 1, "whole", torch.bfloat16)]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("world", "held_back", "cut", "dtype"), CASES)
@ranks.on("world")
def test_gradients_travel_rounded_once_and_are_added_up_in_float32(rank, world, held_back, dtype, cut, stage):
    """Under no_sync they add up unrounded; what is sent is the sum."""
    reduced = []
    for sent_as in (None, dtype):
        policy = zero.MixedPrecision(reduce_dtype=sent_as)
        model, optimizer = zero.setup(built(Wide), SGD, stage=stage, partition=cut, precision=policy, lr=1.0)
        if held_back:
            with zero.no_sync(model):
                odd_loss(model, rank, 0).backward()
        before = zero.traffic()
        odd_loss(model, rank, 1).backward()
        reduced.append((zero.traffic() - before).reduce)
        optimizer.step()
    same(zero.full_state_dict(model, to=None), by_hand(world, dtype, *range(1 - held_back, 2)), "weights")
    assert 0 < 2 * reduced[1] <= reduced[0]
    assert stage == 1 or 2 * reduced[1] == reduced[0]  # there float32 averages travel, too
