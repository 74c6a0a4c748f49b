"""Parameters that are not contiguous, or that lie in a larger storage, and gradients of other strides than theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from axes import Axis, happens

if TYPE_CHECKING:
    from rows import Loop


def with_class(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Gives one module a forward of its own: forward(the class's own, module, *args)."""
    kind = type(module)
    own = {"forward": lambda self, *args, **given: forward(super(made, self).forward, self, *args, **given)}
    made = type(kind.__name__, (kind,), own)
    module.__class__ = made


def linears(net: nn.Module) -> list[nn.Linear]:
    return [module for module in net.modules() if isinstance(module, nn.Linear)]


class Laid(Axis):
    def net(self, net: nn.Module, t: Loop) -> nn.Module:
        self.prepare(net)
        for param in net.parameters():
            param.data = self.lay(param.data)
        return net

    def prepare(self, net: nn.Module) -> None: ...

    def lay(self, value: Tensor) -> Tensor:
        return value


def transposed(value: Tensor) -> Tensor:
    return value.mT.contiguous().mT if value.ndim > 1 else value


@happens("layout: transposed")
class Transposed(Laid):
    def lay(self, value: Tensor) -> Tensor:
        return transposed(value)


@happens("layout: strided")
class Strided(Laid):
    """Every third element of a storage, from the second on. A product of it rounds otherwise than of what `zero` makes
    dense."""

    tolerance = 1e-5

    def lay(self, value: Tensor) -> Tensor:
        return value.new_zeros(*value.shape, 3)[..., 1].copy_(value)


@happens("layout: one storage")
class OneStorage(Laid):
    def prepare(self, net: nn.Module) -> None:
        total = sum(param.numel() + 3 for param in net.parameters())
        self.storage, self.used = next(net.parameters()).new_zeros(total), 0

    def lay(self, value: Tensor) -> Tensor:
        start, self.used = self.used, self.used + value.numel() + 3
        return self.storage[start : start + value.numel()].view(value.shape).copy_(value)


def through_images(forward: Callable[..., Any], net: Any, x: Tensor, *args: Any, **given: Any) -> Any:
    """x: at least two columns, in even number."""
    images = x.reshape(-1, 2, x.shape[-1] // 2, 1)
    return forward(net.images(images).reshape(x.shape), *args, **given)


class Imaged(Laid):
    def prepare(self, net: nn.Module) -> None:
        inside = dict(net._modules)
        net._modules.clear()
        net.images = nn.Conv2d(2, 2, 3, padding=1)
        net._modules.update(inside)
        with_class(net, through_images)


@happens("layout: channels last")
class ChannelsLast(Imaged):
    def lay(self, value: Tensor) -> Tensor:
        return value.contiguous(memory_format=torch.channels_last) if value.ndim == 4 else value


@happens("layout: several formats")
class SeveralFormats(ChannelsLast):
    def lay(self, value: Tensor) -> Tensor:
        return super().lay(value) if value.ndim == 4 else transposed(value)


def gained(forward: Callable[..., Any], layer: Any, x: Tensor) -> Any:
    return forward(x) * layer.gain + layer.nothing.sum()


@happens("layout: 0-dim and empty")
class NoDims(Laid):
    def prepare(self, net: nn.Module) -> None:
        for layer in linears(net):
            layer.gain, layer.nothing = nn.Parameter(torch.tensor(0.9)), nn.Parameter(torch.zeros(0, 3))
            with_class(layer, gained)


class Turned(torch.autograd.Function):
    """The identity, whose gradient has other strides."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return transposed(gradient)


def by_turned_weight(forward: Callable[..., Any], layer: Any, x: Tensor) -> Tensor:
    return nn.functional.linear(x, Turned.apply(layer.weight), layer.bias)


def with_a_sum(forward: Callable[..., Any], layer: Any, x: Tensor) -> Any:
    """The gradient of a parameter that is only summed is one number, expanded."""
    return forward(x) * layer.weight.new_tensor(0.5) + 0.01 * layer.only_summed.sum()


@happens("layout: transposed gradients")
class TransposedGradients(Laid):
    def prepare(self, net: nn.Module) -> None:
        for layer in linears(net):
            with_class(layer, by_turned_weight)


@happens("layout: expanded gradients")
class ExpandedGradients(Laid):
    def prepare(self, net: nn.Module) -> None:
        for layer in linears(net):
            layer.only_summed = nn.Parameter(torch.ones(3, 5))
            with_class(layer, with_a_sum)
