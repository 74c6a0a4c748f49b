"""What FSDP says of the sizes of its units: in the log, and in a warning if one holds most of a large model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from zero.fsdp.unit import Unit

LARGE_MODEL = 50_000_000
"""Number of parameters up to which a model is small: it may be one unit."""


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
