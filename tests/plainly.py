"""Reads a checkpoint by `json` and `safetensors` alone, as docs/checkpoint_format.md says."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor


def tensor(checkpoint: Path, entry: dict[str, Any]) -> Tensor:
    """A tensor, from its entry in the index."""
    shards = []
    for shard in entry["shards"]:
        with safe_open(checkpoint / shard["file"], "pt") as file:
            shards.append(file.get_tensor(shard["key"]).flatten())
    values, order = torch.cat(shards), entry.get("order", [*range(len(entry["shape"]))])
    parts: Sequence[Tensor] = [full := torch.empty(entry["shape"], dtype=values.dtype)]
    if "slices" in entry:  # counted slice by slice, as tensor parallel ranks have them
        dim, width = entry["slices"]
        parts = full.split(width, dim)
    for part in parts:
        part.permute(order).copy_(values[: part.numel()].view(part.permute(order).shape))
        values = values[part.numel() :]
    return full
