"""broadcast_fp16 of OSS and reduce_fp16 of ShardedDDP, beside the same rounding done by hand."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

import gpus
import ranks
import zero
from assertions import same
from optimizers import MOMENTUM
from runs import own_elements
from zoo import OddNet, built, odd_loss

DTYPES = {"fp16": (True, torch.float16), "bf16": (torch.bfloat16, torch.bfloat16)}


class Wide(nn.Module):
    """Has a gradient that is large enough to travel by itself, beside the odd ones of OddNet; one weight is unused."""

    def __init__(self):
        super().__init__()
        self.net = OddNet()
        self.wide = nn.Linear(37, 3000)
        self.unused = nn.Linear(3, 3)

    def forward(self, inputs):
        return torch.tanh(self.wide(self.net.first(inputs))).mean(1, keepdim=True) + self.net(inputs)


def rounded(value, dtype):
    return value.to(dtype).to(value.dtype)


@pytest.mark.parametrize(
    ("name", "cut", "world", "optim", "options"),
    [("fp16", "even", 2, SGD, MOMENTUM), ("bf16", "whole", 2, Adam, {"lr": 0.01}), ("bf16", "even", 3, SGD, MOMENTUM)],
)
@ranks.on("world")
def test_others_get_rounded_values_and_the_owner_keeps_its_precision(rank, world, name, cut, optim, options):
    """Gradients are given, so that what was rounded in one step has no influence on the next gradient."""
    option, dtype = DTYPES[name]
    model, plain = built(), built()
    optimizer = zero.OSS(model.parameters(), optim, partition=cut, broadcast_fp16=option, **options)
    expected = optim(plain.parameters(), **options)
    frozen = model.frozen.detach().clone()
    for step in range(4):
        generator = gpus.generator(step)
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            if param.requires_grad:
                param.grad = torch.randn(param.shape, generator=generator)
                other.grad = param.grad.clone()
        optimizer.step()
        expected.step()
    lost = []
    for (what, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        if param.requires_grad:
            precise = other.detach()
            # The plain optimizer's weights went on unrounded; SGD's decay and Adam read an owner's weights only.
            same(param.detach(), torch.where(own_elements(optimizer, param), precise, rounded(precise, dtype)), what)
            lost.append(not torch.equal(param.detach(), precise))
    same(model.frozen.detach(), frozen, "the frozen parameter")
    assert any(lost)


def by_hand(world, dtype, *numbers):
    """All ranks' gradients in one process, rounded, added up in float32 in the order of ranks and averaged; a step."""
    model, total = built(Wide), {}
    for rank in range(world):
        model.zero_grad()
        for number in numbers:
            odd_loss(model, rank, number).backward()
        for param in model.parameters():
            if param.grad is not None:
                gradient = rounded(param.grad, dtype)
                total[param] = total[param] + gradient if param in total else gradient
    for param, gradient in total.items():
        param.data -= gradient * (1 / world)
    return dict(model.state_dict())


@pytest.mark.parametrize(("world", "held_back", "cut", "name"), [(2, 0, "even", "fp16"), (3, 1, "whole", "bf16")])
@ranks.on("world")
def test_gradients_travel_rounded_once_and_are_added_up_in_float32(rank, world, held_back, name, cut):
    """Under no_sync they add up unrounded; what is sent is the sum."""
    option, dtype = DTYPES[name]
    reduced = []
    for compressed in (False, option):
        model = built(Wide)
        optimizer = zero.OSS(model.parameters(), SGD, partition=cut, lr=1.0)
        wrapped = zero.ShardedDDP(model, optimizer, reduce_fp16=compressed)
        if held_back:
            with wrapped.no_sync():
                odd_loss(wrapped, rank, 0).backward()
        before = zero.traffic()
        odd_loss(wrapped, rank, 1).backward()
        reduced.append((zero.traffic() - before).reduce)
        optimizer.step()
    same(dict(model.state_dict()), by_hand(world, dtype, *range(1 - held_back, 2)), "weights")
    assert 0 < 2 * reduced[1] == reduced[0]


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, "bf16"], ids=str)
@pytest.mark.parametrize("words", ["broadcast_fp16", "reduce_fp16"])
@ranks.raises(2, ValueError, "float16", "bfloat16")
def test_what_is_no_float_of_16_bits_is_refused_when_built(rank, world, words, dtype):
    model = built()
    options = {"broadcast_fp16": dtype} if words == "broadcast_fp16" else {}
    optimizer = zero.OSS(model.parameters(), SGD, lr=0.1, **options)
    zero.ShardedDDP(model, optimizer, reduce_fp16=dtype)
