"""What torch.compile was called with."""

from __future__ import annotations

import torch
from torch import nn

BETWEEN_UNITS = (
    "FSDP gathers and releases parameters between its units, which cannot be traced. Compile the model without "
    "fullgraph=True, or each of its units by itself, by unit.compile(fullgraph=True)"
)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile was called with this module."""
    return isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None


def compiled_modules(root: nn.Module) -> set[nn.Module]:
    """What torch.compile was called with, and all modules in it. What is traced must not have looking in it."""
    return {inner for module in root.modules() if is_compiled(module) for inner in module.modules()}


def compiled_in_pieces(root: nn.Module) -> bool:
    """Whether torch.compile was called with modules inside the root."""
    whole = {root, getattr(root, "_orig_mod", root)}
    return any(is_compiled(module) for module in root.modules() if module not in whole)
