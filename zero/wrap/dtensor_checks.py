"""Refuses steps that would be wrong for DTensors of which ranks have parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zero.measure.built import finding_of_built
from zero.measure.kinds import Finding, Kind, known, title
from zero.measure.param_groups import params_of
from zero.shards.partition import Place
from zero.tensor_parallel import table

# By optimizer: how many plain parameters there had been when it was looked at, and was right.
_right: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()


# All OSS.
_checked_by_itself: WeakSet[Optimizer] = WeakSet()


class DTensorCheck:
    """Refuses an OSS whose parameters' gradients no ShardedDDP brings, and optimizers that need whole parameters.

    `_looked_at`: how many parameters there were that modules have, or that are no DTensors, and were right.
    """

    def __init__(self) -> None:
        self._looked_at = 0
        watch_steps()

    def refuse(self, places: Mapping[nn.Parameter, Place], inner: Optimizer, finding: Finding | None) -> None:
        """Raises RuntimeError. places: of the parameters. finding: what the optimizer inside needs."""
        if len(places) == self._looked_at:
            return
        if any(map(table.is_apart, places)):
            raise RuntimeError(
                "OSS was given DTensors of tensor parallelism, but no ShardedDDP has the model. Wrap it: "
                "ShardedDDP(model, optimizer). For stage 1 call zero.setup: DistributedDataParallel takes no DTensors."
            )
        cut, found = _cut(places), known(type(inner)) or finding
        if cut is not None and found is not None:
            _refuse_unfit(inner, found, places[cut].name)
        self._looked_at = len(places)


def checked_by_itself(optimizer: Optimizer) -> None:
    """Notes an OSS, whose steps DTensorCheck checks."""
    _checked_by_itself.add(optimizer)


def _cut(params: Iterable[nn.Parameter]) -> nn.Parameter | None:
    """Returns the first parameter of which ranks have different parts."""
    for param in params:
        dtensor = table.dtensor_of(param)
        if dtensor is not None and table.is_cut(dtensor):
            return param
    return None


def _refuse_unfit(optimizer: Optimizer, found: Finding, name: str) -> None:
    if found.kind is Kind.ELEMENTWISE:
        return
    raise RuntimeError(
        f"{title(type(optimizer))} does not treat each element by itself ({found.reason}), but {name} is tensor "
        "parallel: each rank has a part of it. Use an optimizer that does, such as AdamW, or train without tensor "
        "parallelism."
    )


def refuse_dtensors(optimizer: Optimizer, *_: Any) -> None:
    """The hook before a step of any optimizer. Raises RuntimeError, on all ranks alike, for one that would be wrong."""
    if _right.get(optimizer, 0) == table.made:
        return
    params = params_of(optimizer)
    if any(table.plain_of(param) is not None for param in params):
        raise RuntimeError(
            f"this {type(optimizer).__name__} holds DTensors that a model had before FSDP or ShardedDDP wrapped it, "
            "which has other parameters now. Build the optimizer from the wrapped model: optim(model.parameters())."
        )
    cut = _cut(params)
    if cut is not None and optimizer not in _checked_by_itself:
        _refuse_unfit(optimizer, finding_of_built(optimizer), f"a parameter of shape {list(cut.shape)}")
    _right[optimizer] = table.made


def watch_steps() -> None:
    """Has torch call `refuse_dtensors` before each step of any optimizer, once there are plain parameters in place of
    DTensors."""
    if table.made:
        _watch_steps()


@cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(refuse_dtensors)
