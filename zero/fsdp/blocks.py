"""Chooses the units of FSDP where no policy does: the blocks that a model repeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from torch import nn

from zero._torch import children_of

# Bytes below which a layer, or a block inside a block, is not worth an all-gather of its own.
_SMALL = 1 << 20


def blocks(root: nn.Module, *, excluded: Sequence[nn.Module] = (), small: bool = False) -> set[nn.Module]:
    """Returns the modules that become units.

    excluded: modules in which none are chosen. small: chooses other large modules, as embeddings and output layers,
    too.
    """
    chosen = repeated_blocks(root, excluded)
    return chosen | _large_leaves(root, chosen) if small else chosen


def only_holds(module: nn.Module) -> bool:
    """Returns whether the module is a container that cannot be called."""
    containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    return isinstance(module, containers) and type(module).forward is nn.Module.forward


def _large_leaves(root: nn.Module, blocks: set[nn.Module]) -> set[nn.Module]:
    """Returns childless modules outside the blocks with a quarter of the largest block's bytes or more, untied ones."""
    inside = {module for block in blocks for module in block.modules()}
    holders = Counter(param for module in root.modules() for param in module.parameters(recurse=False))
    largest = max((sum(param.nbytes for param in block.parameters()) for block in blocks), default=0)
    chosen = set()
    for module in root.modules():
        own = [*module.parameters(recurse=False)]
        calls = module not in inside and module is not root and not only_holds(module)
        leaf = calls and own and not [*module.children()]
        if leaf and all(holders[param] == 1 for param in own) and 4 * sum(param.nbytes for param in own) >= largest:
            chosen.add(module)
    return chosen


def repeated_blocks(root: nn.Module, excluded: Collection[nn.Module] = ()) -> set[nn.Module]:
    """Returns modules with parameters of which one container has several of the same class:

        in an nn.ModuleList     those that have submodules
        in an nn.Sequential     those that have submodules; and layers, which have none, of 1 MiB or more

    An nn.Sequential inside such a block does not count: layers repeat inside most blocks. If the block holds more than
    a quarter of the model's bytes, as a stage of many blocks may, those of 1 MiB or more that have submodules do count.
    Containers in a container stand for their members; an nn.Sequential does if blocks repeat in it.

    excluded: modules whose parameters may be shards, of which each rank has others.
    """
    left_out = {param for module in excluded for param in module.parameters()}
    found: set[nn.Module] = set()
    seen: set[nn.Module] = set()

    def nbytes(module: nn.Module) -> int:
        own = (param for param in module.parameters() if param not in left_out)
        return sum(param.numel() * param.element_size() for param in own)  # nbytes is not defined for sparse ones

    def large(modules: Collection[nn.Module]) -> set[nn.Module]:
        return {module for module in modules if nbytes(module) >= _SMALL}

    much = nbytes(root) // 4
    # Modules to look into, each with the innermost block around it.
    left: list[tuple[nn.Module, nn.Module | None]] = [(root, None)]
    while left:
        module, around = left.pop()
        if module in seen:
            continue
        seen.add(module)
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            members = _members(module)
            blocks = _repeated(members, with_submodules=True)
            if isinstance(module, nn.Sequential):
                if around is None:
                    blocks |= large(_repeated(members, with_submodules=False))
                else:
                    blocks = large(blocks) if nbytes(around) > much else set()
            found |= blocks
        left += [(child, child if child in found else around) for child in module.children()][::-1]
    return found


def _members(container: nn.Module) -> list[nn.Module]:
    members: list[nn.Module] = []
    for member in children_of(container).values():  # unlike children(), has a repeated module each time
        if member is None:
            continue
        calls_members = isinstance(member, nn.Sequential) and type(member).forward is nn.Sequential.forward
        looks_inside = only_holds(member) or (isinstance(container, nn.Sequential) and calls_members)
        inner = _members(member) if looks_inside else []
        divided = only_holds(member) or _repeated(inner, with_submodules=True)
        members += inner if divided else [member]
    return members


def _repeated(modules: Sequence[nn.Module], *, with_submodules: bool) -> set[nn.Module]:
    """Returns the modules with parameters of which there are several of the same class."""
    kept = [
        module
        for module in modules
        if bool([*module.children()]) == with_submodules and next(module.parameters(), None) is not None
    ]
    counts = Counter(map(type, kept))
    return {module for module in kept if counts[type(module)] > 1}
