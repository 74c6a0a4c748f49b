"""Optimizers that read a whole parameter to step one element of it, as those that people bring along do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Lamb(Optimizer):
    """Adam's step of each tensor, as long as the tensor (You et al., 2020, algorithm 2)."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state |= {"mean": torch.zeros_like(param), "square": torch.zeros_like(param), "step": 0}
                state["step"] += 1
                state["mean"].lerp_(param.grad, 0.1)
                state["square"].lerp_(param.grad.square(), 0.01)
                mean = state["mean"] / (1 - 0.9 ** state["step"])
                update = mean / ((state["square"] / (1 - 0.99 ** state["step"])).sqrt() + 1e-6) + 0.1 * param
                ratio = torch.linalg.vector_norm(param) / torch.linalg.vector_norm(update)
                param.sub_(update, alpha=group["lr"] * float(ratio) if ratio > 0 else group["lr"])


class Shampoo(Optimizer):
    """Preconditions matrices from both sides (Gupta et al., 2018, algorithm 1); others are stepped as by SGD."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                update = param.grad
                if param.dim() == 2:
                    state = self.state[param]
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
