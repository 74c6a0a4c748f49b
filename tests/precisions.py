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


class Down(nn.Linear):
    """A layer that can be kept in float32 by its class."""


class Block(nn.Module):
    """Gets float32 beside what it computes with, as rotary tables and masks are; it has a buffer of float32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), Down(2 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.tensor(1.3))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH) / 3)

    def forward(self, x: Tensor, *, more: list[Tensor]) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x) + (more[0] * self.frozen).to(x.dtype)))
        return x + self.gain * self.down(hidden) + self.shift.to(x.dtype)


class Net(nn.Module):
    """With tied weights, which lie transposed in memory, and batch normalisation, which computes in float32."""

    recomputed = False

    def __init__(self, normalised: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.first.weight.data = self.first.weight.data.mT.contiguous().mT
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.batch_norm = nn.BatchNorm1d(WIDTH) if normalised else nn.Identity()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.to(self.first.weight.dtype))
        for block in self.blocks:
            run = partial(checkpoint, block, use_reentrant=False) if self.recomputed else block
            x = run(x, more=[torch.linspace(0.1, 1, WIDTH).square()])
        return self.last(self.batch_norm(x))


class ByHand(nn.Module):
    """A net, which can follow a policy by torch alone: what is float32 is cast each time that it is called."""

    policy: zero.MixedPrecision | None = None

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        if self.policy is None:
            return self.net(x)
        kept = [module for module in self.net.modules() if isinstance(module, self.policy.keep_fp32)]
        whole = {param for module in kept for param in module.parameters()}
        own, to = self.net.named_parameters(), self.policy.param_dtype
        params = {name: param if param in whole else cast(to, param) for name, param in own}
        buffers = {name: cast(self.policy.buffer_dtype, buffer) for name, buffer in self.net.named_buffers()}
        return functional_call(self.net, params | buffers, x)

    def follow(self, policy: zero.MixedPrecision) -> nn.Module:
        """Gradients are cast as they would be sent, to be averaged in float32."""
        self.policy, to = policy, policy.param_dtype
        for param in self.parameters():
            if param.requires_grad and policy.reduce_dtype:
                param.register_hook(lambda gradient: gradient.to(policy.reduce_dtype).float())
        for buffer in self.buffers():
            buffer.copy_(cast(policy.buffer_dtype, buffer))
        for module in self.modules():
            if to and isinstance(module, policy.keep_fp32):
                module.register_forward_pre_hook(partial(cast_arguments, torch.float32), with_kwargs=True)
                module.register_forward_hook(lambda _, __, output: output.to(to))
            elif isinstance(module, (Net, Block)) and policy.cast_forward_inputs:
                module.register_forward_pre_hook(partial(cast_arguments, to), with_kwargs=True)
        return self


def cast(dtype: torch.dtype | None, value: Tensor) -> Tensor:
    return value if dtype is None else value.to(dtype)


def cast_arguments(dtype: torch.dtype | None, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return tuple(cast(dtype, one) for one in args), {key: [cast(dtype, one) for one in kwargs[key]] for key in kwargs}


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

        return self.losses(take, ByHand(net).follow(zero.MixedPrecision(dtype)))

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
    return {name: state.get(number, {}).get("zero_master", weights[name]) for number, name in enumerate(names)}


def parameters(net: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach() for name, param in net.named_parameters()}


def unlike(rank: int) -> Net:
    """All ranks start from the first one's float32 weights, not from what those are rounded to."""
    net = Net()
    for param in net.parameters():
        param.data.mul_(1 + rank / 1000)
    return net
