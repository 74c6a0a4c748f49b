"""Reads a checkpoint by `json` and `safetensors` alone, as docs/checkpoints.md says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor


def tensor(checkpoint: Path, entry: dict[str, Any]) -> Tensor:
    """A tensor, from its entry in the index."""
    pieces = []
    for piece in entry["pieces"]:
        with safe_open(checkpoint / piece["file"], "pt") as file:
            pieces.append(file.get_tensor(piece["key"]).flatten())
    values, order = torch.cat(pieces), entry.get("order", [*range(len(entry["shape"]))])
    parts: Sequence[Tensor] = [full := torch.empty(entry["shape"], dtype=values.dtype)]
    if order and isinstance(order[0], list):  # counted part by part, as tensor parallel ranks have them
        (dim, width), *order = order
        parts = full.split(width, dim)
    for part in parts:
        part.permute(order).copy_(values[: part.numel()].view(part.permute(order).shape))
        values = values[part.numel() :]
    return full
