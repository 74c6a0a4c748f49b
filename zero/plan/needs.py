"""What an optimizer keeps, which cannot be read from shapes: it is measured by running it on a few kilobytes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero.plan.meter import Meter

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
    """Runs two steps of the optimizer on matrices of the dtype; as on CUDA with the backend "nccl".

    It runs on the CPU, also where plans are made under torch.device("meta"): optimizers may look at their own numbers.
    """
    options: dict[str, Any] = {}
    if backend == "nccl" and "foreach" in inspect.signature(optim).parameters:
        options["foreach"] = True  # what torch chooses for parameters on CUDA, and for no others
    with torch.device("cpu"):
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
