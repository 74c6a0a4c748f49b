"""broadcast_fp16 of OSS and reduce_fp16 of ShardedDDP, beside the same rounding done by hand."""

import itertools

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

import gpus
import matrix
import ranks
import zero
from assertions import same
from optimizers import MOMENTUM
from runs import own_elements
from zoo import OddNet, built, odd_loss

DTYPES = {"fp16": (True, torch.float16), "bf16": (torch.bfloat16, torch.bfloat16)}
CUTS = ["even", "whole"]


class Wide(nn.Module):
    """Has a gradient that is large enough to travel by itself, beside the odd ones of OddNet; one weight is unused."""

    def __init__(self):
        super().__init__()
        self.net = OddNet()
        self.wide = nn.Linear(37, 3000)
        self.unused = nn.Linear(3, 3)

    def forward(self, inputs):
        return torch.tanh(self.wide(self.net.first(inputs))).mean(1, keepdim=True) + self.net(inputs)


def sent(kind, call):
    """Bytes."""
    before = zero.traffic()
    call()
    return getattr(zero.traffic() - before, kind)


def rounded(value, dtype):
    return value.to(dtype).to(value.dtype)


@pytest.mark.parametrize(("optim", "options"), [(SGD, MOMENTUM), (Adam, {"lr": 0.01})])
@matrix.combined("name, cut, world", DTYPES, CUTS, [2, 3])
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


@ranks.on(2)
def test_half_as_many_bytes_are_gathered_unless_they_are_of_16_bits_already(rank, world):
    finals, gathered = [], []
    for dtype, option in itertools.product((torch.float32, torch.bfloat16, torch.float64), (True, False)):
        model = built(lambda: nn.Linear(64, 64)).to(dtype)
        optimizer = zero.OSS(model.parameters(), SGD, broadcast_fp16=option, **MOMENTUM)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        gathered.append(sent("gather", optimizer.step))
        finals.append([param.detach() for param in model.parameters()])
    same(finals[2], finals[3], "weights of 16 bits")
    assert 0 < 2 * gathered[0] == gathered[1]
    assert gathered[2] == gathered[3] == gathered[4], "of 16 and of 64 bits"


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


OF_GRADIENTS = [(False, "even", "fp16"), (True, "whole", "bf16")]
ON_THREE = [pytest.param(3, held, cut, name, marks=pytest.mark.slow) for held, cut, name in OF_GRADIENTS]


@pytest.mark.parametrize(("world", "held_back", "cut", "name"), [*((2, *case) for case in OF_GRADIENTS), *ON_THREE])
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
        reduced.append(sent("reduce", odd_loss(wrapped, rank, 1).backward))
        optimizer.step()
    same(dict(model.state_dict()), by_hand(world, dtype, *range(1 - held_back, 2)), "weights")
    assert 0 < 2 * reduced[1] == reduced[0]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e5m2, "bf16"], ids=str)
@pytest.mark.parametrize("words", ["broadcast_fp16", "reduce_fp16"])
@ranks.raises(2, ValueError, "float16", "bfloat16")
def test_what_is_no_float_of_16_bits_is_refused_when_built(rank, world, words, dtype):
    """As integers parameters and gradients would be cut off, and Gloo does not move floats of 8 bits."""
    model = built()
    options = {"broadcast_fp16": dtype} if words == "broadcast_fp16" else {}
    optimizer = zero.OSS(model.parameters(), SGD, lr=0.1, **options)
    zero.ShardedDDP(model, optimizer, reduce_fp16=dtype)
