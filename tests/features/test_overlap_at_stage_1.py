"""zero.setup(stage=1, offload=CPUOffload(overlap=True)): DistributedDataParallel waits for what outlives `step`."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import ranks
import zero
from features.test_offload_overlap import WIDTH, Slow, offload_of, overlapping
from features.test_oss_offload import Apart
from sidebyside import data
from zero.interop.ddp import OverlappingDDP
from zero.oss.optimizer import set_bucket_size


class Net(nn.Module):
    """Weights are read by their own modules, by the net itself, tied, and in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(0.9))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.conv(x.view(-1, 2, 3, 2)).sum(1).repeat(1, 2, 1).flatten(1)[:, :WIDTH])
        for block in self.blocks:
            x = torch.tanh(block(x))
        return nn.functional.linear(x * self.scale, self.blocks[0].weight.t())


def built(overlap: bool, optim: Any = AdamW, offload: Any = None) -> tuple[Any, zero.OSS]:
    """In buckets of a layer or less."""
    offload = offload or offload_of(1, overlap)
    model, optimizer = zero.setup(Net(), optim, stage=1, lr=0.05, offload=offload)
    set_bucket_size(optimizer, 100)
    return model, optimizer


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    return (model(data(4, WIDTH, rank=rank, step=step)) - 1).square().mean()


def train(model: nn.Module, optimizer: zero.OSS, rank: int, steps: int) -> None:
    """Ends with a step."""
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def pending(optimizer: zero.OSS) -> int:
    return sum(group.gathering for group in optimizer.shards.shard_groups)


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


READERS: dict[str, Any] = {
    "state_dict": lambda model: model.state_dict(),
    "state_dict of the module": lambda model: inner(model).state_dict(),
    "state_dict of a child": lambda model: inner(model).blocks[1].state_dict(),
    "the module": lambda model: [param.detach().clone() for param in model.module.parameters()],
    "parameters": lambda model: [param.detach().clone() for param in model.parameters()],
    "modules": lambda model: [module.weight.detach() for module in model.modules() if hasattr(module, "weight")],
    "a copy": lambda model: copy.deepcopy(model).state_dict(),
    "a copy of the module": lambda model: copy.deepcopy(model.module).state_dict(),
    "an average": lambda model: averaged(model),
    "a forward of the module": lambda model: inner(model).eval()(data(4, WIDTH, rank=0)).detach(),
    "an evaluation": lambda model: evaluated(model),
    "other weights": lambda model: loaded(model),
}


def inner(model: nn.Module) -> Any:
    """As a reference that was kept from before."""
    return model._modules["module"]


def averaged(model: Any) -> Any:
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    return average.state_dict()


def loaded(model: nn.Module) -> Any:
    model.load_state_dict({f"module.{name}": value for name, value in Net().state_dict().items()})
    return model.state_dict()


def evaluated(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(data(4, WIDTH, rank=0))


@ranks.on(2, timeout=30)
def test_whoever_reads_right_after_the_step_gets_what_was_stepped(rank, world):
    plain, overlapping = built(False), built(True)
    for step, (name, read) in enumerate(READERS.items()):
        for model, optimizer in (plain, overlapping):
            model.train()
            train(model, optimizer, rank, 1 + step % 2)
        assert pending(overlapping[1]), name
        same(read(overlapping[0]), read(plain[0]))
        assert not pending(overlapping[1]), name


@ranks.on(2)
def test_forward_waits_for_what_it_reads_when_it_reads_it(rank, world):
    model, optimizer = built(True)
    train(model, optimizer, rank, 2)
    waiting = [pending(optimizer)]
    for block in inner(model).blocks:
        block.register_forward_hook(lambda *_: waiting.append(pending(optimizer)))
    loss_of(model, rank, 2)
    assert len({*waiting}) == 4 and waiting == sorted(waiting, reverse=True) and not pending(optimizer)


@ranks.on(2)
def test_gradients_lie_as_without(rank, world):
    """DistributedDataParallel lays them out in the second forward, as parameters lie."""
    strides = []
    for overlap in (False, True):
        model, optimizer = built(overlap)
        train(model, optimizer, rank, 3)
        strides.append([param.grad.stride() for param in model.parameters()])
    assert strides[0] == strides[1]
    assert not model.module.conv.weight.grad.is_contiguous()


class Counts:
    """A backend that counts graphs."""

    graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


@ranks.on(2, timeout=60)
def test_compiled_it_waits_for_all_at_once_and_is_compiled_once(rank, world):
    weights, graphs = [], []
    for overlap in (False, True):
        torch._dynamo.reset()
        model, optimizer = built(overlap)
        backend = Counts()
        train(torch.compile(model, backend=backend), optimizer, rank, 4)
        weights.append(model.state_dict())
        graphs.append(backend.graphs)
    same(*weights)
    assert graphs[0] == graphs[1] > 0


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2, timeout=30)
def test_ranks_may_have_different_numbers_of_batches(rank, world, stage):
    weights = []
    for overlap in (False, True):
        model, optimizer = zero.setup(
            Net(), partial(SGD, momentum=0.9), stage=stage, lr=0.05, offload=offload_of(stage, overlap)
        )
        with zero.join(model, optimizer):
            train(model, optimizer, rank, 2 + 2 * rank)
        weights.append(zero.full_state_dict(model))
    same(*weights)


@ranks.on(2)
def test_models_that_users_wrap_have_been_stepped_when_step_returns(rank, world):
    weights = []
    for overlap in (False, True):
        net = Net()
        optimizer = zero.OSS(net.parameters(), AdamW, lr=0.05, offload=offload_of(1, overlap))
        set_bucket_size(optimizer, 100)
        train(DistributedDataParallel(net), optimizer, rank, 3)
        assert not pending(optimizer)
        weights.append(net.state_dict())
    same(*weights)


def test_without_a_process_group_step_returns_when_it_has_stepped():
    net = Net()
    model, optimizer = zero.setup(net, SGD, stage=1, lr=0.05, offload=overlapping(1))
    train(model, optimizer, 0, 2)
    assert model is net and not any(param.isnan().any() for param in net.parameters())


@ranks.on(2)
def test_only_what_overlaps_is_wrapped_so(rank, world):
    for offload, expected in ((overlapping(1, Slow), OverlappingDDP), (Apart(), DistributedDataParallel)):
        assert type(built(True, offload=offload)[0]) is expected
