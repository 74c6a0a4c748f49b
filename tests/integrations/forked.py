"""Trains at each stage on processes that Lightning's own launcher forks, and saves what the main process gets of it."""

import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import lightnings
import torch

warnings.simplefilter("ignore")
for stage in (2, 3):
    module = lightnings.Module()
    run = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=lightnings.strategy(stage, start_method="fork"),
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    run.fit(module)
    torch.save((module.state_dict(), run.callback_metrics["val_loss"].item()), Path(sys.argv[1], f"{stage}.pt"))
