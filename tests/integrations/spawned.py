"""Trains by ranks that Lightning spawns, as in a notebook, at a stage."""

import sys
import warnings

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import zero
from zero.integrations.lightning import ZeroStrategy


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self) -> None:
        weights = zero.full_state_dict(self.trainer.strategy.model, to=None)
        if self.global_rank == 0:
            torch.save(weights, "weights.pt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    module, strategy = Module(), ZeroStrategy(int(sys.argv[1]), start_method="spawn")
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, **quiet)
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(16, 3)), batch_size=2))
    expected = torch.load("weights.pt", weights_only=True)
    assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())
    print("the weights are those that rank 0 had")
