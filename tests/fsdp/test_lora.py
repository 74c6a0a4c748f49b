"""Frozen parameters beside trained ones in a unit: adapters, and freezing and unfreezing between steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD, AdamW

import gpus
import ranks
import sidebyside
import zero
from sidebyside import SideBySide, data, sgd

WIDTH, RANK = 14, 2


class Adapted(nn.Module):
    """A frozen layer with a trained correction of low rank (Hu et al., 2021)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(RANK, base.in_features) / 4)
        self.up = nn.Parameter(torch.randn(base.out_features, RANK) / 4)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t() * self.scale


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.up, self.down = Adapted(nn.Linear(WIDTH, 3 * WIDTH)), nn.Linear(3 * WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """All frozen but the adapters and the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(19, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_on(rank: int, step: int) -> Any:
    tokens = (data(4, 6, rank=rank, step=step).abs() * 7).long() % 19
    return lambda model: model(tokens).square().mean()


STAGES: dict[str, dict[str, Any]] = {
    "resharded": {},
    "kept": {"sharding_strategy": "SHARD_GRAD_OP"},
    "not sharded": {"sharding_strategy": "NO_SHARD"},
    "whole": {"partition": "whole"},
    "hybrid": {"sharding_strategy": "HYBRID_SHARD"},
}


def side_by_side(model: nn.Module, stage: str, optim: Any = sgd, tolerance: float = 0.0) -> SideBySide:
    options = dict(STAGES[stage])
    if stage == "hybrid":
        options["device_mesh"] = init_device_mesh(gpus.DEVICE, (1, 2))
    return sidebyside.side_by_side(model, options, optim, tolerance=tolerance)


@pytest.mark.parametrize("stage", STAGES)
@ranks.on(2)
def test_adapters_train_and_what_they_adapt_stays(rank, world, stage):
    both = side_by_side(Net(), stage, partial(AdamW, lr=1e-2))
    before = both.model.state_dict()
    for step in range(3):
        both.step(loss_on(rank, step))
    after = both.model.state_dict()
    for name, param in both.model.module.named_parameters():
        assert param.grad is None or param.requires_grad
        assert torch.equal(after[name], before[name]) != param.requires_grad, name
    both = side_by_side(Net(), stage)
    for step in range(2):
        both.step(*(loss_on(rank, 3 * step + number) for number in range(3)), unsent=2)


@ranks.on(2)
def test_unfrozen_parameters_are_added_to_the_optimizer(rank, world):
    """Thawed parameters come to the optimizer by add_param_group, with hyperparameters of their own."""
    net = Net()

    def build(inner: nn.Module, _: Any) -> Any:
        wrapped = zero.FSDP(inner)
        return wrapped, SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.05, momentum=0.9)

    both = SideBySide(net, build, sgd)
    both.plain_optimizer = SGD([p for p in both.plain.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    for step in range(4):
        if step == 2:
            for inner, optimizer in zip(both.each(), (both.optimizer, both.plain_optimizer), strict=True):
                inner.blocks[1].down.requires_grad_(True)
                params = list(inner.blocks[1].down.parameters())
                optimizer.add_param_group({"params": params, "lr": 0.01, "weight_decay": 0.2})
        both.step(loss_on(rank, step))


def between(rank: int, world: int, thaw: bool) -> None:
    """Frozen or unfrozen after a backward under no_sync, before the one that sends what it left."""
    both = side_by_side(Net(), "resharded")
    both.step(loss_on(rank, 0))
    both.zero_grad()
    both.backward(loss_on(rank, 1), sync=False)
    for inner in both.each():
        (inner.blocks[1].down if thaw else inner.blocks[1].up).requires_grad_(thaw)
    both.backward(loss_on(rank, 2))
    both.update()
    both.step(loss_on(rank, 3))


def test_unfrozen_between_backwards_of_a_step():
    ranks.run(between, args=(True,))


def test_frozen_between_backwards_of_a_step_what_no_sync_left_is_not_stepped_with():
    words = [r"'blocks\.1\.up\.\w+' has a gradient that was not reduced", "no_sync"]
    ranks.expect_error(between, 2, RuntimeError, *words, args=(False,), timeout=15)


@ranks.raises(2, ValueError, "differ between ranks", r"blocks\.1\.down", "frozen", timeout=15)
def test_ranks_that_freeze_other_parameters_are_refused(rank, world):
    net = Net()
    if rank:
        net.blocks[1].down.requires_grad_(True)
    zero.FSDP(net)


@ranks.raises(2, RuntimeError, "out of step", r"unit 'blocks\.\d'", timeout=15)
def test_ranks_that_unfreeze_other_parameters_later_raise_on_every_rank(rank, world):
    model = zero.FSDP(Net())
    if rank:
        model.blocks[1].down.requires_grad_(True)
    for step in range(2):
        loss_on(rank, step)(model).backward()


@ranks.on(2)
def test_frozen_parameters_take_no_memory_for_gradients(rank, world):
    model = zero.FSDP(Net())
    loss_on(rank, 0)(model).backward()
    trained = sum(param.nbytes for param in model.parameters() if param.requires_grad)
    storages = {param.grad.untyped_storage() for param in model.parameters() if param.grad is not None}
    held = sum(one.nbytes() for one in storages)
    assert trained <= held <= trained + 4 * 4 * 16  # the usage counts, a unit
