"""Chooses the units of FSDP by policies of torch.distributed.fsdp.wrap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from zero._torch import chosen_by_policy
from zero.fsdp.units import choosers


def by_policy(root: nn.Module, policy: Any, *, apart: Sequence[nn.Module], small: bool) -> set[nn.Module] | None:
    """See Chooser. Calls `ModuleWrapPolicy`, `CustomPolicy`, `lambda_auto_wrap_policy` and similar ones as PyTorch
    calls them."""
    if policy is None:
        return None
    chosen = chosen_by_policy(policy, root)
    if chosen is None and callable(policy):
        chosen = set()
        _ask(policy, root, chosen)
    return chosen


def _ask(policy: Callable[..., bool], module: nn.Module, chosen: set[nn.Module], *, is_root: bool = True) -> int:
    """Calls a policy function from the inside out, as PyTorch does. Returns the number of elements in chosen units."""
    numel = sum(param.numel() for param in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    wrapped = sum(_ask(policy, child, chosen, is_root=False) for child in module.children())
    if not is_root and policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped):
        chosen.add(module)
        return numel
    return wrapped


choosers.append(by_policy)
