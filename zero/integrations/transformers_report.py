"""MemoryCallback: the bytes that each rank holds, in the logs of the Trainer of transformers."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from zero.comm import Traffic, traffic
from zero.plan.report import Report, report


class MemoryCallback(TrainerCallback):  # type: ignore[misc]
    """Adds `zero.report`, taken between backward and step, to the Trainer's logs, and prints the last one at the end.

    every: steps between reports. Figures are this rank's, by the names of `Report.numbers()`. `sent` counts from the
    step before, so reports begin with the second step. `report` is the last one.
    """

    def __init__(self, every: int = 50) -> None:
        self._every = every
        self._before: Traffic | None = None
        self.report: Report | None = None

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        before, self._before = self._before, traffic()
        if before is None or (state.global_step + 1) % self._every:
            return
        model: nn.Module = given["model"]
        optimizer: Optimizer = getattr(given["optimizer"], "optimizer", given["optimizer"])
        self.report = report(model, optimizer, since=before)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        if self.report is not None:
            given["logs"].update(self.report.numbers())

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        if self.report is not None and state.is_world_process_zero:
            print(self.report)
