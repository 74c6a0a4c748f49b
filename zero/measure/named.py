"""Optimizers that take (name, parameter) pairs, and make groups of them by their names, as Adam-mini does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from zero.measure.param_groups import options


def build(
    optim: Callable[..., Optimizer],
    params: Iterable[Any],
    named: Sequence[tuple[str, nn.Parameter]],
    defaults: Mapping[str, Any],
) -> tuple[Optimizer, bool]:
    """The optimizer, and whether it was given pairs.

    params: what it is given first, parameters or groups. named: the pairs, if there are any, for where it takes no
        other. Raises what it raised of the first.
    """
    try:
        return optim(params, **defaults), False
    except Exception:
        try:
            if named:
                return optim([*named], **defaults), True
        except Exception:
            pass  # what it said of the first is told
        raise


def groups_made(optimizer: Optimizer, originals: Mapping[nn.Parameter, tuple[str, nn.Parameter]]) -> list[Any]:
    """The groups that an optimizer of parts has made, with the parameters in the place of their parts.

    originals: of each part the parameter and its name.
    """
    made = []
    for group in optimizer.param_groups:
        of_group = [originals[part] for part in group["params"]]
        names, params = [name for name, _ in of_group], [param for _, param in of_group]
        made.append({**options(group), "params": params, "param_names": names})
    return made
