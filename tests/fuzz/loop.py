"""Who averages gradients at stage 1, other than DistributedDataParallel; and what a loop may do beside forwards,
backwards and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zero
from runs import add, averages_over_ranks

if TYPE_CHECKING:
    from fuzz.training import Trained


class ByHand(nn.Module):
    """Averages gradients at stage 1 as the reference does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.sync = True
        self.averages: dict[nn.Parameter, Tensor] = {}
        self.local: dict[nn.Parameter, Tensor] = {}

    def forward(self, *args: Any) -> Any:
        return self.module(*args)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield

    def collect(self, *, sync: bool) -> None:
        for param in self.module.parameters():
            add(self.local, param, param.grad)
            param.grad = None
        if sync:
            for param, average in averages_over_ranks(self.module, self.local).items():
                add(self.averages, param, average)
            self.local.clear()

    def show(self) -> None:
        for param in self.module.parameters():
            param.grad = self.averages.get(param)


def evaluate(both: Trained) -> None:
    for model in (both.model, both.plain):
        model.eval()
    with torch.no_grad():
        found, expected = (model(both.batch(900)) for model in (both.model, both.plain))
    assert (found - expected).abs().max() <= both.tolerance * expected.abs().max(), "outputs in evaluation"
    for model in (both.model, both.plain):
        model.train()


def forward_alone(both: Trained) -> None:
    for model in (both.model, both.plain):
        torch.manual_seed(both.rank)
        model(both.batch(901))


def _require(both: Trained, trained: Callable[[int], bool]) -> None:
    for model in both.each():
        for number, module in enumerate(model.body):
            module.requires_grad_(trained(number))


def freeze(both: Trained) -> None:
    _require(both, lambda number: bool(number % 2))


def unfreeze(both: Trained) -> None:
    _require(both, lambda number: True)


def reload(both: Trained) -> None:
    """Other weights, of the same on all ranks."""
    weights = {name: value.clone() for name, value in both.plain.state_dict().items()}
    for value in weights.values():
        if value.is_floating_point():
            value.mul_(0.5)
        sent = value.contiguous()  # NCCL sends nothing else
        dist.broadcast(sent, 0)
        value.copy_(sent)
    model = both.model.module if isinstance(both.model, (ByHand, DistributedDataParallel)) else both.model
    model.load_state_dict(weights)
    both.plain.load_state_dict(weights)


def reload_optimizer(both: Trained) -> None:
    """The optimizer's state out and in again, as the plain optimizer's."""
    if both.case.stage == 3:
        state = zero.full_optimizer_state_dict(both.model, both.optimizer, to=None)
        zero.load_full_optimizer_state_dict(both.model, both.optimizer, state)
    else:
        both.optimizer.consolidate_state_dict(to=None)
        both.optimizer.load_state_dict(both.optimizer.state_dict())


def lower_rate(both: Trained) -> None:
    for optimizer in (both.optimizer, both.plain_optimizer):
        for group in optimizer.param_groups:
            group["lr"] *= 0.5


def write(both: Trained) -> None:
    """Into whole parameters."""
    for model in both.each():
        whole = both.model.summon_full_params() if both.case.stage == 3 and model is not both.plain else None
        with torch.no_grad():
            if whole is None:
                _halve(model)
            else:
                with whole:
                    _halve(model)


def _halve(model: nn.Module) -> None:
    for param in model.parameters():
        param.mul_(0.5)


def scale(both: Trained) -> None:
    """Gradients by hand: at stage 2 those of the parts that this rank owns."""
    for model in both.each():
        for param in model.parameters():
            own = both.optimizer.part(param) if both.case.stage == 2 and model is not both.plain else param
            if own is not None and own.grad is not None:
                own.grad.mul_(0.5)


def drop(both: Trained) -> None:
    for model in both.each():
        for param in model.head.parameters():
            param.grad = None
    for param in both.plain.head.parameters():
        both.averages.pop(param, None)


def halve_here(both: Trained) -> None:
    for model in both.each():
        with torch.no_grad():
            _halve(model)


EVENTS: dict[str, Callable[[Trained], None]] = {
    "": lambda both: None,
    "evaluate": evaluate,
    "forward alone": forward_alone,
    "freeze": freeze,
    "unfreeze": unfreeze,
    "reload": reload,
    "reload optimizer": reload_optimizer,
    "lower rate": lower_rate,
    "write": write,
}
"""What is done before a step."""

WRITES: dict[str, Callable[[Trained], None]] = {
    "": lambda both: None,
    "scale": scale,
    "drop": drop,
    "halve": halve_here,
}
"""What is done between backward and step."""
