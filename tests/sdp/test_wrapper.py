"""A wrapper is as its module is: it is indexed as containers are, and takes and returns whatever the module does.
Building it takes no time for ranks other than this one."""

import gc
import sys
import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.testing._internal.distributed.fake_pg import FakeStore

import gpus
import ranks
import zero
from rows import Rows, trains
from runs import sgd, take_step
from transports import TRANSPORTS, by
from zoo import WIDTH, Stack, batch, built, loss_on


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


# Wrappers that come and go, parameters that are frozen meanwhile, and ranks that do not do the same.


def sharded(model: nn.Module, optim: Any = SGD) -> tuple[nn.Module, Any]:
    return zero.setup(model, partial(optim, lr=0.1), stage=2)


def train(model: nn.Module, optimizer: Any, rank: int) -> None:
    for step in range(2):
        take_step(optimizer, loss_on(rank, step)(model))


def weights(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


@ranks.on(2)
def test_a_module_that_is_wrapped_again_is_trained_by_the_new_one(rank, world):
    model, other = Stack(), Stack()
    first = sharded(model)
    train(*first, rank)
    with pytest.raises(ValueError, match=r"module\.zero_grad"):
        sharded(model, Adam)
    model.zero_grad()
    again = sharded(model, Adam)
    train(*sharded(other), rank)
    other.zero_grad()
    expected = sharded(other, Adam)
    train(*again, rank)
    train(*expected, rank)
    assert torch.equal(weights(model), weights(other)) and not torch.equal(weights(model), weights(Stack()))
    with pytest.raises(RuntimeError, match="replaced by another"):
        loss_on(rank, 0)(first[0])


@ranks.on(2)
def test_without_its_wrapper_a_module_is_a_plain_one_and_everything_is_freed(rank, world):
    model = Stack()
    wrapped, optimizer = sharded(model)
    train(wrapped, optimizer, rank)
    watched = [weakref.ref(one) for one in (wrapped, optimizer, model)]
    del wrapped, optimizer
    gc.collect()
    if rank:  # alone
        loss_on(rank, 0)(model).backward()
        assert all(param.grad is not None for param in model.parameters())
    assert [one() for one in watched] == [None, None, model]
    del model
    gc.collect()
    assert watched[2]() is None


def freezing(*names: str) -> Any:
    """Layers are frozen for a second loss, as discriminators are for a generator's."""

    def program(t: Any, i: int) -> None:
        first = t.loss(i)
        frozen = [t.n.get_submodule(name).requires_grad_(False) for name in names]
        second = t.loss(10 + i)
        for layer in frozen:
            layer.requires_grad_(True)
        t.update(first + second)

    return program


row = Rows("layers are frozen for a second forward", __name__)


def frozen_when_backward_comes(t: Any, i: int) -> None:
    """Nothing is trained."""
    loss = t.loss(i)
    t.n.requires_grad_(False)
    (loss + t.m(t.batch(10 + i).requires_grad_()).square().mean()).backward()
    t.n.requires_grad_(True)
    t.update(None)
    trains(t, 20 + i)


row.of("the last one", freezing("last"))
row.of("all", freezing("first", "blocks", "last"))
row.of("all, which they still are when backward comes", frozen_when_backward_comes, same={2})
test_rows = row.tests()


# What wrapping and forwards send of a model: its weights at the start, and buffers, also those that become others.


LENGTH = 4


class Cached(nn.Module):
    """Multiplies by a table that is made as long as the longest input yet."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3)
        self.register_buffer("table", torch.ones(LENGTH))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > len(self.table):
            self.table = torch.arange(1.0, len(x) + 1)
        self.steps += 1
        return self.line(x) * self.table[: len(x), None]


def grown(rank: int, world: int, stage: int, lengths: list[int], transport: str) -> list[float]:
    with by(transport):
        model, _ = zero.setup(Cached(), partial(SGD, lr=0.1), stage=stage)
        for length in (LENGTH, lengths[rank], 2):
            model(torch.ones(length, 3)).sum().backward()
    return [*model.module.table.tolist(), model.module.steps.item()]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "lengths", "transport"), [(2, [6, 4], TRANSPORTS[-1]), (3, [6, 5], TRANSPORTS[0])])
def test_buffers_of_other_sizes_on_other_ranks_are_refused_on_every_rank(stage, lengths, transport):
    """With the remedy, where one rank alone has another."""
    error = "ValueError" if 4 not in lengths else "RuntimeError"
    told = ranks.expect_error(grown, 2, error, args=(stage, lengths, transport), timeout=20)
    if 4 in lengths:
        assert "table: [6], torch.float32" in told[0] and "broadcast_buffers=False" in told[0]
    else:
        assert all("rank 0 has table: [6], torch.float32, rank 1 has table: [5]" in each for each in told)


@pytest.mark.parametrize("stage", [2, 3])
def test_buffers_that_become_the_same_on_every_rank_go_on_being_those_of_the_first(stage):
    expected = [*range(1, 7), 3]
    assert ranks.run(grown, args=(stage, [6, 6], TRANSPORTS[0])) == [expected] * 2


class Normed(nn.Sequential):
    """Other weights and buffers on each rank unless they are `alike`."""

    def __init__(self, rank: int = 0) -> None:
        torch.manual_seed(rank)
        super().__init__(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        self[1].running_mean += rank
        self[0].bias.requires_grad_(False)


def with_buffers(model: nn.Module, **options: bool) -> zero.ShardedDDP:
    return zero.ShardedDDP(model, zero.OSS(model.parameters(), sgd), **options)


@ranks.on(2)
def test_buffers_are_in_step_when_asked(rank, world):
    """After a forward each rank has those of its own data."""
    wrapped = with_buffers(built(Normed), broadcast_buffers=False)
    wrapped(batch(rank, 0))
    both = [torch.empty(16), torch.empty(16)]
    for apart in (True, False):
        torch.distributed.all_gather(both, wrapped.module[1].running_mean)
        assert torch.equal(*both) != apart
        before = both[0].clone()
        wrapped.sync_buffers()
    assert torch.equal(wrapped.module[1].running_mean, before)


@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(2)
def test_what_is_registered_after_wrapping_stays_each_ranks_own(rank, world, stage):
    """As with DistributedDataParallel."""
    model, _ = zero.setup(Normed(), sgd, stage=stage)
    model.module[0].register_buffer("late", torch.tensor(float(rank)))
    for step in range(2):
        model(batch(rank, step)).sum().backward()
    assert model.module[0].late == rank


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.raises(2, ValueError, "is of TorchScript.*torch.compile", timeout=15)
def test_modules_of_torchscript_are_refused(rank, world, stage):
    """Inside of others those that take no hooks are none of the wrapper's at stages 1 and 2."""
    made = torch.jit.trace(nn.Linear(WIDTH, 3), batch(0, 0))
    zero.setup(nn.Sequential(nn.Linear(WIDTH, WIDTH), made) if stage == 3 else made, sgd, stage=stage)


@ranks.on(2)
def test_models_start_as_the_first_ranks_or_as_they_are(rank, world):
    sent = []
    for sync in (False, True):
        model, before = Normed(rank), zero.traffic()
        with_buffers(model, sync_models_at_startup=sync)
        sent.append((zero.traffic() - before).total)
        expected = Normed(0 if sync else rank).state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert rank or sent[1] >= sent[0] + sum(param.nbytes for param in model.parameters())
