"""Optimizers that take (name, parameter) pairs, and make groups of them by their names, as Adam-mini does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
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
    """The optimizer, and whether it was built from pairs.

    params: parameters or groups, tried first. named: (name, parameter) pairs, if there are any, tried if the optimizer
        refuses `params`. If both fail, raises the error of the first.
    """
    try:
        return optim(params, **defaults), False
    except Exception:
        with suppress(Exception):  # the first error is raised
            if named:
                return optim([*named], **defaults), True
        raise


def groups_made(optimizer: Optimizer, originals: Mapping[nn.Parameter, tuple[str, nn.Parameter]]) -> list[Any]:
    """The groups that an optimizer of shards has made, with each shard replaced by its parameter.

    originals: for each shard the parameter's name and the parameter.
    """
    made = []
    for group in optimizer.param_groups:
        of_group = [originals[shard] for shard in group["params"]]
        names, params = [name for name, _ in of_group], [param for _, param in of_group]
        made.append({**options(group), "params": params, "param_names": names})
    return made
