"""Parameters that are read elsewhere than in the forward of the unit that they belong to."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

import ranks
import zero
from sidebyside import SideBySide, data, sgd, stage_3
from transports import overlapping

WIDTH, WORDS = 8, 31


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.linear(x))

    def look(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Borrowing(nn.Module):
    """A block that multiplies by the weight of another block, which it does not hold."""

    def __init__(self, lender: nn.Module) -> None:
        super().__init__()
        self.lender = [lender]  # in a list, which nn.Module does not look into
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x) @ self.lender[0].linear.weight.T


class Net(nn.Module):
    """The weight of `words`, a unit by itself, is also what the root multiplies the output by."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.borrowing = Borrowing(self.blocks[1])
        self.bias = nn.Parameter(torch.zeros(WORDS))

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        assert self.words.weight.shape == (WORDS, WIDTH)
        return F.linear(self.borrowing(self.encode(tokens)), self.words.weight, self.bias)

    def generate(self, tokens: Tensor, length: int) -> Tensor:
        for _ in range(length):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens


UNITS = ModuleWrapPolicy({nn.Embedding, Block, Borrowing})
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "whole": {"partition": "whole"},
    "kept": {"reshard_after_forward": False},
    "memory first": {"prefetch": zero.MEMORY_FIRST},
    "speed first": {"prefetch": zero.SPEED_FIRST},
}


def tokens(rank: int, step: int = 0) -> Tensor:
    return data(2, 5, rank=rank, step=step).abs().mul(10).long() % WORDS


def train(rank: int, world: int, optim: Any, options: dict[str, Any], evaluate_first: bool) -> None:
    both = SideBySide(Net(), lambda model, optim: stage_3(model, optim, auto_wrap_policy=UNITS, **options), optim)
    if evaluate_first:
        for model in both.each():
            model.eval()
        with torch.no_grad():
            assert torch.equal(both.model(tokens(rank)), both.plain(tokens(rank)))
        for model in both.each():
            model.train()
    for step in range(3):
        both.step(lambda model: model(tokens(rank, step)).square().mean())  # noqa: B023
        assert all(group.full.untyped_storage().nbytes() == 0 for group in both.model.shard_groups)
    both.step(*(lambda model, step=step: model(tokens(rank, step)).square().mean() for step in (3, 4)), unsent=1)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("optim", [sgd, AdamW], ids=["sgd", "adamw"])
def test_parameters_read_by_another_unit_are_whole_there_and_train_exactly(optim, options):
    ranks.run(train, args=(optim, options, False))


def test_reads_are_found_in_evaluation_too():
    ranks.run(train, args=(sgd, {}, True))


@pytest.mark.parametrize("sends", [nullcontext, overlapping])
@ranks.on(2)
def test_other_methods_than_forward_find_the_parameters_of_the_modules_that_they_call(rank, world, sends):
    """Also where units are gathered ahead: one that then does not run would not be what is written into it later."""
    with sends(), torch.no_grad():
        model, plain = zero.FSDP(Net(), auto_wrap_policy=ModuleWrapPolicy({Block})), Net()
        assert torch.equal(model.encode(tokens(rank)), plain.encode(tokens(rank)))
        assert torch.equal(model.generate(tokens(rank), 4), plain.generate(tokens(rank), 4))
        assert torch.equal(
            model.blocks[1].look(model.words(tokens(rank))), plain.blocks[1].look(plain.words(tokens(rank)))
        )
        assert all(group.full.untyped_storage().nbytes() == 0 for group in model.shard_groups)
        for param in (*model.parameters(), *plain.parameters()):
            param.mul_(1.5)
        assert torch.equal(model(tokens(rank)), plain(tokens(rank)))
        with model.summon_full_params(writeback=False):
            assert torch.equal(model.generate(tokens(rank), 4), plain.generate(tokens(rank), 4))


@ranks.on(2)
def test_training_through_other_methods_than_forward_is_exact(rank, world):
    """Shards of blocks, and modules of the root, are called from outside; the output layer after forward."""
    both = SideBySide(Net(), lambda model, optim: stage_3(model, optim, auto_wrap_policy=ModuleWrapPolicy({Block})))

    def loss(model: nn.Module, step: int) -> Tensor:
        hidden = model.encode(tokens(rank, step))
        hidden = model.blocks[0].look(hidden) + model.blocks[2].linear(hidden)
        return model.borrowing.own(hidden).square().mean() + model.words(tokens(rank)).mean()

    for step in range(3):
        both.step(lambda model: loss(model, step))  # noqa: B023


@ranks.raises(2, RuntimeError, r"summon_full_params\(\) with gradients", "no_grad", timeout=15)
def test_training_whole_parameters_is_refused_on_every_rank(rank, world):
    model = zero.FSDP(Net(), auto_wrap_policy=UNITS)
    with model.summon_full_params():
        model(tokens(rank))


class Kept(nn.Module):
    """Reads the weight of a unit that stays unsharded from forward to backward, and whose output may lead nowhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lender, self.last = Block(), nn.Linear(WIDTH, 3)
        self.kind = ""

    def borrow(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.lender.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        output = self.lender(x.requires_grad_())  # which a re-entrant checkpoint wants of something
        if self.kind == "reentrant":
            return self.last(checkpoint(self.borrow, output, use_reentrant=True))
        return self.last(self.borrow(x))


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("kind", ["reentrant", "output not used"])
@ranks.on(2, timeout=20)
def test_a_read_of_a_unit_that_stays_whole_trains_exactly(rank, world, kind, strategy):
    model = Kept()
    model.kind = kind
    options = {"sharding_strategy": strategy, "auto_wrap_policy": ModuleWrapPolicy({Block})}
    both = SideBySide(model, lambda model, optim: stage_3(model, optim, **options), sgd)
    for step in range(4):
        for inner in both.each():
            inner.lender.requires_grad_(step != 2)  # then it does not stay
        both.step(lambda model, step=step: model(data(4, WIDTH, rank=rank, step=step)).square().mean())
