"""A GPT of a given number of parameters, for plans without a model."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# About the vocabulary of GPT-2; smaller models spend at most a quarter of their parameters on it.
WORDS = 50_304

# The most tokens of a sequence, and those of a rank's step if nothing is said.
LENGTH = 2048


class Block(nn.Module):
    """Causal attention and a two-layer perceptron, each behind a norm and added to its input; no biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = math.gcd(width, width // 64 or 1)
        self.attention_norm, self.mlp_norm = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden: Tensor = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return x + hidden


class GPT(nn.Module):
    """Next-word prediction; the output layer is the embedding's own weight. FSDP makes each block a unit."""

    def __init__(self, layers: int, width: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)

        self.shape = f"a GPT of {layers} blocks, {width:,} numbers a token"

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean cross entropy. tokens: int64 of shape (sequences, length), which stand for the targets, too."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def gpt_of(parameters: float, layers: int | None, dtype: torch.dtype) -> GPT:
    """A GPT on the meta device of so many parameters, within less than one word's. layers: by default GPT-3's."""
    if not math.isfinite(parameters):
        raise ValueError(f"{parameters} parameters: give a finite number, such as 7B.")
    layers = layers or max(1, round(3.8 * (parameters / 1e6) ** 0.24))
    words = min(WORDS, parameters / 4 / math.sqrt(parameters * 3 / 4 / (12 * layers))) if parameters > 0 else 0
    width = (math.sqrt(words**2 + 48 * layers * max(0.0, parameters)) - words) / (24 * layers)  # 12 l w² + v w = n
    multiple = 64 if width >= 512 else 8
    width = int(width) // multiple * multiple
    left = parameters - width * (layers * (12 * width + 2) + 1)  # norms are counted
    if width < 8 or left < width:
        raise ValueError(f"{parameters:,.0f} parameters are too few for a GPT of {layers} layers. Give other numbers.")
    with torch.device("meta"):
        return GPT(layers, width, int(left // width)).to(dtype)


def batch_of(tokens: int) -> list[Tensor]:
    """Arguments of a forward with so many tokens, or a few more, in sequences of one length, LENGTH at most."""
    sequences = -(-tokens // LENGTH)
    return [torch.empty(sequences, -(-tokens // sequences), dtype=torch.int64, device="meta")]
