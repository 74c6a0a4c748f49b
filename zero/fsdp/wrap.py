"""Chooses the modules that become units, and the unit that each parameter belongs to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import nn

from zero._torch import chosen_by_policy
from zero.fsdp.repeated import only_holds, repeated_blocks

Policy = Any
"""A policy object or function of torch.distributed.fsdp.wrap, or None: see `unit_modules`."""


def unit_modules(
    root: nn.Module,
    policy: Policy,
    as_one_unit: Sequence[nn.Module | type[nn.Module]] = (),
    *,
    apart: Sequence[nn.Module] = (),
    small: bool = False,
) -> dict[str, nn.Module]:
    """Returns the modules that become units, by name, from the outside in; the root, named "", is always the first.

    policy: `ModuleWrapPolicy`, `CustomPolicy`, `lambda_auto_wrap_policy` and similar ones are called as PyTorch calls
        them. None chooses the blocks that the model repeats in an nn.ModuleList or nn.Sequential, see
        `repeated_blocks`. Parameters in no chosen module belong to the unit around them.
    apart: modules in which no units are chosen.
    small: without a policy, chooses other large modules, such as embeddings and output layers, too.
    as_one_unit: modules, or classes of modules, that become units without units inside them.

    Raises ValueError for an unknown type of policy, and for a unit without a forward.
    """
    if policy is None:
        chosen = repeated_blocks(root, apart)
        if small:
            chosen |= _large_leaves(root, chosen)
    elif (asked := chosen_by_policy(policy, root)) is not None:
        chosen = asked
    elif callable(policy):
        chosen = set()
        _ask(policy, root, chosen)
    else:
        raise ValueError(
            f"auto_wrap_policy is a {type(policy).__name__}. Pass a policy of torch.distributed.fsdp.wrap, such as "
            "ModuleWrapPolicy({Block}), or None."
        )
    classes = tuple(entry for entry in as_one_unit if isinstance(entry, type))
    single = {module for module in root.modules() if isinstance(module, classes) or module in as_one_unit}
    chosen -= {inner for module in single for inner in module.modules()}
    chosen |= single
    chosen -= {inner for module in apart for inner in module.modules()}
    chosen.add(root)
    units = {name: module for name, module in root.named_modules() if module in chosen}
    for name, module in units.items():
        if only_holds(module):
            raise ValueError(
                f"{name!r} is a {type(module).__name__}, which has no forward that it could be gathered for. Choose "
                "the module that calls its members."
            )
    return units


def params_by_unit(
    root: nn.Module, units: dict[str, nn.Module], ignored: Collection[nn.Parameter] = ()
) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Returns the named parameters of each unit, without ignored ones.

    A tied parameter, which is in several units, belongs to the innermost unit that contains these.
    """
    around: dict[nn.Parameter, list[str]] = {}
    names: dict[nn.Parameter, str] = {}
    unit_names = {module: name for name, module in units.items()}
    for prefix, module in root.named_modules(remove_duplicate=False):
        path = [unit_names[outer] for outer in _modules_around(root, prefix) if outer in unit_names]
        for name, param in module.named_parameters(prefix, recurse=False):
            names.setdefault(param, name)
            around[param] = _common(around[param], path) if param in around else path
    owned: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in units}
    for param, path in around.items():
        if param not in ignored:
            owned[path[-1]].append((names[param], param))
    return owned


def _modules_around(root: nn.Module, prefix: str) -> list[nn.Module]:
    """Returns the modules on the path from the root to the module of this name, both included."""
    around = [root]
    for atom in prefix.split(".") if prefix else []:
        around.append(around[-1].get_submodule(atom))
    return around


def _common(first: list[str], second: list[str]) -> list[str]:
    return [a for a, b in zip(first, second, strict=False) if a == b]


def _large_leaves(root: nn.Module, blocks: set[nn.Module]) -> set[nn.Module]:
    """Returns childless modules outside the blocks with a quarter of the largest block's bytes or more, untied ones."""
    inside = {module for block in blocks for module in block.modules()}
    holders: dict[nn.Parameter, int] = {}
    for module in root.modules():
        for param in module.parameters(recurse=False):
            holders[param] = holders.get(param, 0) + 1
    largest = max((sum(param.nbytes for param in block.parameters()) for block in blocks), default=0)
    chosen = set()
    for module in root.modules():
        own = [*module.parameters(recurse=False)]
        calls = module not in inside and module is not root and not only_holds(module)
        leaf = calls and own and not [*module.children()]
        if leaf and all(holders[param] == 1 for param in own) and 4 * sum(param.nbytes for param in own) >= largest:
            chosen.add(module)
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
