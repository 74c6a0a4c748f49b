"""Callbacks of Lightning's Trainer, for its logs: the bytes that each rank holds, and the norm of all gradients."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from zero.comm import Traffic, traffic
from zero.plan.report import Report, report
from zero.scripts import grad_norm


class MemoryCallback(pl.Callback):
    """Logs `zero.report` between backward and step, and prints the last report when fit ends.

    every: steps between reports. Rank 0's figures are logged, by the names of `Report.numbers()`. `sent` counts from
    the step before, so reports begin with the second step. `report` is this rank's last one.
    """

    def __init__(self, every: int = 50) -> None:
        self._every = every
        self._before: Traffic | None = None
        self.report: Report | None = None

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        before, self._before = self._before, traffic()
        if before is None or (trainer.global_step + 1) % self._every:
            return
        model = trainer.strategy.model or pl_module
        self.report = report(model, trainer.optimizers, since=before)
        for logger in trainer.loggers:
            logger.log_metrics(dict(self.report.numbers()), step=trainer.global_step)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.report is not None:
            rank_zero_info(str(self.report))


class GradNormCallback(pl.Callback):
    """Logs `zero.grad_norm` between backward and step, before clipping, as "grad_norm".

    It takes the place of Lightning's own `grad_norm`, which raises at stages 2 and 3.

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
        self.norm = grad_norm(trainer.strategy.model or pl_module, optimizer, self._norm_type).item()
        for logger in trainer.loggers:
            logger.log_metrics({"grad_norm": self.norm}, step=trainer.global_step)
