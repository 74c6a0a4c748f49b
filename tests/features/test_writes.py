"""What a forward writes into parameters in place stays, as it does without FSDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ranks
import zero
from sidebyside import side_by_side
from stacks import WIDTH, Block, Scenarios, Stack, batch, loss_on, steps

SCENARIOS = scenario = Scenarios()


class Momentum(Stack):
    """Keeps a second stack that follows the first, block by block, within forward."""

    def __init__(self, through_data: bool) -> None:
        super().__init__()
        self.through_data = through_data
        self.behind = Stack()
        self.behind.requires_grad_(False)
        self.own, self.own_behind = (
            nn.Parameter(torch.ones(WIDTH)),
            nn.Parameter(torch.zeros(WIDTH), requires_grad=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.follow(self.own_behind, self.own)
            self.follow(self.behind.first.weight, self.first.weight)
        return (super().forward(x) * self.own - self.behind(x) * self.own_behind).cos()

    def follow(self, behind: Tensor, ahead: Tensor) -> None:
        with torch.no_grad():
            if self.through_data:
                behind.data.mul_(0.9).add_(ahead.data, alpha=0.1)
            else:
                behind.mul_(0.9).add_(ahead, alpha=0.1)


@scenario
def averages_that_follow_in_forward(rank, world, options):
    steps(side_by_side(Momentum(through_data=False), options), rank)


@scenario
def averages_that_follow_in_forward_through_data(rank, world, options):
    steps(side_by_side(Momentum(through_data=True), options), rank)


@scenario
def weights_that_are_kept_in_bounds(rank, world, options):
    class Bounded(Block):
        def forward(self, x):
            with torch.no_grad():
                self.up.weight.clamp_(-0.2, 0.2)
                self.down.bias.fill_(0.5)
            return super().forward(x)

    steps(side_by_side(Stack(Bounded), options), rank)


@scenario
def weights_that_the_first_forward_chooses(rank, world, options):
    class Normalising(Block):
        ready = False

        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.empty(WIDTH))

        def forward(self, x):
            if not self.ready:
                self.ready = True
                self.scale.data.copy_(1 / batch(0, 0).std(0))
            return super().forward(x) * self.scale

    both = side_by_side(Stack(Normalising), options)
    both.model.eval(), both.plain.eval()
    steps(both, rank)


@scenario
def writes_that_begin_later(rank, world, options):
    class Late(Block):
        frozen = False

        def forward(self, x):
            if self.frozen:
                with torch.no_grad():
                    self.up.weight[::2] = 0
            return super().forward(x)

    both = side_by_side(Stack(Late), options)
    steps(both, rank, 2)
    for model in both.each():
        for block in model.blocks:
            block.frozen = True
    with torch.no_grad():
        assert torch.equal(*(loss_on(0, 5)(model) for model in (both.model, both.plain)))
    both.compare()
    steps(both, rank, 2)


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"reshard_after_forward": False},
    "no shard": {"sharding_strategy": "NO_SHARD"},
    "offloaded": {"offload": zero.CPUOffload()},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_numbers_are_those_of_the_reference(name, options):
    ranks.run(SCENARIOS[name], args=(OPTIONS[options],), timeout=20)


@ranks.on(2)
def test_what_was_not_written_into_keeps_its_precision(rank, world):
    class Filled(Block):
        def forward(self, x):
            with torch.no_grad():
                self.up.bias[1] = 0.5
            return super().forward(x)

    model = zero.FSDP(Stack(Filled), mixed_precision=zero.MixedPrecision(param_dtype=torch.bfloat16))
    before = zero.full_state_dict(model)
    model(batch(rank, 0))
    after = zero.full_state_dict(model)
    for block in range(3):
        before[f"blocks.{block}.up.bias"][1] = 0.5
    assert all(torch.equal(after[name], before[name]) for name in before)


@ranks.on(2)
def test_where_ranks_write_differently_each_element_is_its_owners(rank, world):
    class Marked(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.fill_(rank)
            return super().forward(x)

    model = zero.FSDP(nn.Sequential(Marked(WIDTH, WIDTH)))
    model(batch(rank, 0))
    found = zero.full_state_dict(model)["0.weight"].flatten()
    assert found.sort().values.equal(found)
    assert {0.0, 1.0} == {*found.tolist()}
