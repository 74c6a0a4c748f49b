"""Builds the optimizer that OSS shards, of this rank's shards."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from zero.measure.named import build
from zero.measure.param_groups import called

if TYPE_CHECKING:
    from zero.oss.optimizer import OSS


def build_inner(oss: OSS, optim: Callable[..., Optimizer], defaults: dict[str, Any]) -> Optimizer:
    """Collective. Returns the optimizer. Raises ValueError on every rank if it cannot be built on any."""
    inner, by_name, problem = None, False, None
    groups, named = [oss.shards.group(group) for group in oss.param_groups], oss.shards.named(oss.param_groups)
    try:
        inner, by_name = build(optim, groups, named, defaults)
    except Exception as error:  # every rank must know of any error before it waits for this rank
        problem = f"{called(optim)} could not be built from these parameters: {type(error).__name__}: {error}"
    made = len(inner.param_groups) if inner is not None else 0
    oss.comm.compare("the optimizers that OSS shards", [f"{type(inner).__name__}, {made} groups"], problem)
    assert inner is not None
    if by_name:
        oss.shards.regroup(inner, oss.param_groups)
    for name in ("train", "eval"):  # by which optimizers such as Schedule-Free switch between two sets of weights
        if callable(getattr(inner, name, None)):
            vars(inner)[name] = _followed_by_gather(oss, getattr(inner, name))
    return inner


def _followed_by_gather(oss: OSS, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method of the inner optimizer that writes into shards; makes it collective."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        oss.stepper.refuse_changes()
        oss.shards.masters.refresh()
        result = method(*args, **kwargs)
        oss.stepper.share_options(oss.optim.param_groups, oss.param_groups)
        oss.stepper.gather(oss.shard_groups)
        oss.finish_gathers()
        return result

    return call
