"""Frozen weights that wrap other tensors (quantised) and are left out of sharding: nobody sends them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.testing._internal.two_tensor import TwoTensor

import gpus
import ranks
import zero
from runs import take_step

WIDTH = 6


class Quantised(nn.Module):
    """Weights as a high and a low shard, and a buffer of the same kind."""

    def __init__(self, device: str = gpus.DEVICE) -> None:
        super().__init__()
        high, low = torch.randn(WIDTH, WIDTH, device=device), torch.randn(WIDTH, WIDTH, device=device) / 64
        self.weight = nn.Parameter(TwoTensor(high, low), requires_grad=False)
        self.register_buffer("scale", TwoTensor(high[0].clone(), low[0].clone()))

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        return x @ (weight.a + weight.b) * (self.scale.a + self.scale.b)


class Net(nn.Module):
    def __init__(self, device: str = gpus.DEVICE) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.adapter, self.norm = Quantised(device), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.base(x) + self.adapter(x))


def trained(wrapped, optimizer, rank):
    losses = []
    for step in range(4):
        x = torch.randn(5, WIDTH, generator=gpus.generator(10 * rank + step))
        losses.append(take_step(optimizer, wrapped(x).square().mean()))
    return losses


def by_ddp(net):
    net._ddp_params_and_buffers_to_ignore = ["base.weight", "base.scale"]
    return DistributedDataParallel(net), SGD(net.adapter.parameters(), lr=0.1, momentum=0.9)


def by_oss(net):
    wrapped, _ = by_ddp(net)
    return wrapped, zero.OSS(net.adapter.parameters(), SGD, lr=0.1, momentum=0.9)


def by_sharded_ddp(net):
    optimizer = zero.OSS(net.adapter.parameters(), SGD, lr=0.1, momentum=0.9)
    net.norm.requires_grad_(False)
    return zero.ShardedDDP(net, optimizer), optimizer


def by_fsdp(net):
    net.norm.requires_grad_(False)
    wrapped = zero.FSDP(net, ignored_modules=[net.base])
    return wrapped, SGD(net.adapter.parameters(), lr=0.1, momentum=0.9)


def by_fsdp_without_the_parameter(net):
    net.norm.requires_grad_(False)
    wrapped = zero.FSDP(net, ignored_parameters=[net.base.weight])
    return wrapped, SGD(net.adapter.parameters(), lr=0.1, momentum=0.9)


WAYS = [by_oss, by_sharded_ddp, by_fsdp, by_fsdp_without_the_parameter]


@pytest.mark.parametrize("wrap", WAYS)
@ranks.on(2, timeout=20)
def test_quantised_weights_left_out_of_sharding_stay_as_they_are(rank, world, wrap):
    plain = Net()
    expected = trained(*by_ddp(plain), rank)
    net = Net()
    wrapped, optimizer = wrap(net)
    assert trained(wrapped, optimizer, rank) == expected
    with torch.no_grad():
        net.base.weight.a.add_(rank)  # each rank's own
    if isinstance(wrapped, zero.FSDP):
        wrapped.apply(lambda module: None)
    elif isinstance(wrapped, zero.ShardedDDP):
        wrapped.sync_buffers()
    weights = zero.full_state_dict(wrapped, device=None, to=None)
    assert torch.equal(weights["adapter.weight"], plain.adapter.weight)
    assert torch.equal(weights["base.weight"].a, plain.base.weight.a + rank)
    wrapped.load_state_dict(wrapped.state_dict())
    assert torch.equal(net.base.weight.b, plain.base.weight.b)


@ranks.raises(2, ValueError, "'base.weight' is a TwoTensor on the meta device", timeout=20)
def test_quantised_weights_without_values_are_refused_as_nobody_could_send_them(rank, world):
    by_fsdp(Net("meta" if rank else "cpu"))
