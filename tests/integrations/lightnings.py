"""A model, data and a Trainer for the tests of zero.integrations.lightning, on ranks that there are already."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zero.integrations.lightning

WIDTH = 8
BATCHES = 4


class Environment(ClusterEnvironment):
    """Ranks that are there already."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        return 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._world

    def set_world_size(self, size: int) -> None: ...

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None: ...

    def local_rank(self) -> int:
        return self._rank

    def node_rank(self) -> int:
        return 0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Module(pl.LightningModule):
    """Keeps the losses that it saw."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self.options = {"lr": 0.01, **options}
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.log("val_loss", loss, sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], number: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        decayed = [param for param in self.parameters() if param.dim() > 1]
        others = [param for param in self.parameters() if param.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, **self.options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(4 * BATCHES * 2, WIDTH, generator=generator)
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def strategy(stage: int, **options: Any) -> Any:
    """Of a stage; 0 is Lightning's own DistributedDataParallel."""
    if stage == 0:
        return pl.strategies.DDPStrategy()
    return zero.integrations.lightning.ZeroStrategy(stage, **options)


def trainer(rank: int, world: int, strategy: Any, **options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    saves = {"enable_checkpointing": False, "max_epochs": 1, "num_sanity_val_steps": 1}
    plugins = [Environment(rank, world), *options.pop("plugins", [])]
    return pl.Trainer(
        accelerator="cpu", devices=world, strategy=strategy, plugins=plugins, **{**quiet, **saves, **options}
    )
