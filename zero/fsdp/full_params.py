"""summon_full_params(), full state dicts and state dicts of shards.

full     {name: tensor}: the module's own state_dict()
shard    {"zero_shard": the layout as text, in bytes of UTF-8, name: this rank's shard, or a buffer}

Buffers that mixed precision has cast are in their original dtype in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero._torch import buffers_of, wraps_others
from zero.fsdp.precision import CastBuffer
from zero.fsdp.unit import TrainingState, Unit
from zero.shards.shard_group import ShardGroup


@contextmanager
def summoned(
    units: Sequence[Unit], *, writeback: bool, rank0_only: bool, with_grads: bool, offload_to_cpu: bool = False
) -> Iterator[None]:
    """Collective. See FSDP.summon_full_params."""
    if offload_to_cpu and with_grads:
        raise ValueError(
            "offload_to_cpu=True with with_grads=True: torch keeps a gradient on the device of its parameter. Pass one "
            "of them."
        )
    if rank0_only and writeback:
        raise ValueError(
            "rank0_only=True with writeback=True: what rank 0 writes would not reach the owners of the shards. Pass "
            "writeback=False, or unshard the parameters on all ranks."
        )
    refuse_busy(units, "summon_full_params()")
    groups = [group for unit in units for group in unit.groups]
    gradients: list[_Gradients] = []
    keep = False
    try:
        for unit in units:
            unit.reshard()  # a forward without backward may have left it unsharded
        if with_grads:
            gradients = [_Gradients(group, to=0 if rank0_only else None) for group in groups]
        for group in groups:
            group.summon(to=0 if rank0_only else None, on_cpu=offload_to_cpu)
        for of_group in gradients:
            of_group.show()
        yield
        keep = writeback
    finally:
        for group in groups:
            if group.summoned:
                group.dismiss(keep=keep)
        for of_group in gradients:
            of_group.end(keep=keep)


def refuse_busy(units: Sequence[Unit], call: str) -> None:
    """Raises RuntimeError if `call` is made within forward, backward or summon_full_params()."""
    busy = [unit.title for unit in units if unit.state is not TrainingState.IDLE or unit.running or unit.summoned]
    if busy:
        raise RuntimeError(
            f"{call} was called while {busy[0]} is unsharded already: within forward, backward or another "
            "summon_full_params(). Call it between steps, and once."
        )


class _Gradients:
    """Collective. Gathers the gradients of a shard group, and puts them into `param.grad` until `end`."""

    def __init__(self, group: ShardGroup, to: int | None) -> None:
        self._group = group
        self._shards = [param.grad for param in group.params]
        dtypes = {grad.dtype for grad in self._shards if grad is not None}
        shard = torch.zeros_like(group.shard, dtype=dtypes.pop() if dtypes else None)
        for view, grad in zip(group.views_of_shard(shard), self._shards, strict=True):
            if grad is not None:
                view.copy_(grad)
        exist = torch.tensor([float(grad is not None) for grad in self._shards], device=shard.device)
        group.comm.all_reduce(exist, maximum=True)
        self._exist = exist.tolist()
        self._full = group.gather_of(shard, to)

    def show(self) -> None:
        if self._full is not None:
            views = self._group.shapes.views_of_full(self._full)
            for param, view, exists in zip(self._group.params, views, self._exist, strict=True):
                param.grad = view if exists else None

    def end(self, *, keep: bool) -> None:
        shards: list[Tensor | None] = list(self._shards)
        if keep and self._full is not None:
            own = self._full[self._group.layout.segment(self._group.comm.rank)]
            own = own.to(self._group.shard.device, copy=True)
            stay = [p.grad is not None and i in self._group.spans for i, p in enumerate(self._group.params)]
            shards = [
                view if stays else None for view, stays in zip(self._group.views_of_shard(own), stay, strict=True)
            ]
        for param, shard in zip(self._group.params, shards, strict=True):
            param.grad = shard


def state_dict(module: nn.Module, units: Sequence[Unit], *args: Any, **kwargs: Any) -> Any:
    """Collective, if any units are given. Returns the module's own state_dict() with copies of full parameters.

    units: the units that hold the module's parameters. Hooks of the module see full parameters, too. Inside
    summon_full_params the values are those that this rank sees there.
    """
    refuse_unreadable(units)
    destination = kwargs.get("destination", args[0] if args else None)
    before = dict(destination or {})
    sharded = [unit for unit in units if not unit.summoned]
    with summoned(sharded, writeback=False, rank0_only=False, with_grads=False):
        weights = module.state_dict(*args, **{**kwargs, "keep_vars": False})
        temporary = {param.untyped_storage() for unit in sharded for param in unit.params}
        copies: dict[Any, Tensor] = {}
        for key, value in weights.items():
            if not isinstance(value, Tensor) or before.get(key) is value:
                continue
            if wraps_others(value):
                weights[key] = value.detach().clone()
            elif value.untyped_storage() not in temporary:
                memory = (value.data_ptr(), value.shape, value.stride(), value.dtype)  # equal for tied parameters
                weights[key] = copies.setdefault(memory, value.detach().clone())
    return weights


def refuse_unreadable(units: Sequence[Unit]) -> None:
    """Raises RuntimeError if only another rank has the full parameters."""
    if any(unit.summoned and not unit.readable for unit in units):
        raise RuntimeError(
            "state_dict() on a rank that has only shards: inside summon_full_params(rank0_only=True) only rank 0 of "
            "the group has full parameters. Call it there on rank 0 alone, or outside on every rank."
        )


def _uncast(cast_buffers: Sequence[CastBuffer]) -> dict[Tensor, Tensor]:
    """Returns copies of the buffers in their original dtypes."""
    return {cast.tensor: cast.tensor.detach().to(cast.dtype, copy=True) for cast in cast_buffers}


_SHARD = "zero_shard"


def local_state_dict(module: nn.Module, units: Sequence[Unit], cast_buffers: Sequence[CastBuffer]) -> dict[str, Any]:
    """See FSDP.local_state_dict."""
    for unit in units:
        unit.reshard()
    uncast = _uncast(cast_buffers)
    weights: dict[str, Any] = {_SHARD: torch.tensor([*_layout(units).encode()], dtype=torch.uint8, device="cpu")}
    for name, value in module.state_dict(keep_vars=True).items():
        weights[name] = uncast.get(value, value.detach().clone()) if isinstance(value, Tensor) else value
    return weights


def local_problem(module: nn.Module, units: Sequence[Unit], state_dict: dict[str, Any]) -> str | None:
    """Returns an error message if `state_dict` is not a local_state_dict of this rank and model, else None."""
    marked, expected = state_dict.get(_SHARD), _layout(units)
    given = bytes(marked.tolist()).decode() if isinstance(marked, Tensor) else "no shard"
    if given != expected:
        return (
            f"the state is {given!r}, but this rank's shard is {expected!r}. Load full weights by load_state_dict(), "
            "or use zero.checkpoint, which loads at any number of ranks."
        )
    different = (state_dict.keys() - {_SHARD}) ^ module.state_dict(keep_vars=True).keys()
    if different:
        return f"the state is of another model: only one of the two has {', '.join(sorted(different)[:5])}."
    return None


def load_local_state_dict(module: nn.Module, units: Sequence[Unit], state_dict: dict[str, Any]) -> None:
    for unit in units:
        unit.reshard()
    with torch.no_grad():
        for name, value in module.state_dict(keep_vars=True).items():
            if isinstance(value, Tensor):
                value.copy_(state_dict[name])


def _layout(units: Sequence[Unit]) -> str:
    bounds = [list(group.layout.bounds) for unit in units for group in unit.groups]
    comm = next(unit.groups[0].comm for unit in units if unit.groups)
    return f"rank {comm.rank} of {comm.world}, segments {bounds}"


def restore_module(units: Sequence[Unit], cast_buffers: Sequence[CastBuffer], hooks: Sequence[RemovableHandle]) -> None:
    """Collective. Unshards the units' parameters for good on every rank, drops gradients, and undoes casts of buffers.

    hooks: those of mixed precision on modules, which are removed. Raises RuntimeError within forward, backward and
    summon_full_params().
    """
    refuse_busy(units, "zero.unwrap()")
    for unit in units:
        unit.reshard()
        for group in unit.groups:
            for param in group.params:
                param.grad = None
            group.summon()  # without dismiss()
    for cast in cast_buffers:
        buffers_of(cast.module)[cast.name] = cast.tensor.to(cast.dtype)
    for hook in hooks:
        hook.remove()
