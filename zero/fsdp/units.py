"""Chooses the modules that become units, and the unit that each parameter belongs to; says how large units are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import nn

from zero._torch import chosen_by_policy
from zero.fsdp.blocks import blocks, only_holds
from zero.fsdp.unit import Unit

Policy = Any
"""What the user passes as auto_wrap_policy."""


def unit_modules(
    root: nn.Module,
    policy: Policy,
    as_one_unit: Sequence[nn.Module | type[nn.Module]] = (),
    *,
    excluded: Sequence[nn.Module] = (),
    small: bool = False,
) -> dict[str, nn.Module]:
    """Returns the modules that become units, by name, from the outside in; the root, named "", is always the first.

    Parameters in no chosen module belong to the unit around them. as_one_unit: modules, or classes of modules, that
    become units without units inside them. excluded: modules in which no units are chosen. small: the user wants units
    that are as small as is sensible.

    Raises ValueError for an unknown type of policy, and for a unit without a forward.
    """
    given = blocks(root, excluded=excluded, small=small) if policy is None else _by_policy(root, policy)
    if given is None:
        raise ValueError(
            f"auto_wrap_policy is a {type(policy).__name__}. Pass a policy of torch.distributed.fsdp.wrap, such as "
            "ModuleWrapPolicy({Block}), or None."
        )
    chosen = {*given}
    classes = tuple(entry for entry in as_one_unit if isinstance(entry, type))
    single = {module for module in root.modules() if isinstance(module, classes) or module in as_one_unit}
    chosen -= {inner for module in single for inner in module.modules()}
    chosen |= single
    chosen -= {inner for module in excluded for inner in module.modules()}
    chosen.add(root)
    units = {name: module for name, module in root.named_modules() if module in chosen}
    for name, module in units.items():
        if only_holds(module):
            raise ValueError(
                f"{name!r} is a {type(module).__name__}, which has no forward that it could be gathered for. Choose "
                "the module that calls its members."
            )
    return units


def _by_policy(root: nn.Module, policy: Policy) -> set[nn.Module] | None:
    """Returns the modules that `ModuleWrapPolicy`, `CustomPolicy`, `lambda_auto_wrap_policy` and similar ones make
    units, called as PyTorch calls them; None for a policy of another kind."""
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
            around[param] = [a for a, b in zip(around.get(param, path), path, strict=False) if a == b]
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


def largest_unit(units: Sequence[Unit]) -> tuple[Unit, str]:
    """Returns the unit with most bytes of full parameters, and its share, such as "2.0 MiB, 8 %"."""
    sizes = {unit: sum(group.full.nbytes for group in unit.groups) for unit in units}
    largest = max(units, key=sizes.__getitem__)
    share = f"{sizes[largest] / max(sum(sizes.values()), 1):.0%}".replace("%", " %")
    return largest, f"{sizes[largest] / 2**20:.1f} MiB, {share}"
