"""Small changes of the core that no other quick test notices, each caught by one here."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

import gpus
import ranks
import zero
from assertions import same
from inner import shard_groups
from runs import SideBySide, average_gradients
from transports import READS, TRANSPORTS, by
from zero.comm.oplog import GATHER, REDUCTION, Log
from zero.comm.streams import Streams
from zoo import WIDTH, Stack, loss_on


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


def test_what_is_rounded_before_it_is_sent_takes_two_buffers_in_turn():
    """Of which each is written again only after its last copy, and longer or other ones come only where they must."""
    made: list[tuple[int, torch.dtype]] = []

    def host_buffer(numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        made.append((numel, dtype))
        return torch.empty(numel, dtype=dtype)

    events: list[int] = []
    streams: Any = SimpleNamespace(_sent=[], _buffers=[None, None], host_buffer=host_buffer)
    sent = []
    for number, (numel, dtype) in enumerate([(4, torch.half)] * 3 + [(2, torch.half)] * 2 + [(4, torch.bfloat16)] * 2):
        source = torch.arange(float(numel)) + number
        rounded = Streams._rounded(streams, source, dtype)
        assert rounded.dtype == dtype and torch.equal(rounded.float(), source)
        assert not sent or rounded.data_ptr() != sent[-1].data_ptr()
        assert events == [*range(number - 1)], "copies that are waited for"
        streams._sent.append(SimpleNamespace(synchronize=partial(events.append, number)))
        sent.append(rounded)
    assert made == [(4, torch.half)] * 2 + [(4, torch.bfloat16)] * 2


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
