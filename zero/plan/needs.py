"""What cannot be read from shapes: what an optimizer keeps, and what a model's own step holds. Both are measured,
by running the optimizer on a few kilobytes, and the model on tensors without values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from zero.fsdp import MixedPrecision
from zero.fsdp.precision import cast
from zero.plan.meter import Meter
from zero.sdp.tensors import tensors_in

_SIDE = 64


@dataclass(frozen=True)
class OptimizerNeeds:
    """In multiples of a parameter's bytes, but for `fixed`.

    states: state of one parameter.
    fixed: bytes of state of one parameter whatever its size, such as Adam's step.
    scratch: what a step holds for a moment besides: of the largest parameter, or (`at_once`) of all.
    """

    states: float
    fixed: int
    scratch: float
    at_once: bool


def measure_optimizer(optim: Callable[..., Optimizer], dtype: torch.dtype, backend: str) -> OptimizerNeeds:
    """Runs two steps of the optimizer on matrices of the dtype; as on CUDA with the backend "nccl"."""
    options: dict[str, Any] = {}
    if backend == "nccl" and "foreach" in inspect.signature(optim).parameters:
        options["foreach"] = True  # what torch chooses for parameters on CUDA, and for no others
    one, state = _probe(optim, dtype, 1, options)
    four, _ = _probe(optim, dtype, 4, options)
    whole = [tensor for tensor in state if tensor.numel() >= _SIDE * _SIDE]
    size = _SIDE * _SIDE * dtype.itemsize
    at_once = four > 2 * one
    return OptimizerNeeds(
        states=sum(tensor.nbytes for tensor in whole) / size,
        fixed=sum(tensor.nbytes for tensor in state if not any(tensor is other for other in whole)),
        scratch=(four / 4 if at_once else one) / size,
        at_once=at_once,
    )


def _probe(
    optim: Callable[..., Optimizer], dtype: torch.dtype, number: int, options: Mapping[str, Any]
) -> tuple[int, list[Tensor]]:
    """The most bytes that a step holds besides what is there before and after, and the state of the first parameter."""
    params = [nn.Parameter(torch.ones(_SIDE, _SIDE, dtype=dtype)) for _ in range(number)]
    optimizer = optim(params, **options)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    state = [value for value in optimizer.state[params[0]].values() if isinstance(value, Tensor)]
    standing = [value for kept in optimizer.state.values() for value in kept.values() if isinstance(value, Tensor)]
    grads = [param.grad for param in params if param.grad is not None]
    with Meter(apart=[*params, *grads, *standing]) as meter:
        optimizer.step()
    return meter.peak(), state


@dataclass(frozen=True)
class Activations:
    """Bytes that a model's own forward and backward hold besides parameters and their gradients.

    forward: the most in forward.
    order: the trained parameters in the order in which their gradients arrive.
    before: the most from one gradient's arrival to this one's, the arriving gradient included.
    after: what is left when it has arrived, the gradient not included.
    """

    forward: int = 0
    order: tuple[str, ...] = ()
    before: Mapping[str, int] = field(default_factory=dict)
    after: Mapping[str, int] = field(default_factory=dict)


def measure_activations(module: nn.Module, batch: Sequence[Any], precision: MixedPrecision, device: str) -> Activations:
    """Runs a forward and a backward on fake tensors: nothing of the model's or the batch's size is allocated.

    Raises RuntimeError where the model's forward needs values (`.item()`, masks by value).
    """
    with FakeTensorMode(allow_non_fake_inputs=True):

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
        buffers = {name: faked(buffer, precision.buffer_dtype) for name, buffer in module.named_buffers()}
        inputs = tree_map(lambda value: faked(value) if isinstance(value, Tensor) else value, tuple(batch))
        with Meter(apart=[*params.values(), *buffers.values()]) as meter:
            order: list[str] = []
            before: dict[str, int] = {}
            after: dict[str, int] = {}

            def arrival(name: str) -> Callable[[Tensor], None]:
                def arrived(param: Tensor) -> None:
                    order.append(name)
                    before[name] = meter.peak()
                    param.grad = None
                    after[name] = meter.live()
                    meter.reset_peak()

                return arrived

            for name, param in params.items():
                if param.requires_grad:
                    param.register_post_accumulate_grad_hook(arrival(name))
            arguments = cast(inputs, precision.param_dtype) if precision.cast_forward_inputs else inputs
            try:
                output = functional_call(module, {**params, **buffers}, arguments)
            except torch._subclasses.fake_tensor.DataDependentOutputException as error:
                raise RuntimeError(
                    f"the activations cannot be measured without running the model: its forward needs values "
                    f"({error}). Plan without a batch, and add what a step of yours holds to what is planned."
                ) from error
            forward = meter.peak()
            meter.reset_peak()
            outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            loss = outputs[0] if len(outputs) == 1 and not outputs[0].dim() else sum(o.float().sum() for o in outputs)
            del output, outputs
            assert isinstance(loss, Tensor)
            loss.backward()
    return Activations(forward, tuple(order), before, after)
