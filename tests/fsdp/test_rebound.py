"""Parameters that were given other data, replaced or added after wrapping: refused, on every rank."""

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD

import ranks
import zero
from assertions import same
from runs import side_by_side
from zero import FSDP
from zoo import WIDTH, Stack, loss_on

REFUSED = [r"'(first|last)\.\w+' was moved, cast or given other data", r"p\.data\.copy_", "before wrapping"]
Net = partial(Stack, classes=WIDTH, blocks=0)


def exchange(model: FSDP) -> None:
    """As with averaged weights, or steps of one's own."""
    for param in model.parameters():
        param.data = 0.5 * param.data


REBINDS: dict[str, Callable[[FSDP], object]] = {
    "exchanged": exchange,
    "cast": FSDP.bfloat16,
    "a bias, of which the last rank has all": lambda m: setattr(m.last.bias, "data", 0.5 * m.last.bias.data),
    "exchanged on one rank": lambda model: exchange(model) if torch.distributed.get_rank() else None,
}
USES: dict[str, Callable[[FSDP, int], object]] = {
    "evaluates": lambda model, rank: torch.no_grad()(loss_on(rank, 0))(model),
    "gives its weights": lambda model, rank: model.state_dict(),
    "is summoned": lambda model, rank: model.summon_full_params().__enter__(),
    "is stepped": lambda model, rank: SGD(model.parameters(), 0.1).step(),
}


def rebound(rank: int, world: int, rebind: str, use: str) -> None:
    model = zero.FSDP(Net())
    loss_on(rank, 0)(model).backward()
    REBINDS[rebind](model)
    USES[use](model, rank)


@pytest.mark.parametrize(("rebind", "use"), [*(("exchanged", use) for use in USES), ("cast", "evaluates")])
def test_other_data_is_refused_where_it_would_be_lost(rebind, use):
    ranks.expect_error(rebound, 2, RuntimeError, *REFUSED, args=(rebind, use), timeout=15)


@pytest.mark.parametrize(
    ("use", "words"), [("is stepped", "rank 1 has raised"), ("evaluates", "rank 1 has raised.*out of step")]
)
def test_ranks_that_go_on_are_told_why_another_does_not(use, words):
    args = ("a bias, of which the last rank has all", use)
    told = ranks.expect_error(rebound, 2, RuntimeError, "given other data", args=args, timeout=15)
    assert re.search(words, told[0])
    assert "'last.bias'" in told[1] and not re.search(words, told[1])


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


@pytest.mark.parametrize("rebind", ["exchanged", "cast", "exchanged on one rank"])
@ranks.raises(2, RuntimeError, *REFUSED, timeout=15)
def test_other_data_for_whole_parameters_is_refused_and_nothing_of_it_stays(rank, world, rebind):
    model = zero.FSDP(Net())
    before = model.state_dict()
    with pytest.raises(RuntimeError, match="given other data") as error, model.summon_full_params():
        REBINDS[rebind](model)
    same({**model.state_dict()}, {**before})
    loss_on(rank, 0)(model).backward()  # it can go on
    USES["is stepped"](model, rank)
    raise error.value


def stepped(rank: int, world: int, change: Callable[[Stack], object]) -> None:
    net = Net()
    model = zero.FSDP(net)
    change(net)
    optimizer = SGD(model.parameters(), 0.1)
    loss_on(rank, 0)(model).backward()
    optimizer.step()


def other_layer(net: Stack) -> None:
    net.last = nn.Linear(WIDTH, 2)


def other_weight(net: Stack) -> None:
    net.last.weight = nn.Parameter(torch.ones(2, WIDTH))
    net.last.bias = None


def added(net: Stack) -> None:
    net.last = nn.Sequential(net.last, nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("change", [other_layer, other_weight, added])
def test_what_came_after_wrapping_is_refused_at_the_step(change):
    words = [r"'last\.(1\.)?weight' is in no unit of FSDP: it was replaced .* or added since", "does not average"]
    ranks.expect_error(stepped, 2, RuntimeError, *words, args=(change,), timeout=15)


@ranks.on(2)
def test_what_is_frozen_or_ignored_may_change(rank, world):
    stepped(rank, world, lambda net: setattr(net, "last", nn.Linear(WIDTH, 2).requires_grad_(False)))
    net = Net()
    net.first = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    model = zero.FSDP(net, ignored_modules=[net.first])
    net.first[0] = nn.Linear(WIDTH, WIDTH)
    loss_on(rank, 0)(model).backward()
    SGD(model.parameters(), 0.1).step()
