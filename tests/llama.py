"""A small Llama, as Muon is used for: grouped queries, gated layers, and a head that is the embedding."""

import torch.nn.functional as F
from torch import Tensor, nn

WORDS = 96


class Block(nn.Module):
    """Attention with grouped queries: keys and values have a quarter of the rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        sizes = {"q": (width, width), "k": (width, width // 4), "v": (width, width // 4), "o": (width, width)}
        sizes |= {"gate": (width, width * 3), "up": (width, width * 3), "down": (width * 3, width)}
        self.of = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        q = self.of["q"](normed).unflatten(-1, (4, -1)).transpose(1, 2)
        k, v = (self.of[name](normed).unflatten(-1, (1, -1)).transpose(1, 2) for name in "kv")
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.of["o"](mixed.transpose(1, 2).flatten(-2))
        normed = self.norms[1](x)
        return x + self.of["down"](F.silu(self.of["gate"](normed)) * self.of["up"](normed))


class Llama(nn.Module):
    """Its head is its embedding."""

    def __init__(self, width: int = 32, blocks: int = 3, words: int = WORDS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.RMSNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embedding.weight.t()


def matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in model.named_parameters() if name.startswith("blocks") and param.dim() == 2}
