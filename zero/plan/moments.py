"""The moments of a step, and what a model's own forward and backward hold between them.

Bytes are besides parameters and gradients. They are measured by running the model on tensors without values.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from zero._torch import NEEDS_VALUES, is_of_two_devices, without_values
from zero.fsdp import MixedPrecision
from zero.plan.attributes import plain_tensors, put_back
from zero.plan.calls import misfit
from zero.plan.meter import Meter
from zero.sdp.tensors import map_tensors, tensors_in


class Event(enum.Enum):
    """What FSDP does something at."""

    PRE_FORWARD = "the forward of a unit begins"
    POST_FORWARD = "and has ended"
    PRE_BACKWARD = "a gradient of a unit's output is there"
    GRADIENT = "gradients of parameters are there"
    LEAVING = "a gradient has left a unit through its inputs: its backward is complete"


class Mark(NamedTuple):
    """A moment that was measured.

    name: of the unit, or of the parameter whose gradient is there.
    before: the most that was held since the moment before, the gradient included.
    after: what is left, the gradient not included.
    """

    event: Event
    name: str
    before: int
    after: int


def measure(
    module: nn.Module, units: Iterable[str], batch: Sequence[Any], precision: MixedPrecision, device: str
) -> list[Mark]:
    """Runs a forward and a backward on fake tensors: nothing of the model's or the batch's size is allocated.

    units: the names of the modules that are units. While this runs they have hooks.
    Raises ValueError where forward does not take such arguments, RuntimeError where it needs values (`.item()`, masks
    by value) or has tensors elsewhere.
    """
    with put_back(module), without_values():

        def faked(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
            wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=wanted, device=device)

        dtypes = {
            name: precision.dtype_of(holder)
            for prefix, holder in module.named_modules()
            for name, _ in holder.named_parameters(prefix, recurse=False)
        }
        params = {
            name: nn.Parameter(faked(param.detach(), dtypes.get(name)), requires_grad=param.requires_grad)
            for name, param in module.named_parameters()
        }
        cast = {one.tensor for one in precision.buffers_to_cast(module.modules())}
        buffers = {
            name: faked(buffer, precision.buffer_dtype if buffer in cast else None)
            for name, buffer in module.named_buffers()
        }
        inputs = map_tensors(faked, tuple(batch))
        with Meter(apart=[*params.values(), *buffers.values()]) as meter:
            recorder = _Recorder(meter)
            for name, param in params.items():
                if param.requires_grad:
                    param.register_post_accumulate_grad_hook(recorder.arrival(name))
            arguments = precision.cast_inputs(module, inputs, root=True)
            step = _Step(module)
            tensors = {f"module.{name}": tensor for name, tensor in [*params.items(), *buffers.items()]}
            with recorder.watching(module, units), _explaining(module, batch, device):
                functional_call(step, tensors, arguments)
    return recorder.marks


@contextmanager
def _explaining(module: nn.Module, batch: Sequence[Any], device: str) -> Iterator[None]:
    """Says of errors that come of running the model in this way what to do about them."""
    try:
        yield
    except NEEDS_VALUES as error:
        raise RuntimeError(
            "the activations cannot be measured without running the model: its forward needs values, as .item() and "
            f"masks by value do ({error}). Plan without a batch, and add what a step of yours holds to what is planned."
        ) from error
    except TypeError as error:
        problem = misfit(module.forward, *batch)
        if not problem:
            raise
        raise ValueError(
            f"{type(module).__name__}.forward cannot be called with what is in the batch (positional arguments: "
            f"{len(batch)}): {problem}. Pass all that it needs, in order; what it takes by keyword only, have a module "
            "around it pass."
        ) from error
    except RuntimeError as error:
        elsewhere = [name for name, tensor in plain_tensors(module) if tensor.device.type != device]
        if not elsewhere or not is_of_two_devices(error):
            raise
        raise RuntimeError(
            f"the activations are measured on {device}, but these attributes are tensors elsewhere: "
            f"{', '.join(elsewhere)} ({error}). Make them buffers, which go where the model goes: "
            'self.register_buffer("name", tensor, persistent=False).'
        ) from error


class _Step(nn.Module):
    """A forward and a backward in one, so that what is computed again in backward finds the same parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> None:
        outputs = [tensor for tensor in tensors_in(self.module(*args)) if tensor.requires_grad]
        if outputs:
            scalar = len(outputs) == 1 and not outputs[0].dim()
            loss = outputs[0] if scalar else torch.stack([output.float().sum() for output in outputs]).sum()
            outputs.clear()
            loss.backward()


class _Recorder:
    """Notes moments as Schedule comes to know of them."""

    def __init__(self, meter: Meter) -> None:
        self.marks: list[Mark] = []
        self._meter = meter
        self._in_backward: set[str] = set()
        self._calls: Counter[str] = Counter()
        self._inputs: dict[str, list[Tensor]] = {}
        """Of the units whose forward runs, those that need a gradient."""

    def _note(self, event: Event, name: str) -> None:
        self.marks.append(Mark(event, name, self._meter.peak(), self._meter.live()))
        self._meter.reset_peak()

    def arrival(self, name: str) -> Callable[[Tensor], None]:
        def arrived(param: Tensor) -> None:
            most = self._meter.peak()
            param.grad = None
            self._meter.reset_peak()
            self.marks.append(Mark(Event.GRADIENT, name, most, self._meter.live()))

        return arrived

    @contextmanager
    def watching(self, module: nn.Module, units: Iterable[str]) -> Iterator[None]:
        hooks = []
        for name in units:
            unit = module.get_submodule(name)
            hooks.append(unit.register_forward_pre_hook(self._pre_forward(name), with_kwargs=True))
            hooks.append(unit.register_forward_hook(self._post_forward(name)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _pre_forward(self, name: str) -> Callable[..., Any]:
        def pre_forward(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if name in self._in_backward:
                return None
            self._note(Event.PRE_FORWARD, name)
            return self._watch_inputs(name, (args, kwargs)) if name and torch.is_grad_enabled() else None

        return pre_forward

    def _watch_inputs(self, name: str, inputs: Any) -> Any:
        needing = self._inputs[name] = []
        self._calls[name] += 1

        def leaving(_: Tensor) -> None:
            self._calls[name] -= 1
            if not self._calls[name] and name in self._in_backward:
                self._in_backward.discard(name)
                self._note(Event.LEAVING, name)

        def watched(tensor: Tensor) -> Tensor:
            if tensor.requires_grad:
                if not needing:
                    tensor = tensor.view_as(tensor)
                    tensor.register_hook(leaving)
                needing.append(tensor)
            return tensor

        return map_tensors(watched, inputs)

    def _post_forward(self, name: str) -> Callable[..., None]:
        def pre_backward(_: Tensor) -> None:
            if name not in self._in_backward:
                self._in_backward.add(name)
                self._note(Event.PRE_BACKWARD, name)

        def post_forward(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if name in self._in_backward:
                return
            inputs = self._inputs.pop(name, [])
            for tensor in tensors_in(output):
                if tensor.requires_grad and not any(tensor is one for one in inputs):
                    tensor.register_hook(pre_backward)
            self._note(Event.POST_FORWARD, name)

        return post_forward
