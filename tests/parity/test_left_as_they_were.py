"""What wrapping and training leave as it was: torch's random numbers, what is full after a forward whose loss was
dropped, and memory, which is free at once after the last references to model and optimizer, as with
DistributedDataParallel: no circle of objects waits for the garbage collector."""

import copy
import gc
import tracemalloc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

import gpus
import ranks
import zero
from assertions import plain, same
from inner import shard_groups
from optimizers import Moments
from rows import Net, adam
from runs import SideBySide, average_gradients, take_step
from transports import READS, TRANSPORTS, by
from zero.comm.oplog import GATHER, REDUCTION, Log
from zoo import WIDTH, Stack, data, loss_on


def elements(model: zero.FSDP) -> int:
    return sum(plain(param).numel() for param in model.parameters())


@pytest.mark.parametrize("stage", range(4))
@ranks.on(2)
def test_no_random_number_is_drawn(rank, world, stage):
    net = Net()
    before = torch.get_rng_state()
    model, optimizer = zero.setup(net, adam, stage=stage)
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    assert torch.equal(torch.get_rng_state(), before)


@ranks.on(2)
def test_reshard_releases_what_a_dropped_loss_left_full(rank, world):
    model, _ = zero.setup(Net(), adam, stage=3)
    at_rest = elements(model)
    model(torch.ones(2, WIDTH))
    assert elements(model) > at_rest
    model.reshard()
    assert elements(model) == at_rest


@ranks.on(2)
def test_a_frozen_model_that_is_called_with_gradients_keeps_nothing_of_its_forwards(rank, world):
    """As a teacher in a DDP script, without torch.no_grad()."""
    teacher = zero.FSDP(Stack(classes=WIDTH, blocks=2).requires_grad_(False)).eval()
    model, optimizer = zero.setup(Net(), adam, stage=3)
    sizes = []
    for i in range(150):
        (model(data(4, WIDTH, rank=rank, step=i)) - teacher(data(4, WIDTH, rank=rank, step=i))[:, :3]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if i == 20:
            tracemalloc.start()
        if i in (60, 149):
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    # A record a unit and forward would take 70,000; Python 3.13 goes on caching, 30,000 until it has enough.
    assert sizes[1] - sizes[0] < 45_000, sizes


@ranks.on(2)
def test_a_step_that_finds_memory_held_by_numpy_raises_on_every_rank_and_the_next_one_works(rank, world):
    net = Net()
    model, optimizer = zero.setup(net, adam, stage=3)
    reference, other = zero.setup(copy.deepcopy(Net()), adam, stage=0)
    zero.load_full_state_dict(reference, zero.full_state_dict(model, to=None))
    for i in range(3):
        for one, stepper in ((model, optimizer), (reference, other)):
            one(data(4, WIDTH, rank=rank, step=i)).square().mean().backward()
            if one is model:
                one(data(4, WIDTH, rank=rank, step=i))  # leaves the root unsharded
                kept = net.first.weight.detach().numpy() if rank == 0 else None
                with pytest.raises(RuntimeError, match="NumPy"):
                    stepper.step()
                del kept
            stepper.step()
            stepper.zero_grad()
    same(zero.full_state_dict(model, to=None), zero.full_state_dict(reference, to=None))


@pytest.mark.parametrize("transport", TRANSPORTS)
@ranks.on(2)
def test_torch_export_of_a_sharded_model_is_refused_and_leaves_it_whole(rank, world, transport):
    with by(transport):
        model, optimizer = zero.setup(Net(), adam, stage=3)
        for what in (model, model.module):
            with pytest.raises(RuntimeError, match=r"zero\.unwrap"):
                torch.export.export(what, (torch.ones(2, WIDTH),), strict=False)
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
        assert len(zero.full_state_dict(model, to=None)) == len(Net().state_dict())


Use = Callable[[Any, Any, Tensor], object]


def trains(model: Any, optimizer: Any, x: Tensor) -> None:
    for _ in range(3):
        take_step(optimizer, model(x).square().mean())


def accumulates(model: Any, optimizer: Any, x: Tensor) -> None:
    for sync in (False, True):
        if sync:
            model(x).sum().backward()
        else:
            with zero.no_sync(model):
                model(x).sum().backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def is_saved(model: Any, optimizer: Any, x: Tensor) -> None:
    trains(model, optimizer, x)
    zero.load_full_state_dict(model, zero.full_state_dict(model, to=None))
    zero.load_full_optimizer_state_dict(model, optimizer, zero.full_optimizer_state_dict(model, optimizer, to=None))
    optimizer.load_state_dict(optimizer.state_dict())
    trains(model, optimizer, x)


def is_hooked(model: Any, optimizer: Any, x: Tensor) -> None:
    optimizer.register_step_pre_hook(lambda *_: None)
    StepLR(optimizer, 1)
    trains(model, optimizer, x)


def is_evaluated(model: Any, optimizer: Any, x: Tensor) -> None:
    model.eval()
    with torch.no_grad():
        model(x)


def breaks_off(model: Any, optimizer: Any, x: Tensor) -> None:
    trains(model, optimizer, x)
    loss = model(x).sum() * torch.ones(2, requires_grad=True)
    try:
        loss.backward()  # it is no scalar
    except RuntimeError:
        del loss
    trains(model, optimizer, x)


def is_unwrapped(model: Any, optimizer: Any, x: Tensor) -> None:
    trains(model, optimizer, x)
    zero.unwrap(model)


USES = [trains, accumulates, is_saved, is_hooked, is_evaluated, breaks_off, is_unwrapped]
OPTIONS: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},  # so it is torch's own, too
    "1": {"stage": 1},
    "1 by a class of the user's": {"stage": 1, "optimizer": Moments},
    "2": {"stage": 2},
    "2 offloaded": {"stage": 2, "offload": zero.CPUOffload()},
    "3": {"stage": 3},
    "3 mixed": {"stage": 3, "precision": zero.MixedPrecision(torch.bfloat16)},
    "3 of whole parameters": {"stage": 3, "partition": "whole"},
    "3 offloaded": {"stage": 3, "offload": zero.CPUOffload()},
    "3 by a class of the user's": {"stage": 3, "optimizer": Moments},
}


def left(rank: int, net: nn.Module, use: Use, how: dict[str, Any]) -> list[weakref.ref[Tensor]]:
    """What lived on: references to parameters, and to the state of the optimizer."""
    model, optimizer = zero.setup(net, **{"optimizer": Adam, "lr": 0.01, **how})
    use(model, optimizer, data(4, WIDTH, rank=rank))
    state = [value for of in optimizer.state.values() for value in of.values() if isinstance(value, Tensor)]
    return [weakref.ref(tensor) for tensor in [*model.parameters(), *state]]


@pytest.mark.slow
@pytest.mark.parametrize("how", OPTIONS.values(), ids=[*OPTIONS])
@ranks.on(2)
def test_nothing_outlives_model_and_optimizer(rank, world, how):
    take_step(SGD([nn.Parameter(torch.ones(1))], 0.1), torch.ones(1, requires_grad=True).sum())
    gc.collect()
    gc.disable()
    try:
        for use in USES:
            net = Stack(classes=3, blocks=2)
            found = left(rank, net, use, how)
            del net
            assert not [one for one in found if one() is not None], use.__name__
    finally:
        gc.enable()


# Small changes of the core that no other quick test notices, each caught by one here.


class Warmed(Adam):
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        param_group["warm_lr"] = param_group["lr"] / 10


def test_a_group_that_is_added_has_the_options_that_the_optimizer_gives_it():
    net = Stack()
    plain, sharded = (one(net.first.parameters(), lr=0.01) for one in (Warmed, partial(zero.OSS, optim=Warmed)))
    for optimizer in (plain, sharded):
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.add_param_group({"params": [*net.last.parameters(), *net.blocks.parameters()], "weight_decay": 0.3})
    found, expected = (
        [{name: value for name, value in group.items() if name != "params"} for group in each]
        for each in (sharded.param_groups, plain.param_groups)
    )
    assert found == expected
    assert found[1]["warm_lr"] == 0.001


def fail(_: Tensor) -> None:
    raise KeyError("as told")


@gpus.cpu_only("elsewhere autograd ends in a thread of its own, and the next forward restores them")
@ranks.on(2, timeout=20)
def test_no_full_gradient_of_a_backward_that_an_exception_ended_stays(rank, world):
    """Neither of the unit in which it ended, nor of the root, which is there until the end."""
    net = Stack(classes=3)
    both = SideBySide(net)
    shapes = [param.shape for param in both.model.parameters()]
    for interrupted in (False, True):
        if interrupted:
            loss = loss_on(rank, 1)(both.model)
            failing = net.blocks[1].up.weight.register_hook(fail)
            with pytest.raises(KeyError):
                loss.backward()
            del loss
            failing.remove()
            assert [param.shape for param in both.model.parameters()] == shapes
            left = [param.grad for param in both.model.parameters()]
            if READS:
                assert left == [None] * len(shapes)
            else:  # half-way through a unit the gradients of the last one have been reduced: they are shards
                assert all(one is None or one.shape == shape for one, shape in zip(left, shapes, strict=True))
                both.zero_grad()
        both.step(loss_on(rank, 2))
        both.zero_grad()


@pytest.mark.parametrize("begins", ["at first", "end_schedule", "begin_schedule"])
def test_a_schedule_that_ranks_have_compared_is_settled_wherever_it_begins(begins):
    """At the same position, so that it is compared once."""
    log = Log(0, 2)
    if begins != "at first":
        getattr(log, begins)()
    compared: list[int] = []
    for again in (lambda: None, log.end_schedule, log.begin_schedule):
        again()
        for channel in (GATHER, REDUCTION):
            log.append(channel, 8, compared.append)
    assert compared == [GATHER, REDUCTION]


@pytest.mark.parametrize("transport", [TRANSPORTS[0], TRANSPORTS[-1]])
@ranks.on(2, timeout=20)
def test_every_gather_of_a_step_is_finished(rank, world, transport):
    with by(transport):
        net, plain = Stack(), Stack()
        optimizer = zero.OSS(net.parameters(), SGD, lr=10.0)
        model = zero.ShardedDDP(net, optimizer, reduce_buffer_size=1)
        alone = SGD(plain.parameters(), lr=10.0)
        assert len(shard_groups(optimizer)) > 4
        for one in (model, plain):
            loss_on(rank, 0)(one).backward()
        average_gradients(plain)
        optimizer.step()
        alone.step()
        same(dict(net.state_dict()), dict(plain.state_dict()), "parameters")


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Sequential(nn.Tanh(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.encoded(x)

    def encoded(self, x: Tensor) -> Tensor:
        return self.outer(self.first(x))


@ranks.on(2, timeout=20)
def test_a_unit_is_unsharded_for_each_module_inside_it_that_holds_its_parameters(rank, world):
    """At whatever depth, and for no other, as another method of the model calls them."""
    both = SideBySide(Deep())
    hooked = [name for name, module in both.model.module.named_modules() if module._forward_pre_hooks]
    assert hooked == ["", "first", "outer.1.0", "outer.1.1", "blocks.0", "blocks.0.0", "blocks.1", "blocks.1.0"]
    with torch.no_grad():
        x = torch.randn(4, WIDTH)
        same(both.model.encoded(x), both.plain.encoded(x), "what another method returns")
        same(both.model.outer[1][1](x), both.plain.outer[1][1](x), "what a layer returns")
    both.step(loss_on(rank, 0))
