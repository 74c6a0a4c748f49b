"""Which modules become units, and which unit each parameter belongs to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch import nn

from zero._torch import children_of, chosen_by_policy

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
    """The modules that become units, by name, from the outside in; the root, named "", is always the first.

    policy: `ModuleWrapPolicy`, `CustomPolicy`, `lambda_auto_wrap_policy` and their like are asked as PyTorch asks them.
    None takes the blocks that a model repeats: the members of an nn.ModuleList that share a class and have submodules
    of their own; members that only hold others, such as lists in a list, stand for these. What is in no unit belongs to
    the unit around it.
    apart: modules that stay as they are, with all in them.
    small: without a policy, make units also of what else holds much by itself, such as embeddings and output layers.
    as_one_unit: modules, or classes of them, that become units with nothing inside them a unit of its own.
    Raises ValueError for a policy that is none, and for a unit that has no forward to gather it for.
    """
    if policy is None:
        chosen = _repeated_blocks(root)
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
    classes = tuple(one for one in as_one_unit if isinstance(one, type))
    single = {module for module in root.modules() if isinstance(module, classes) or module in as_one_unit}
    chosen -= {inner for module in single for inner in module.modules()}
    chosen |= single
    chosen -= {inner for module in apart for inner in module.modules()}
    chosen.add(root)
    units = {name: module for name, module in root.named_modules() if module in chosen}
    for name, module in units.items():
        if _only_holds(module):
            raise ValueError(
                f"{name!r} is a {type(module).__name__}, which has no forward that it could be gathered for. Choose "
                "the module that calls its members."
            )
    return units


def params_by_unit(
    root: nn.Module, units: dict[str, nn.Module], ignored: Collection[nn.Parameter] = ()
) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """For each unit its parameters with their names: those that lie in no unit further in, and are not ignored.

    A parameter that several units contain (tied weights) belongs to the innermost unit around all of them.
    """
    around: dict[nn.Parameter, list[str]] = {}
    names: dict[nn.Parameter, str] = {}
    names_of = {module: name for name, module in units.items()}
    for prefix, module in root.named_modules(remove_duplicate=False):
        inside = [names_of[one] for one in _modules_around(root, prefix) if one in names_of]
        for name, param in module.named_parameters(prefix, recurse=False):
            names.setdefault(param, name)
            around[param] = _common(around[param], inside) if param in around else inside
    owned: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in units}
    for param, inside in around.items():
        if param not in ignored:
            owned[inside[-1]].append((names[param], param))
    return owned


def _modules_around(root: nn.Module, prefix: str) -> list[nn.Module]:
    """The modules on the way to the one of this name, from the outside in, with both ends."""
    around = [root]
    for atom in prefix.split(".") if prefix else []:
        around.append(around[-1].get_submodule(atom))
    return around


def _common(one: list[str], other: list[str]) -> list[str]:
    return [a for a, b in zip(one, other, strict=False) if a == b]


def _repeated_blocks(root: nn.Module) -> set[nn.Module]:
    blocks: set[nn.Module] = set()
    for module in root.modules():
        if isinstance(module, nn.ModuleList):
            members = [block for block in _members(module) if [*block.children()] and _has_parameters(block)]
            for block in members:
                if sum(type(other) is type(block) for other in members) > 1:
                    blocks.add(block)
    return blocks


def _members(container: nn.Module) -> Iterator[nn.Module]:
    for member in children_of(container).values():  # a module that is in it twice is a repeated one
        if member is not None and _only_holds(member):
            yield from _members(member)
        elif member is not None:
            yield member


def _only_holds(module: nn.Module) -> bool:
    """Whether it has no forward that it could be gathered for."""
    containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    return isinstance(module, containers) and type(module).forward is nn.Module.forward


def _large_leaves(root: nn.Module, blocks: set[nn.Module]) -> set[nn.Module]:
    """Modules outside the blocks that hold a quarter of the largest block's bytes, or more, and share none of it."""
    inside = {module for block in blocks for module in block.modules()}
    holders: dict[nn.Parameter, int] = {}
    for module in root.modules():
        for param in module.parameters(recurse=False):
            holders[param] = holders.get(param, 0) + 1
    largest = max((sum(param.nbytes for param in block.parameters()) for block in blocks), default=0)
    chosen = set()
    for module in root.modules():
        own = [*module.parameters(recurse=False)]
        calls = module not in inside and module is not root and not _only_holds(module)
        leaf = calls and own and not [*module.children()]
        if leaf and all(holders[param] == 1 for param in own) and 4 * sum(param.nbytes for param in own) >= largest:
            chosen.add(module)
    return chosen


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _ask(policy: Callable[..., bool], module: nn.Module, chosen: set[nn.Module], *, is_root: bool = True) -> int:
    """Asks a policy function from the inside out, as PyTorch does; returns the elements that found a unit."""
    numel = sum(param.numel() for param in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    wrapped = sum(_ask(policy, child, chosen, is_root=False) for child in module.children())
    if not is_root and policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped):
        chosen.add(module)
        return numel
    return wrapped
