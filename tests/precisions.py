"""A model of what 16 bits treat differently, the training of it in 16 bits by a few lines of torch, and by zero.setup
at a stage."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, Optimizer
from torch.utils.checkpoint import checkpoint

import gpus
import zero
from runs import average_gradients
from zoo import WIDTH, batch

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adam": partial(Adam, lr=1e-2, weight_decay=0.01),
    "sgd": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
}


class Block(nn.Module):
    """Gets float32 beside what it computes with, as rotary tables and masks are; it has a buffer of float32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.tensor(1.3))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH) / 3)

    def forward(self, x: Tensor, *, more: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x) + more * self.frozen))
        return x + self.gain * self.down(hidden) + self.shift.to(x.dtype)


class Net(nn.Module):
    """With tied weights, which lie transposed in memory, and batch normalisation, which computes in float32."""

    recomputed = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.first.weight.data = self.first.weight.data.mT.contiguous().mT
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            run = partial(checkpoint, block, use_reentrant=False) if self.recomputed else block
            x = run(x, more=torch.linspace(0.1, 1, WIDTH).square())
        return self.last(self.batch_norm(x))


class ByHand(nn.Module):
    """The same by torch alone, with the policy: rounds float32 weights each time that it is called."""

    def __init__(self, net: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.net, self.dtype = net, dtype
        for module in net.modules():
            if isinstance(module, (Net, Block)):
                module.register_forward_pre_hook(partial(self._cast, dtype), with_kwargs=True)
            elif isinstance(module, nn.BatchNorm1d):
                module.register_forward_pre_hook(partial(self._cast, torch.float32), with_kwargs=True)
                module.register_forward_hook(lambda _, __, output: output.to(dtype))

    @staticmethod
    def _cast(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> Any:
        return tuple(one.to(dtype) for one in args), {name: one.to(dtype) for name, one in kwargs.items()}

    def forward(self, x: Tensor) -> Tensor:
        rounded = {
            name: param if "batch_norm" in name else param.to(self.dtype) for name, param in self.net.named_parameters()
        }
        return functional_call(self.net, rounded, (x,))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    return (model(batch(rank, step)).float() - 1).square().mean()


@dataclass
class Loop:
    """steps: their numbers. scale: of losses, in whose gradients much is too small for 16 bits. max_norm: to which
    gradients are clipped. foreach: how torch clips. `norms`: those that it clipped at a stage."""

    rank: int
    steps: range = range(4)
    scale: float | None = None
    max_norm: float | None = None
    foreach: bool | None = None
    norms: list[float] = field(default_factory=list)

    def losses(self, take: Callable[[Tensor], None], model: nn.Module) -> list[float]:
        losses = []
        for step in self.steps:
            loss = loss_of(model, self.rank, step) * (1.0 if self.scale is None else 1e-4)
            take(loss)
            losses.append(loss.item())
        return losses

    def by_hand(self, net: nn.Module, optimizer: Optimizer, dtype: torch.dtype) -> list[float]:
        def take(loss: Tensor) -> None:
            optimizer.zero_grad()
            (loss * (self.scale or 1.0)).backward()
            average_gradients(net)
            for param in net.parameters():
                if param.grad is not None:
                    param.grad.div_(self.scale or 1.0)
            if self.max_norm is not None:
                nn.utils.clip_grad_norm_(net.parameters(), self.max_norm)
            optimizer.step()

        return self.losses(take, ByHand(net, dtype))

    def at_stage(self, model: nn.Module, optimizer: Optimizer) -> list[float]:
        scaler = torch.amp.GradScaler(gpus.DEVICE, init_scale=self.scale or 1.0, enabled=self.scale is not None)

        def take(loss: Tensor) -> None:
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if self.max_norm is not None:
                scaler.unscale_(optimizer)
                norm = clip_grad_norm_(model.parameters(), self.max_norm, foreach=self.foreach)
                self.norms.append(norm.item())
            scaler.step(optimizer)
            scaler.update()

        return self.losses(take, model)


def masters(model: nn.Module, optimizer: Optimizer, names: Sequence[str] = ()) -> dict[str, Tensor]:
    """What is stepped, under the model's own names: the full weights, or masters in the place of what they were rounded
    to. Buffers are left out. names: of the optimizer's parameters, by default all."""
    names = names or [name for name, _ in Net().named_parameters()]
    weights = zero.full_state_dict(model, to=None)
    state = zero.full_optimizer_state_dict(model, optimizer, to=None)["state"]
    return {name: state.get(number, {}).get("master", weights[name]) for number, name in enumerate(names)}


def parameters(net: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach() for name, param in net.named_parameters()}


def unlike(rank: int) -> Net:
    """All ranks start from the first one's float32 weights, not from what those are rounded to."""
    net = Net()
    for param in net.parameters():
        param.data.mul_(1 + rank / 1000)
    return net
