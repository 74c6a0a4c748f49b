"""A small GPT that reads bytes, and the text that it reads."""

import math
import sysconfig
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

BYTES = 256
CONTEXT = 128
SEQUENCES = 2  # a step and rank


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.attention_norm(x))
        hidden: Tensor = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return x + hidden

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        joined: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return joined


class GPT(nn.Module):
    """Next-token prediction, by default of bytes; the output layer is the embedding's own weight where it is tied."""

    def __init__(self, layers: int, width: int, *, tokens: int = BYTES, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, count_heads(width)) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.output = None if tied else nn.Linear(width, tokens, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy in nats a byte; both arguments are int64 of shape (batch, length)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.position(places)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits = F.linear(x, self.embedding.weight) if self.output is None else self.output(x)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def count_heads(width: int) -> int:
    """Heads of about 64 numbers each, as many as divide the width."""
    return math.gcd(width, max(1, width // 64))


def read_text(file: Path | None = None) -> NDArray[np.uint8]:
    """The bytes of `file`, or of the Python standard library's modules."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [file] if file else sorted(folder.glob("*.py"))
    text = np.frombuffer(b"".join(path.read_bytes() for path in files), dtype=np.uint8)
    if len(text) <= CONTEXT:
        raise ValueError(f"{file or folder} has {len(text)} bytes of text; at least {CONTEXT + 1} are needed")
    return text


def draw_batch(text: NDArray[np.uint8], *, seed: int, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one rank's step, always the same for the same seed, step and rank."""
    starts = np.random.default_rng((seed, step, rank)).integers(len(text) - CONTEXT, size=SEQUENCES)
    window = np.stack([text[start : start + CONTEXT + 1] for start in starts]).astype(np.int64)
    return torch.from_numpy(window[:, :-1]), torch.from_numpy(window[:, 1:])
