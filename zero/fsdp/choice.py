"""Chooses the units of a model and the parameters to shard, before anything is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zero._torch.modules import children_of, chosen_by_policy, parameters_of
from zero._torch.tensors import wraps_others
from zero.fsdp.unit import Unit
from zero.shards.arguments import refuse_two_devices
from zero.shards.cut import held
from zero.shards.shapes import refuse_shared, refuse_unsendable, refuse_unusable
from zero.wrap.wrapper import describe

# ---------------------------------------------------------------------------------------------------------------- units
#
# Chooses the modules that become units, and the unit that each parameter belongs to; says how large units are.


Policy = Any
"""What the user passes as auto_wrap_policy."""

# Bytes below which a layer, or a block inside a block, is not worth an all-gather of its own.
_SMALL = 1 << 20
# Of the largest block, from which a layer is a unit where the user asks for the least memory, however small it is.
_FOR_LEAST_MEMORY = 0.25


def unit_modules(
    root: nn.Module,
    policy: Policy,
    as_one_unit: Sequence[nn.Module | type[nn.Module]] = (),
    *,
    excluded: Sequence[nn.Module] = (),
    leaves_from: float | None = None,
) -> dict[str, nn.Module]:
    """Returns the modules that become units, by name, from the outside in; the root, named "", is always the first.

    Parameters in no chosen module belong to the unit around them. as_one_unit: modules, or classes of modules, that
    become units without units inside them. excluded: modules in which no units are chosen. leaves_from: see `blocks`.

    Raises ValueError for an unknown type of policy, and for a unit without a forward.
    """
    given = blocks(root, excluded=excluded, leaves_from=leaves_from) if policy is None else _by_policy(root, policy)
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
    numel = sum(param.numel() for param in parameters_of(module))
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
    # Also modules that were seen: one in two units must belong to the unit around both.
    for prefix, module in root.named_modules(remove_duplicate=False):
        on_path = [root]
        for atom in prefix.split(".") if prefix else []:
            on_path.append(on_path[-1].get_submodule(atom))
        path = [unit_names[outer] for outer in on_path if outer in unit_names]
        for name, param in module.named_parameters(prefix, recurse=False):
            names.setdefault(param, name)
            around[param] = [a for a, b in zip(around.get(param, path), path, strict=False) if a == b]
    owned: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in units}
    for param, path in around.items():
        if param not in ignored:
            owned[path[-1]].append((names[param], param))
    return owned


def largest_unit(units: Sequence[Unit]) -> tuple[Unit, str]:
    """Returns the unit with most bytes of full parameters, and its share, such as "2.0 MiB, 8 %"."""
    sizes = {unit: sum(group.full.nbytes for group in unit.groups) for unit in units}
    largest = max(units, key=sizes.__getitem__)
    share = f"{sizes[largest] / max(sum(sizes.values()), 1):.0%}".replace("%", " %")
    return largest, f"{sizes[largest] / 2**20:.1f} MiB, {share}"


# Where no policy chooses: the blocks that a model repeats.


def blocks(root: nn.Module, *, excluded: Sequence[nn.Module] = (), leaves_from: float | None = None) -> set[nn.Module]:
    """Returns the modules that become units.

    excluded: modules in which none are chosen. leaves_from: chooses also modules without children, as embeddings and
    output layers, that have so many times the largest block's bytes or more; None: no others.
    """
    left_out = {param for module in excluded for param in parameters_of(module)}
    chosen = repeated_blocks(root, left_out)
    return chosen if leaves_from is None else chosen | _large_leaves(root, chosen, leaves_from, left_out)


def smallest_leaves(limit: int | None, *, beside: bool) -> float | None:
    """How large modules without children become units; see `blocks`. limit: how many units are in flight.
    beside: transfers overlap computing. Else to gather an embedding twice costs more time than its memory is worth,
    unless the user asks for the least memory."""
    return _FOR_LEAST_MEMORY if limit == 1 else 0.5 if beside else None


def only_holds(module: nn.Module) -> bool:
    """Returns whether the module is a container that cannot be called."""
    containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    return isinstance(module, containers) and type(module).forward is nn.Module.forward


def _nbytes(params: Iterable[nn.Parameter], left_out: Collection[nn.Parameter]) -> int:
    """Bytes of the parameters that are not left out, as the shards of an FSDP inside, of which each rank has others."""
    # `nbytes` is not defined for sparse ones, which are refused later.
    return sum(param.numel() * param.element_size() for param in params if param not in left_out)


def _large_leaves(
    root: nn.Module, blocks: set[nn.Module], leaves_from: float, left_out: Collection[nn.Parameter]
) -> set[nn.Module]:
    """Returns childless modules outside the blocks with so many times the largest block's bytes or more, untied ones,
    and with 1 MiB or more, unless the least memory is wanted. left_out: see `_nbytes`."""
    inside = {module for block in blocks for module in block.modules()}
    holders = Counter(param for module in root.modules() for param in parameters_of(module, recurse=False))
    largest = max((_nbytes(parameters_of(block), left_out) for block in blocks), default=0)
    least = max(leaves_from * largest, 0 if leaves_from == _FOR_LEAST_MEMORY else _SMALL)
    chosen = set()
    for module in root.modules():
        own = [*parameters_of(module, recurse=False)]
        calls = module not in inside and module is not root and not only_holds(module)
        leaf = calls and own and not [*module.children()]
        if leaf and all(holders[param] == 1 for param in own) and _nbytes(own, left_out) >= least:
            chosen.add(module)
    return chosen


def repeated_blocks(root: nn.Module, left_out: Collection[nn.Parameter] = ()) -> set[nn.Module]:
    """Returns modules with parameters of which one container has several of the same class:

        in an nn.ModuleList or nn.ModuleDict    those that have submodules
        in an nn.Sequential     those that have submodules; and layers, which have none, of 1 MiB or more

    An nn.Sequential inside such a block does not count: layers repeat inside most blocks. If the block holds more than
    a quarter of the model's bytes, as a stage of many blocks may, those of 1 MiB or more that have submodules do count.
    Containers in a container stand for their members; an nn.Sequential does if blocks repeat in it.

    left_out: see `_nbytes`.
    """
    found: set[nn.Module] = set()
    seen: set[nn.Module] = set()

    def large(modules: Collection[nn.Module]) -> set[nn.Module]:
        return {module for module in modules if _nbytes(parameters_of(module), left_out) >= _SMALL}

    much = _nbytes(parameters_of(root), left_out) // 4
    # Modules to look into, each with the innermost block around it.
    left: list[tuple[nn.Module, nn.Module | None]] = [(root, None)]
    while left:
        module, around = left.pop()
        if module in seen:
            continue
        seen.add(module)
        if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            members = _members(module)
            blocks = _repeated(members, with_submodules=True)
            if isinstance(module, nn.Sequential):
                if around is None:
                    blocks |= large(_repeated(members, with_submodules=False))
                else:
                    blocks = large(blocks) if _nbytes(parameters_of(around), left_out) > much else set()
            found |= blocks
        # Reversed, as a stack: a module that occurs twice is to be looked at where it occurs first.
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
        if bool([*module.children()]) == with_submodules and next(parameters_of(module), None) is not None
    ]
    counts = Counter(map(type, kept))
    return {module for module in kept if counts[type(module)] > 1}


# ----------------------------------------------------------------------------------------------------------- the choice


class UnitChoice:
    """The units of a model, and the parameters that are in none.

    nested: FSDPs in the model, by name, which will be dissolved; their units remain.
    sharded: the parameters of these units.
    ignored: parameters that belong to no unit.
    `units`: after `divide`, the modules that become units, by name, the root first.
    """

    def __init__(
        self,
        module: nn.Module,
        nested: Mapping[str, nn.Module],
        sharded: Collection[nn.Parameter],
        ignored: Sequence[nn.Parameter],
    ) -> None:
        self.module, self.ignored = module, ignored
        self._nested, self._sharded = nested, sharded
        self._left_out = {*ignored, *sharded}
        self.units: dict[str, nn.Module] = {}

    def divide(self, policy: Policy, as_one_unit: Sequence[nn.Module | type[nn.Module]], leaves: float | None) -> None:
        """Chooses the units, see `unit_modules`. Raises ValueError if the policy is unusable."""
        excluded = [*self._nested.values()]
        self.units = unit_modules(self.module, policy, as_one_unit, excluded=excluded, leaves_from=leaves)

    def refuse_unusable(self, *, synced: bool, sharded: Collection[nn.Parameter]) -> None:
        """Raises ValueError if the model cannot be sharded.

        synced: whether meta parameters receive the first rank's values.
        sharded: the parameters of all FSDPs, nested ones and others.
        """
        has_parameters = False
        ignored = {*self.ignored}
        for name, param in self.module.named_parameters():
            if param in ignored:
                if synced and param.is_meta and wraps_others(param):
                    raise ValueError(
                        f"{name!r} is a {type(param).__name__} on the meta device, which wraps other tensors and would "
                        "not get the first rank's values. Build it with values on every rank."
                    )
                continue
            has_parameters = True
            if param in self._sharded:
                continue
            if held(param).half_sharded:
                raise ValueError(
                    f"{name!r} may be a shard: an error ended an earlier FSDP(...) of this model, and left it half "
                    "sharded. Build the model again."
                )
            if param in sharded:
                raise ValueError(
                    f"{name!r} is sharded by another FSDP already. Wrap a module once, or wrap the FSDP around it; in "
                    "a notebook whose cell runs again wrap what zero.unwrap(model) of that FSDP returns."
                )
            if not (param.is_meta and synced):
                refuse_unusable(param, repr(name))
        for name, buffer in self.module.named_buffers():
            if buffer.is_meta and not synced:
                refuse_unusable(buffer, f"the buffer {name!r}")
        whole = [(name, param) for name, param in self.module.named_parameters() if param in ignored]
        refuse_unsendable([*whole, *self.module.named_buffers()])
        if not has_parameters:
            raise ValueError("FSDP was given a module without parameters: there is nothing to shard.")
        refuse_two_devices(self.own())
        refuse_shared(((repr(name), param) for name, param in self.own()), self.module.named_buffers())

    def own(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters to shard, with their names."""
        yield from ((name, param) for name, param in self.module.named_parameters() if param not in self._left_out)

    @property
    def modules(self) -> list[nn.Module]:
        """All modules except those in nested FSDPs, which have prepared them."""
        prepared = {module for fsdp in self._nested.values() for module in fsdp.modules()}
        return [module for module in self.module.modules() if module not in prepared]

    def devices(self) -> list[torch.device]:
        """Returns the devices of the parameters that will be sharded, without the meta device."""
        devices = {param.device: None for param in parameters_of(self.module) if param not in self._left_out}
        return [device for device in devices if device.type != "meta"]

    def signature(self) -> list[str]:
        """Returns descriptions of the units and the module, which must be the same on every rank."""
        return [f"units {', '.join(self.units)}", *describe(self.module, without=self._sharded)]

    def owned(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """Returns the parameters of each unit by its name, with their names once nested FSDPs are dissolved."""
        by_unit = params_by_unit(self.module, self.units, self._left_out)
        for prefix in self._nested:
            inside = f"{prefix}.module."
            for unit, named in by_unit.items():
                by_unit[unit] = [
                    (f"{prefix}.{name.removeprefix(inside)}" if name.startswith(inside) else name, param)
                    for name, param in named
                ]
        return by_unit
