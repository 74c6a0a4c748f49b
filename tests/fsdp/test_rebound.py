"""Parameters that were given other data, replaced or added after wrapping: refused, on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD

import ranks
import zero
from assertions import same
from inner import unsharded
from rows import Rows
from runs import side_by_side
from zero import FSDP
from zoo import WIDTH, batch, loss_on

REFUSED = [r"'(body|head)\.\w+' was moved, cast or given other data", r"p\.data\.copy_", "before wrapping"]
LAYERS = ModuleWrapPolicy({nn.Linear})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def loss(model: nn.Module, rank: int) -> Tensor:
    return loss_on(rank, 0)(model)


# ----------------------------------------------------------------------------------------------------- given other data


def exchange(model: FSDP) -> None:
    """As with averaged weights, or steps of one's own."""
    for param in model.parameters():
        param.data = 0.5 * param.data


def cast(model: FSDP) -> None:
    model.bfloat16()


def from_a_vector(model: FSDP) -> None:
    vector_to_parameters(0.5 * parameters_to_vector(model.parameters()), model.parameters())


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
    ("rebind", "use"),
    [(exchange, use) for use in (evaluate, take_weights, summon, step)] + [(cast, evaluate), (from_a_vector, step)],
)
def test_other_data_is_refused_where_it_would_be_lost(rebind, use):
    ranks.expect_error(rebound, 2, RuntimeError, *REFUSED, args=(rebind, use), timeout=15)


@pytest.mark.parametrize(
    ("use", "words"),
    [(step, "another rank"), *((use, "rank 1 in a refusal") for use in (evaluate, take_weights, summon))],
)
def test_ranks_that_go_on_are_told_why_another_does_not(use, words):
    told = ranks.expect_error(rebound, 2, RuntimeError, "given other data", args=(one_part, use), timeout=15)
    assert re.search(words, told[0])
    assert "'head.bias'" in told[1] and not re.search(words, told[1])


@ranks.raises(2, RuntimeError, *REFUSED, timeout=15)
def test_whole_parameters_that_were_rebound_are_refused(rank, world):
    """What a forward without backward has left whole is refused as well."""
    model = zero.FSDP(Net())
    loss(model, rank)
    exchange(model)
    step(model, rank)


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
@ranks.raises(2, ValueError, *REFUSED, timeout=15)
def test_other_data_for_whole_parameters_is_refused_and_nothing_of_it_stays(rank, world, rebind):
    model = zero.FSDP(Net())
    before = model.state_dict()
    with pytest.raises(ValueError, match="given other data") as error, model.summon_full_params():
        rebind(model)
    same({**model.state_dict()}, {**before})
    loss(model, rank).backward()  # it can go on
    step(model, rank)
    raise error.value


@ranks.raises(2, ValueError, *REFUSED, timeout=15)
def test_apply_refuses_other_data(rank, world):
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data = torch.zeros(module.weight.shape)

    zero.FSDP(Net()).apply(init)


@ranks.on(2)
def test_without_writeback_other_data_counts_for_a_while(rank, world):
    """Where nothing is to stay, other data is as good as what is written in place."""
    model = zero.FSDP(Net())
    with torch.no_grad(), model.summon_full_params(writeback=False):
        for param in model.parameters():
            param.data = torch.zeros_like(param)
        assert not loss(model, rank)
    with torch.no_grad():
        assert loss(model, rank)


# --------------------------------------------------------------------------------------------------- replaced and added


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


# --------------------------------------------------------------------------------------------- the user's own pre-hooks


def reading() -> nn.Module:
    module = nn.Linear(WIDTH, WIDTH)
    module.register_forward_pre_hook(lambda module, args: (args[0] * module.weight.norm(),))
    return module


def weight_normed() -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))


def spectral_normed() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


row = Rows("a unit's own pre-hook reads its parameters", __name__, options={"auto_wrap_policy": LAYERS}, same={3})
for build in (reading, weight_normed, spectral_normed):
    row.of(f"{build.__name__} in the root", net=build)
    row.of(f"{build.__name__} in units", net=lambda build=build: nn.Sequential(build(), build()))
test_pre_hooks_find_the_parameters_of_their_module_whole = row.tests()


@ranks.on(2)
def test_units_around_a_module_that_is_called_by_itself_are_unsharded_with_it(rank, world):
    """The last module is a unit, and reads a weight of the root."""
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    net[2].weight = net[0].weight
    expected = net[2](batch(rank, 0))
    model = zero.FSDP(net, auto_wrap_policy=LAYERS)
    seen: list[str] = []
    net[2].register_forward_pre_hook(lambda *_: seen.extend(unsharded(model)))
    assert torch.equal(model[2](batch(rank, 0)), expected) or rank
    assert seen == ["", "2"]
