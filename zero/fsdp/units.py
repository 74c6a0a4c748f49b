"""Chooses the modules that become units, and the unit that each parameter belongs to; says how large units are.

Where no policy chooses, the blocks that a model repeats become units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import nn

from zero._torch import children_of, chosen_by_policy
from zero.fsdp.unit import Unit

LARGE_MODEL = 50_000_000
"""Number of parameters up to which a model is small: it may be one unit."""

_SMALL = 1 << 20
"""Bytes below which a layer, or a block inside a block, is not worth an all-gather of its own."""

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


# ----------------------------------------------------------------------------------------------------- repeated blocks


def repeated_blocks(root: nn.Module, apart: Collection[nn.Module] = ()) -> set[nn.Module]:
    """Returns modules with parameters of which one container has several of the same class:

        in an nn.ModuleList     those that have submodules
        in an nn.Sequential     those that have submodules; and layers, which have none, of 1 MiB or more

    An nn.Sequential inside such a block does not count: layers repeat inside most blocks. If the block holds more than
    a quarter of the model's bytes, as a stage of many blocks may, those of 1 MiB or more that have submodules do count.
    Containers in a container stand for their members; an nn.Sequential does if blocks repeat in it.

    apart: modules whose parameters may be shards, of which each rank has others.
    """
    search = _Search(root, apart)
    search.look_into(root, None)
    return search.blocks


def only_holds(module: nn.Module) -> bool:
    """Returns whether the module is a container that cannot be called."""
    containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    return isinstance(module, containers) and type(module).forward is nn.Module.forward


class _Search:
    """`blocks`: those that were found."""

    def __init__(self, root: nn.Module, apart: Collection[nn.Module]) -> None:
        self.blocks: set[nn.Module] = set()
        self._seen: set[nn.Module] = set()
        self._left_out = {param for module in apart for param in module.parameters()}
        self._much = self._nbytes(root) // 4

    def look_into(self, module: nn.Module, around: nn.Module | None) -> None:
        """around: the innermost block around the module."""
        if module in self._seen:
            return
        self._seen.add(module)
        self.blocks |= self._found_in(module, around)
        for child in module.children():
            self.look_into(child, child if child in self.blocks else around)

    def _found_in(self, container: nn.Module, around: nn.Module | None) -> set[nn.Module]:
        if not isinstance(container, (nn.ModuleList, nn.Sequential)):
            return set()
        members = _members(container)
        blocks = _repeated(members, with_submodules=True)
        if isinstance(container, nn.ModuleList):
            return blocks
        if around is None:
            return blocks | self._large(_repeated(members, with_submodules=False))
        return self._large(blocks) if self._nbytes(around) > self._much else set()

    def _large(self, modules: Collection[nn.Module]) -> set[nn.Module]:
        return {module for module in modules if self._nbytes(module) >= _SMALL}

    def _nbytes(self, module: nn.Module) -> int:
        own = (param for param in module.parameters() if param not in self._left_out)
        return sum(param.numel() * param.element_size() for param in own)  # nbytes is not defined for sparse ones


def _members(container: nn.Module) -> list[nn.Module]:
    members: list[nn.Module] = []
    for member in children_of(container).values():  # unlike children(), has a repeated module each time
        if member is None:
            continue
        inner = []
        if only_holds(member) or (isinstance(container, nn.Sequential) and _calls_members(member)):
            inner = _members(member)
        divided = only_holds(member) or _repeated(inner, with_submodules=True)
        members += inner if divided else [member]
    return members


def _calls_members(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _repeated(modules: Sequence[nn.Module], *, with_submodules: bool) -> set[nn.Module]:
    """Returns the modules with parameters of which there are several of the same class."""
    kept = [module for module in modules if bool([*module.children()]) == with_submodules and _has_parameters(module)]
    counts = Counter(map(type, kept))
    return {module for module in kept if counts[type(module)] > 1}


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


# --------------------------------------------------------------------------------------------------------------- sizes


def in_words(units: Sequence[Unit]) -> str:
    """Returns such as "13 units, the largest unit 'blocks.0' with 2.0 MiB, 8 % of all"."""
    several = "s" if len(units) > 1 else ""
    largest = max(units, key=_nbytes)
    return f"{len(units)} unit{several}, the largest {largest.title} with {_share(largest, units)} of all"


def large_unit(units: Sequence[Unit], model: str, as_one_unit: Sequence[nn.Module | type[nn.Module]]) -> str | None:
    """Returns a warning if one unit holds over half of a large model, unless the caller asked for this unit, or other
    units could not divide it because one of its layers holds as much. Else None.

    model: such as "FSDP(GPT)".
    """
    full = {
        param: numel
        for unit in units
        for group in unit.groups
        for param, numel in zip(group.params, group.layout.numels, strict=True)
    }
    total = sum(full.values())
    largest = max(units, key=_nbytes)
    layers = [[*module.parameters(recurse=False)] for module in largest.module.modules()]
    divisible = all(2 * sum(full.get(param, 0) for param in layer) <= total for layer in layers)
    asked = any(largest.module is one or type(largest.module) is one for one in as_one_unit)
    if total <= LARGE_MODEL or 2 * sum(full[param] for param in largest.params) <= total or asked or not divisible:
        return None
    return (
        f"{largest.title} of {model} holds {_share(largest, units)} of the model's parameters: each rank gathers these "
        "at once, and has their gradients at once. Choose smaller units, such as the layers that the model repeats, by "
        "their class: auto_wrap_policy=ModuleWrapPolicy({Block})."
    )


def _nbytes(unit: Unit) -> int:
    return sum(group.full.nbytes for group in unit.groups)


def _share(unit: Unit, units: Sequence[Unit]) -> str:
    own, total = _nbytes(unit), sum(map(_nbytes, units))
    return f"{own / 2**20:.1f} MiB, {own / max(total, 1):.0%}".replace("%", " %")
