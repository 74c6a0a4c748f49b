"""A wrapper is as its module is: it is indexed as containers are, and takes and returns whatever the module does.
Building it takes no time for ranks other than this one."""

import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import gpus
import ranks
import zero
from runs import sgd


@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(2)
def test_a_wrapper_of_a_sequential_is_one(rank, world, stage):
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    layers = [*net]
    model, _ = zero.setup(net, sgd, stage=stage)
    assert len(model) == 3 and [*model] == layers
    assert model[0] is layers[0] and model[-1] is layers[2] and [*model[1:]] == layers[1:]
    with torch.no_grad():
        inputs = torch.ones(2, 3)
        assert torch.equal(model[2](model[1](model[0](inputs))), model(inputs))
    other, _ = zero.setup(nn.Linear(3, 4), sgd, stage=stage)
    assert other  # which has no length
    for use in (len, iter, lambda model: model[0]):
        with pytest.raises(TypeError, match="Linear"):
            use(other)


@dataclass(frozen=True)
class Shifted:
    values: Tensor
    calls: list[int] = field(default_factory=list)
    shift: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.calls.append(1)
        object.__setattr__(self, "values", self.values + 1)


class Passing(nn.Linear):
    """Computes with the values of what it takes, and returns them in another."""

    def forward(self, x: Any) -> Any:
        return Shifted(super().forward(x.values))


@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(2, timeout=20)
def test_a_dataclass_that_a_module_takes_and_returns_is_not_made_anew(rank, world, stage):
    model, optimizer = zero.setup(Passing(3, 3), sgd, stage=stage)
    found = model(Shifted(torch.ones(2, 3)))
    assert found.calls == [1] and found.shift == 0.0
    found.values.sum().backward()
    optimizer.step()


def calls_in(world: int) -> int:
    """Of functions, in building and in a step, on one of so many ranks."""
    dist.init_process_group("fake", rank=3, world_size=world, store=FakeStore())
    net, count = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), [0]

    def called(frame: Any, event: str, _: Any) -> None:
        count[0] += event == "call"

    sys.setprofile(called)
    optimizer = zero.OSS(net.parameters(), sgd)
    model = zero.ShardedDDP(net, optimizer, reduce_buffer_size=0)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    sys.setprofile(None)
    dist.destroy_process_group()
    return count[0]


@pytest.mark.slow
@gpus.cpu_only("calls of the default device are counted, too")
@ranks.on(bare=True, fresh=True)
def test_building_takes_no_time_for_other_ranks(rank, world):
    few, many = map(calls_in, (8, 4096))
    assert many < 1.5 * few
