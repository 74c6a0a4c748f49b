"""Optimizers that are not torch's, as people bring along: they read whole parameters to step one element of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class ByParameter(Optimizer):
    """Steps each parameter that has a gradient by itself. State of a new one is empty."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.step_one(param, self.state[param], group)

    def step_one(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lamb(ByParameter):
    """Y. You et al., Large Batch Optimization for Deep Learning, 2020, algorithm 2: needs whole-tensor norms."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": 1e-6, "weight_decay": 0.01})

    def step_one(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(step=0, mean=torch.zeros_like(param), square=torch.zeros_like(param))
        state["step"] += 1
        first, second = group["betas"]
        state["mean"].mul_(first).add_(param.grad, alpha=1 - first)
        state["square"].mul_(second).addcmul_(param.grad, param.grad, value=1 - second)
        mean = state["mean"] / (1 - first ** state["step"])
        square = state["square"] / (1 - second ** state["step"])
        update = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * param
        trust = param.norm() / update.norm() if param.norm() > 0 and update.norm() > 0 else 1.0
        param.sub_(update * trust, alpha=group["lr"])


class Shampoo(ByParameter):
    """Preconditions matrices from both sides (Gupta et al., 2018, algorithm 1); others are stepped as by SGD."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    def step_one(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        update = param.grad
        assert update is not None
        if param.dim() == 2:
            if not state:
                state["left"] = torch.eye(param.shape[0]) * 1e-3
                state["right"] = torch.eye(param.shape[1]) * 1e-3
            state["left"] += update @ update.t()
            state["right"] += update.t() @ update
            update = inverse_fourth_root(state["left"]) @ update @ inverse_fourth_root(state["right"])
        param.sub_(update, alpha=group["lr"])


def inverse_fourth_root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=1e-6) ** -0.25) @ vectors.t()
