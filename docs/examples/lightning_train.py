"""A small GPT that learns the text of Python's standard library, trained by Lightning; the strategy says the stage.

    python docs/examples/lightning_train.py --strategy zero_stage_3 --devices 2

It is what it would be with --strategy ddp, but for the import that registers the stages.
"""

import argparse
import pathlib
import string

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zero.integrations.lightning  # noqa: F401 (registers zero_stage_1, zero_stage_2, zero_stage_3)

CONTEXT = 64


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        y = self.norm_1(x)
        x = x + self.attention(y, y, y, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.mlp(self.norm_2(x))


class GPT(lightning.LightningModule):
    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding, self.position = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embedding(text) + self.position(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, text: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        return self.loss(batch[0])

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        self.log("val_loss", self.loss(batch[0]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def text() -> torch.Tensor:
    """The start of a module, in pieces of one more byte than the model sees."""
    found = pathlib.Path(string.__file__).read_bytes()
    return torch.frombuffer(bytearray(found[: len(found) // (CONTEXT + 1) * (CONTEXT + 1)]), dtype=torch.uint8).long()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="zero_stage_2")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--weights", default="weights.ckpt")
    options = parser.parse_args()

    lightning.seed_everything(0)
    pieces = text().view(-1, CONTEXT + 1)
    training = DataLoader(TensorDataset(pieces), batch_size=8, shuffle=True)
    validation = DataLoader(TensorDataset(pieces[:32]), batch_size=8)
    trainer = lightning.Trainer(
        accelerator="auto",
        strategy=options.strategy,
        devices=options.devices,
        max_steps=options.steps,
        max_epochs=-1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    model = GPT()
    trainer.fit(model, training, validation)
    trainer.validate(model, validation)
    trainer.save_checkpoint(options.weights, weights_only=True)  # what GPT.load_from_checkpoint loads anywhere
