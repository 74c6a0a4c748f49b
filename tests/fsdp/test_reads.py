"""Parameters that are read elsewhere than in the forward of the unit that they belong to, and what a forward writes
into parameters in place: as without FSDP."""

import os
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import matrix
import ranks
import zero
from assertions import same
from inner import unsharded
from runs import SideBySide, side_by_side, steps
from transports import overlapping
from zoo import WIDTH, Block, Stack, batch, loss_on, made

Borrowing = made(
    Block, lambda self, x: Block.forward(self, x) @ self.lender[0].up.weight.T @ self.lender[0].up.weight / WIDTH
)
"""Multiplies by weights of another block, which it does not hold."""


class Reading(Stack):
    """The root multiplies by weights of units that have run, and that are to come."""

    def __init__(self) -> None:
        super().__init__(Borrowing)
        for block, lender in zip(self.blocks, [1, 2, 0], strict=True):
            block.lender = [self.blocks[lender]]  # in a list, which nn.Module does not look into

    def middle(self, x: Tensor) -> Tensor:
        assert self.blocks[1].up.weight.shape == (2 * WIDTH, WIDTH)
        x = super().middle(x + self.blocks[1].down.bias)
        return torch.tanh(x @ self.blocks[1].down.weight)


class Encoding(Stack):
    def encode(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.first(x))


class Momentum(Stack):
    """Keeps a layer that follows the first within forward, and a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.behind = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.own = nn.Parameter(torch.ones(WIDTH))
        self.own_behind = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, x: Tensor, blocks: slice = slice(None)) -> Tensor:
        for behind, ahead in ((self.own_behind, self.own), (self.behind.weight, self.first.weight)):
            with torch.no_grad():
                behind.mul_(0.9).add_(ahead, alpha=0.1)
        return (super().forward(x, blocks) * self.own - self.behind(x) * self.own_behind).cos()


NETS: dict[str, Any] = {"reads": Reading, "follows": Momentum}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"reshard_after_forward": False},
    "whole": {"partition": "whole"},
    "no shard": {"sharding_strategy": "NO_SHARD"},
    "offloaded": {"offload": zero.CPUOffload()},
    "memory first": {"prefetch": 1},
    "speed first": {"prefetch": 3},
}


@matrix.combined("net, options", NETS, OPTIONS, each=6)
@ranks.on(2)
def test_what_forward_reads_of_other_units_or_writes_trains_exactly(rank, world, net, options):
    both = side_by_side(NETS[net](), OPTIONS[options])
    steps(both, rank, 2)
    assert options in ("kept", "no shard") or unsharded(both.model) == []
    both.step(*(loss_on(rank, step) for step in (3, 4)), unsent=1)


class Late(Block):
    frozen = False

    def forward(self, x: Tensor) -> Tensor:
        if self.frozen:
            with torch.no_grad():
                self.up.weight[::2] = 0
        return super().forward(x)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("net", [Reading, partial(Stack, Late)])
@ranks.on(2)
def test_reads_and_writes_may_begin_later_where_no_graph_is_recorded(rank, world, net, mode):
    both = side_by_side(net(), {})
    late = isinstance(both.plain.blocks[0], Late)
    steps(both, rank, int(late))
    for block in (block for model in both.each() for block in model.blocks):
        block.frozen = True
    with mode():
        torch.testing.assert_close(both.model(batch(rank, 5)), both.plain(batch(rank, 5)), rtol=0, atol=0)
    both.compare()
    steps(both, rank, 2)


class Third(Block):
    """From the third forward on reads another block, and writes so that torch does not count it."""

    other: list[Block]
    count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.count > 2:
            self.up.weight.data.mul_(0.5)
            x = x * (1 + self.other[0].down.weight.mean().item())
        return super().forward(x)


@ranks.on(2)
def test_where_each_forward_is_examined_what_begins_later_counts(rank, world):
    model = Stack(Third)
    for block, other in zip(model.blocks, [*model.blocks[1:], model.blocks[0]], strict=True):
        block.other = [other]
    with mock.patch.dict(os.environ, ZERO_CHECK="each"):
        steps(side_by_side(model, {}), rank, 5)


@pytest.mark.parametrize("sends", [nullcontext, overlapping])
@ranks.on(2)
def test_other_methods_than_forward_find_the_parameters_of_the_modules_that_they_call(rank, world, sends):
    """Also where units are gathered ahead: one that then does not run would not be what is written into it later."""
    with sends(), torch.no_grad():
        both, x = side_by_side(Encoding(), {}), batch(rank, 0)
        model, plain = both.model, both.plain
        assert torch.equal(model.encode(x), plain.encode(x))
        assert torch.equal(model.blocks[1].inner(x), plain.blocks[1].inner(x))
        assert unsharded(model) == []
        for param in (*model.parameters(), *plain.parameters()):
            param.mul_(0.5)
        assert torch.equal(model(x), plain(x))
        with model.summon_full_params(writeback=False):
            assert torch.equal(model.encode(x), plain.encode(x))


@ranks.on(2)
def test_training_through_other_methods_than_forward_is_exact(rank, world):
    both = side_by_side(Encoding(), {})

    def loss(model: nn.Module, *, step: int) -> Tensor:
        hidden = model.encode(batch(rank, step))
        return (model.blocks[0].inner(hidden) + model.blocks[2].up(hidden)[:, :WIDTH]).square().mean()

    for step in range(2):
        both.step(partial(loss, step=step))


@ranks.raises(2, RuntimeError, r"summon_full_params\(\) with gradients", "no_grad", timeout=15)
def test_training_whole_parameters_is_refused_on_every_rank(rank, world):
    model = zero.FSDP(Reading())
    with model.summon_full_params():
        model(batch(rank, 0))


@ranks.on(2)
def test_what_was_not_written_into_keeps_its_precision(rank, world):
    model = zero.FSDP(Stack(Late), precision=zero.MixedPrecision(param_dtype=torch.bfloat16))
    before = zero.full_state_dict(model, to=None)
    for number, block in enumerate(model.blocks):
        before[f"blocks.{number}.up.weight"][::2] = 0
        block.frozen = True
    model(batch(rank, 0))
    same(zero.full_state_dict(model, to=None), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
@ranks.raises(2, RuntimeError, "a loss reads '.*(weight|bias)' outside of the model's forward", timeout=15)
def test_a_penalty_on_shards_is_refused_on_every_rank(rank, world, dtype):
    model = zero.FSDP(Stack(), precision=zero.MixedPrecision(param_dtype=dtype))
    (model(batch(rank, 0)).square().mean() + sum(param.square().sum() for param in model.parameters())).backward()


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3).eval().requires_grad_(False)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.arange(5) >= torch.tensor([[4], [3]])
        encoded = self.encoder(x, src_key_padding_mask=padding)
        assert not encoded[padding].any()  # it was skipped
        return self.head(encoded)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@ranks.on(2)
def test_torchs_encoder_looks_at_its_first_layer_before_that_runs(rank, world):
    """Which then skips padding."""
    both = SideBySide(Padded())
    for step in range(3):
        x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(2 * step + rank))
        both.step(lambda model, x=x: model(x).square().mean())
