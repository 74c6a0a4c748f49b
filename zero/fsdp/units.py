"""Chooses the modules that become units, and the unit that each parameter belongs to; says how large units are."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from torch import nn

from zero.fsdp.unit import Unit

LARGE_MODEL = 50_000_000
"""Number of parameters up to which a model is small: it may be one unit."""

Policy = Any
"""What the user passes as auto_wrap_policy."""


class Chooser(Protocol):
    """Chooses units by policies of some kind. Here is one for names of modules:

    def by_names(root, policy, *, apart, small):
        return {root.get_submodule(name) for name in policy} if isinstance(policy, tuple) else None

    choosers.append(by_names)                      # FSDP(model, auto_wrap_policy=("encoder", "decoder"))
    """

    def __call__(
        self, root: nn.Module, policy: Policy, *, apart: Sequence[nn.Module], small: bool
    ) -> Collection[nn.Module] | None:
        """Returns the modules that the policy makes units; None for a policy of another kind. May raise ValueError.

        apart: modules in which no units are chosen. small: the user wants units that are as small as is sensible.
        """


choosers: list[Chooser] = []
"""Asked one after another. If all return None for the policy None, the module is one unit."""


def unit_modules(
    root: nn.Module,
    policy: Policy,
    as_one_unit: Sequence[nn.Module | type[nn.Module]] = (),
    *,
    apart: Sequence[nn.Module] = (),
    small: bool = False,
) -> dict[str, nn.Module]:
    """Returns the modules that become units, by name, from the outside in; the root, named "", is always the first.

    Parameters in no chosen module belong to the unit around them. as_one_unit: modules, or classes of modules, that
    become units without units inside them. Other arguments are those of Chooser.

    Raises ValueError for an unknown type of policy, and for a unit without a forward.
    """
    found = (choose(root, policy, apart=apart, small=small) for choose in choosers)
    given = next((modules for modules in found if modules is not None), None)
    if given is None and policy is not None:
        raise ValueError(
            f"auto_wrap_policy is a {type(policy).__name__}. Pass a policy of torch.distributed.fsdp.wrap, such as "
            "ModuleWrapPolicy({Block}), or None."
        )
    chosen = {*(given or ())}
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


def only_holds(module: nn.Module) -> bool:
    """Returns whether the module is a container that cannot be called."""
    containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    return isinstance(module, containers) and type(module).forward is nn.Module.forward


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
