"""GradNormCallback: the norm of all gradients, in the logs of Lightning's Trainer."""

from __future__ import annotations

import lightning.pytorch as pl
from torch.optim import Optimizer

import zero


class GradNormCallback(pl.Callback):
    """Logs `zero.grad_norm` between backward and step, before clipping, as "grad_norm".

    It takes the place of Lightning's own `grad_norm`, which sees this rank's shards at stage 3 and raises at stage 2.

    every: steps between norms. `norm` is the last one, the same on every rank.
    """

    def __init__(self, every: int = 50, norm_type: float = 2.0) -> None:
        self._every, self._norm_type = every, norm_type
        self.norm: float | None = None

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if (trainer.global_step + 1) % self._every:
            return
        self.norm = zero.grad_norm(trainer.strategy.model or pl_module, optimizer, self._norm_type).item()
        for logger in trainer.loggers:
            logger.log_metrics({"grad_norm": self.norm}, step=trainer.global_step)
