"""16 bits, and what goes with them. Stage 0 computes by the same dtypes: in mixed precision with parameters that its
forward casts, and with master weights by an optimizer that keeps them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import gpus
from axes import Axis, Wrap, happens
from axes.layout import with_class

if TYPE_CHECKING:
    from rows import Loop

BF16, HALF = torch.bfloat16, torch.float16


class Narrow(Axis):
    """Parameters, inputs and outputs of 16 bits. What is added up, under no_sync, is rounded in another order."""

    dtype, tolerance = BF16, 2 * torch.finfo(BF16).eps

    def net(self, net: nn.Module, t: Loop) -> nn.Module:
        return net.to(self.dtype)

    def inputs(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)

    def forward(self, t: Loop, x: Tensor, **given: Any) -> Tensor:
        return super().forward(t, x, **given).float()


happens("dtype: bfloat16 parameters")(Narrow)


@happens("dtype: float16 parameters")
class Half(Narrow):
    dtype, tolerance = HALF, 2 * torch.finfo(HALF).eps


class Masters(torch.optim.Optimizer):
    """values: by parameter, before they were rounded."""

    def __init__(self, params: Any, optim: Callable[..., Any], values: dict[nn.Parameter, Tensor]) -> None:
        super().__init__(params, {})
        self.inner = optim([values[param] for param in self._params()])

    def _params(self) -> list[nn.Parameter]:
        return [param for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        masters = [master for group in self.inner.param_groups for master in group["params"]]
        for master, param in zip(masters, self._params(), strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        self.inner.step()
        for master, param in zip(masters, self._params(), strict=True):
            param.copy_(master)


@happens("dtype: master weights")
class MasterWeights(Narrow):
    stages = frozenset({1, 2})

    def net(self, net: nn.Module, t: Loop) -> nn.Module:
        if t.stage:
            return net  # zero rounds it
        self.values = {param: param.detach().clone() for param in net.parameters()}
        return super().net(net, t)

    def options(self, stage: int) -> dict[str, Any]:
        return {"precision": "bf16"}

    def wrapped(self, t: Loop, wrap: Wrap, optim: Callable[..., Any]) -> tuple[nn.Module, Any]:
        return super().wrapped(t, wrap, optim if t.stage else lambda params: Masters(params, optim, self.values))

    def weights(self, t: Loop) -> dict[str, Tensor]:
        found = super().weights(t)
        if not t.stage:
            found |= {name: self.values[param] for name, param in t.n.named_parameters()}
        return found


def in_16_bits(forward: Callable[..., Any], net: Any, x: Tensor, *args: Any, **given: Any) -> Any:
    if net.weight_is_cast:
        return forward(x, *args, **given)
    net.weight_is_cast = True
    try:
        cast = {name: param.to(BF16) for name, param in net.named_parameters()}
        return functional_call(net, cast, (x.to(BF16), *args), given)
    finally:
        net.weight_is_cast = False


@happens("dtype: mixed precision")
class Mixed(Axis):
    """Gradients are sent in 16 bits."""

    stages, tolerance = frozenset({3}), 2 * torch.finfo(BF16).eps

    def net(self, net: nn.Module, t: Loop) -> nn.Module:
        if not t.stage:
            net.weight_is_cast = False
            with_class(net, in_16_bits)
        return net

    def options(self, stage: int) -> dict[str, Any]:
        return {"precision": "bf16"}

    def forward(self, t: Loop, x: Tensor, **given: Any) -> Tensor:
        return super().forward(t, x, **given).float()


@happens("dtype: autocast")
class Autocast(Axis):
    dtype, tolerance = BF16, 1e-5

    def forward(self, t: Loop, x: Tensor, **given: Any) -> Tensor:
        with torch.autocast(gpus.DEVICE, self.dtype):
            return super().forward(t, x, **given).float()


@happens("dtype: float16 autocast with an overflow")
class Scaled(Autocast):
    """The second backward of rank 0 overflows: no rank takes that step."""

    dtype, tolerance = HALF, 1e-5

    def wrapped(self, t: Loop, wrap: Wrap, optim: Callable[..., Any]) -> tuple[nn.Module, Any]:
        t.scaler, self.backwards, self.unscaled = torch.amp.GradScaler(gpus.DEVICE, init_scale=2.0**8), 0, False
        return super().wrapped(t, wrap, optim)

    def backward(self, t: Loop, loss: Tensor) -> None:
        overflows = t.rank == 0 and self.backwards == 1
        self.backwards += 1
        super().backward(t, t.scaler.scale(loss * math.inf if overflows else loss))

    def unscale(self, t: Loop) -> None:
        if not self.unscaled:
            self.unscaled = True
            t.scaler.unscale_(t.o)

    def update(self, t: Loop) -> None:
        t.scaler.step(t.o)
        t.scaler.update()
        self.unscaled = False
        t.note(torch.tensor(t.scaler.get_scale()))
