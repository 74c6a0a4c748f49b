"""Trains a small model by Lightning; the strategy says the stage.

python docs/examples/lightning_train.py zero_stage_3 2
"""

import sys

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zero.integrations.lightning  # noqa: F401 (registers zero_stage_1, _2 and _3)


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(64, 4, dim_feedforward=256, batch_first=True)
        self.net = nn.Sequential(nn.Embedding(256, 64), block, nn.Linear(64, 256))

    def training_step(self, batch, number):
        (tokens,) = batch
        logits = self.net(tokens[:, :-1]).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


L.seed_everything(0)
rows = (torch.randint(256, (256, 1)) + torch.arange(32)) % 256
loader = DataLoader(TensorDataset(rows), batch_size=8, shuffle=True)
stage, ranks = sys.argv[1], int(sys.argv[2])
trainer = L.Trainer(strategy=stage, devices=ranks, max_epochs=1, gradient_clip_val=1.0)
trainer.fit(Model(), loader)
trainer.save_checkpoint("model.ckpt", weights_only=True)
