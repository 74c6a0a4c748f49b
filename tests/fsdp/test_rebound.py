"""Parameters that were given other data, replaced or added after wrapping: refused, on every rank."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import ranks
import zero
from assertions import same
from runs import side_by_side
from zero import FSDP
from zoo import WIDTH, loss_on

REFUSED = [r"'(body|head)\.\w+' was moved, cast or given other data", r"p\.data\.copy_", "before wrapping"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def loss(model: nn.Module, rank: int) -> Tensor:
    return loss_on(rank, 0)(model)


def exchange(model: FSDP) -> None:
    """As with averaged weights, or steps of one's own."""
    for param in model.parameters():
        param.data = 0.5 * param.data


def cast(model: FSDP) -> None:
    model.bfloat16()


def one_part(model: FSDP) -> None:
    """Of a parameter of which only the last rank has any."""
    model.head.bias.data = 0.5 * model.head.bias.data


def evaluate(model: FSDP, rank: int) -> None:
    with torch.no_grad():
        loss(model, rank)


def take_weights(model: FSDP, rank: int) -> None:
    model.state_dict()


def summon(model: FSDP, rank: int) -> None:
    with model.summon_full_params():
        pass


def step(model: FSDP, rank: int) -> None:
    SGD(model.parameters(), 0.1).step()


def rebound(rank: int, world: int, rebind: Callable[[FSDP], None], use: Callable[[FSDP, int], None]) -> None:
    model = zero.FSDP(Net())
    loss(model, rank).backward()
    rebind(model)
    use(model, rank)


@pytest.mark.parametrize(
    ("rebind", "use"), [(exchange, use) for use in (evaluate, take_weights, summon, step)] + [(cast, evaluate)]
)
def test_other_data_is_refused_where_it_would_be_lost(rebind, use):
    ranks.expect_error(rebound, 2, RuntimeError, *REFUSED, args=(rebind, use), timeout=15)


@pytest.mark.parametrize(("use", "words"), [(step, "rank 1 has raised"), (evaluate, "rank 1 has raised.*out of step")])
def test_ranks_that_go_on_are_told_why_another_does_not(use, words):
    told = ranks.expect_error(rebound, 2, RuntimeError, "given other data", args=(one_part, use), timeout=15)
    assert re.search(words, told[0])
    assert "'head.bias'" in told[1] and not re.search(words, told[1])


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"sharding_strategy": "NO_SHARD"}], ids=str)
@ranks.on(2)
def test_what_is_written_in_place_counts(rank, world, options):
    """The remedy of the error, and data that comes back, with training in between."""
    both = side_by_side(Net(), options)
    for step in range(2):
        both.step(loss_on(rank, step))
        for model in (both.model, both.plain):
            for param in model.parameters():
                before = param.data
                param.data = torch.zeros_like(before)
                param.data = before
                param.data.copy_(0.5 * param.data)
                with torch.no_grad():
                    param.copy_(0.5 * param)


def on_one_rank(model: FSDP) -> None:
    if torch.distributed.get_rank() == 1:
        exchange(model)


@pytest.mark.parametrize("rebind", [exchange, cast, on_one_rank])
@ranks.raises(2, RuntimeError, *REFUSED, timeout=15)
def test_other_data_for_whole_parameters_is_refused_and_nothing_of_it_stays(rank, world, rebind):
    model = zero.FSDP(Net())
    before = model.state_dict()
    with pytest.raises(RuntimeError, match="given other data") as error, model.summon_full_params():
        rebind(model)
    same({**model.state_dict()}, {**before})
    loss(model, rank).backward()  # it can go on
    step(model, rank)
    raise error.value


def stepped(rank: int, world: int, change: Callable[[Net], object], net: Net | None = None, **options: Any) -> None:
    net = net or Net()
    model = zero.FSDP(net, **options)
    change(net)
    optimizer = SGD(model.parameters(), 0.1)
    loss(model, rank).backward()
    optimizer.step()


def other_head(net: Net) -> None:
    net.head = nn.Linear(WIDTH, 2)


def other_weight(net: Net) -> None:
    net.head.weight = nn.Parameter(torch.ones(2, WIDTH))
    net.head.bias = None


def added(net: Net) -> None:
    net.head = nn.Sequential(net.head, nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("change", [other_head, other_weight, added])
def test_what_came_after_wrapping_is_refused_at_the_step(change):
    words = [r"'head\.(1\.)?weight' is in no unit of FSDP: it was replaced .* or added since", "does not average"]
    ranks.expect_error(stepped, 2, RuntimeError, *words, args=(change,), timeout=15)


@ranks.on(2)
def test_what_is_frozen_or_ignored_may_change(rank, world):
    stepped(rank, world, lambda net: setattr(net, "head", nn.Linear(WIDTH, 2).requires_grad_(False)))
    net = Net()
    net.body = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    stepped(rank, world, lambda net: net.body.__setitem__(0, nn.Linear(WIDTH, WIDTH)), net, ignored_modules=[net.body])
