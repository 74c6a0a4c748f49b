"""What torch.compile was called with."""

from __future__ import annotations

from torch import nn

from zero._torch import is_compiled, uncompiled

BETWEEN_UNITS = (
    "FSDP gathers and releases parameters between its units, which cannot be traced. Compile the model without "
    "fullgraph=True, or each of its units by itself, by unit.compile(fullgraph=True)"
)


def compiled_modules(root: nn.Module) -> set[nn.Module]:
    """What torch.compile was called with, and all modules in it. What is traced must not have looking in it."""
    return {inner for module in root.modules() if is_compiled(module) for inner in module.modules()}


def compiled_in_pieces(root: nn.Module) -> bool:
    """Whether torch.compile was called with modules inside the root."""
    whole = {root, uncompiled(root)}
    return any(is_compiled(module) for module in root.modules() if module not in whole)
