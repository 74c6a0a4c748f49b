"""Lightning's launcher of processes by fork or spawn, whose results have full weights at stage 3, too."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher

from zero.integrations.lightning import sharding


class Launcher(_MultiProcessingLauncher):
    """Starts the ranks of `start_method="fork"` or "spawn", and brings rank 0's results into the main process: what the
    Trainer's method returned, the metrics, and after fit the weights, which the module there is given."""

    def _collect_rank_zero_results(self, trainer: pl.Trainer, results: Any) -> Any:
        """Collective at stage 3."""
        model = sharding.sharded_before(trainer.lightning_module)
        if model is None:
            return super()._collect_rank_zero_results(trainer, results)
        with model.summon_full_params(writeback=False, rank0_only=True, offload_to_cpu=True):
            first = trainer.global_rank == 0  # only there weights are full
            return super()._collect_rank_zero_results(trainer, results) if first else None
