"""A rank whose data has ended computes its last batch again, only so that its operations are in the same order.

Its gradients are zeros even where the computation gives NaN. Afterwards random number generators, buffers and modes of
modules are as before. Users' hooks on modules are called.

At stage 2 backward is not repeated: ShardedDDP.reduce() sends the same, and marks all parameters as unused here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from zero._torch import buffers_of
from zero.fsdp import FSDP
from zero.sdp import ShardedDDP
from zero.sdp.tensors import map_tensors, nearest_leaf, tensors_in


def outputs_in(output: Any) -> list[tuple[Tensor, Node | None]]:
    """The tensors at which a backward may begin, and the nearest leaf of each."""
    made = [tensor for tensor in dict.fromkeys(tensors_in(output)) if tensor.grad_fn is not None]
    return [(tensor, nearest_leaf(tensor)) for tensor in made]


class Call:
    """A forward that the user called. reached: the places of the outputs that a backward has reached."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], kind: str, device: torch.device) -> None:
        self._args, self._kwargs = map_tensors(_without_graph, (args, kwargs))
        self.kind, self.reached = kind, set[int]()
        enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        self._autocast = device.type, dtype, enabled, torch.is_autocast_cache_enabled()

    def again(self, model: nn.Module) -> Any:
        args, kwargs = map_tensors(_copied, (self._args, self._kwargs))
        with torch.autocast(*self._autocast):
            return model(*args, **kwargs)


def _without_graph(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor


def _copied(tensor: Tensor) -> Tensor:
    """A copy, because a model may write into it. If it requires a gradient it is no leaf, as leaves refuse that."""
    return tensor.detach().requires_grad_(tensor.requires_grad).clone()


class Repeat:
    """The last forwards of a model, by their kind."""

    def __init__(self, model: DistributedDataParallel | ShardedDDP | FSDP) -> None:
        self._model: Any = model
        self._module = model.module  # asking the model for it may wait for steps, which other ranks do elsewhere
        self._device = next(self._module.parameters()).device
        self._calls: dict[str, Call] = {}
        self._outputs: dict[int, list[Tensor]] = {}
        """Outputs of repeated forwards, by the number of the forward."""

    def remember(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Keeps the arguments of a forward, before it runs."""
        kind = f"{torch.is_grad_enabled()} {self._model.training} {len(args)} {sorted(kwargs)}"
        self._calls.pop(kind, None)
        self._calls[kind] = call = Call(args, kwargs, kind, self._device)
        return call

    def forget(self) -> None:
        self._calls.clear()
        self._outputs.clear()

    def buffers(self) -> list[Tensor]:
        """The buffers that rank 0 broadcasts."""
        return [*self._module.buffers()] if self._model.broadcast_buffers else []

    @contextmanager
    def _unseen(self, *, training: bool) -> Iterator[None]:
        """On exit random number generators, buffers and modes are restored."""
        modes = [(module, module.training) for module in (self._model, *self._module.modules())]
        buffers = [
            (own, name, buffer, buffer.detach().clone())
            for own in map(buffers_of, self._module.modules())
            for name, buffer in own.items()
            if buffer is not None
        ]
        if self._model.training != training:
            self._model.train(training)
        devices = [] if self._device.type == "cpu" else [self._device]
        kind = "cuda" if self._device.type == "cpu" else self._device.type
        try:
            with torch.random.fork_rng(devices, device_type=kind):
                yield
        finally:
            for module, mode in modes:
                module.training = mode
            for own, name, buffer, value in buffers:
                own[name] = buffer
                buffer.data.copy_(value)  # does not count as a write, for a backward that has read it

    def forward(self, act: dict[str, Any], kind: str) -> None:
        """Collective. Runs the same forward as ranks with data, on the last batch of this kind, or on the last one."""
        call = self._calls.get(kind) or [*self._calls.values()][-1]
        with self._unseen(training=act["training"]), self._reducing(act), torch.set_grad_enabled(act["gradients"]):
            output = call.again(self._model)
        if not isinstance(self._model, ShardedDDP):
            made = [tensor for tensor, _ in outputs_in(output)]
            self._outputs[act["number"]] = [made[place] for place in call.reached if place < len(made)] or made

    def backward(self, act: dict[str, Any]) -> None:
        """Collective. Runs the same backward as ranks with data."""
        if isinstance(self._model, ShardedDDP):
            if act["reduced"]:
                self._model.reduce()
            return
        outputs = [tensor for number in act["of"] for tensor in self._outputs[number]]
        with self._unseen(training=self._model.training), self._reducing(act):
            zeros = [torch.zeros_like(tensor) for tensor in outputs]
            torch.autograd.backward(outputs, zeros, retain_graph=act["keeps_graph"])

    def _reducing(self, act: dict[str, Any]) -> Any:
        return nullcontext() if act["reduced"] else self._model.no_sync()

    def keep(self, numbers: Collection[int]) -> None:
        """Drops the outputs of all other forwards, whose backward can no longer follow."""
        self._outputs = {number: self._outputs[number] for number in numbers if number in self._outputs}

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        """Backwards in this context add zeros to the gradients."""
        with ExitStack() as stack:
            for param in self._module.parameters():
                if param.requires_grad:
                    for hook in _hooks(param, leave_none=isinstance(self._model, FSDP)):
                        stack.callback(hook.remove)
            yield


def _hooks(param: nn.Parameter, *, leave_none: bool) -> list[RemovableHandle]:
    """Hooks that replace the parameter's gradient by zeros. leave_none: a parameter without gradient stays without."""
    had_none = False

    def clear(gradient: Tensor) -> Tensor:
        nonlocal had_none
        had_none = param.grad is None
        return torch.zeros_like(gradient)

    def remove(_: Tensor) -> None:
        if had_none:
            param.grad = None

    hooks = [param.register_hook(clear)]
    if leave_none:
        hooks.append(param.register_post_accumulate_grad_hook(remove))
    return hooks
