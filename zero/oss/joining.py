"""OSS inside of torch's Join, where data ends earlier on some ranks than on others (torch.distributed.algorithms.join).

Inside Join([ddp, optimizer]) a rank without data goes on stepping its shards while other ranks have data. It does not
get averaged gradients from DistributedDataParallel. So in each step

    every rank          sends whether it has joined; if not, its options and which parameters have gradients
    the first rank      that has data sends each joined rank its slices of the gradients
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from zero._torch import join_mark, living_joins_of
from zero.comm import Comm
from zero.interop.ddp import joining
from zero.measure.param_groups import options
from zero.shards.owned_shards import OwnedShards
from zero.shards.shard_group import ShardGroup

NO_JOIN = (
    "{} cannot be used with torch's Join, by which ranks whose data has ended wait for the others. Write "
    "`with zero.join(model, optimizer):`, or give all ranks equally many batches (DistributedSampler does, "
    "drop_last=True drops the rest)."
)
"""Formatted with the name of the class that cannot be used so."""


class Joining:
    """The behaviour of one OSS inside a Join."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._entered = False
        self._ended: WeakKeyDictionary[DistributedDataParallel, object] = WeakKeyDictionary()
        """Instances that torch still marks as inside of a Join that has ended, by that mark."""

    def enter(self, step: Callable[[], None], params: Collection[nn.Parameter]) -> JoinHook:
        """The hook that Join calls on a rank that has joined. step: the step of such a rank."""
        self._entered = True
        return _Shadow(step, self._leave, params)

    def _leave(self) -> None:
        self._entered = False

    def within(self, optimizer: Joinable) -> bool:
        """Whether the optimizer is inside a Join that lets ranks end early."""
        return self._entered and bool(join_mark(optimizer).enable)

    def before_step(self, optimizer: Joinable, params: Collection[nn.Parameter]) -> None:
        """Notifies the Join, if there is one, that this rank still has data.

        Raises RuntimeError inside a Join that holds the DistributedDataParallel of the parameters but not the
        optimizer, or holds it after the optimizer.
        """
        within, mark = self.within(optimizer), join_mark(optimizer)
        if (not within or mark.is_first_joinable) and any(self._is_inside(ddp) for ddp in joining(params)):
            raise RuntimeError(
                "DistributedDataParallel is inside of a Join that OSS is not in, or comes after OSS in it: ranks whose "
                "data has ended would not step what they own. Write `with zero.join(ddp, optimizer):`, or "
                "`with Join([ddp, optimizer]):` in this order, in place of `with ddp.join():`."
            )
        if within:
            work = Join.notify_join_context(optimizer)
            if work is not None:
                work.wait()

    def refuse_scaler(self, optimizer: Joinable) -> None:
        """Raises RuntimeError inside a Join, where ranks without data would wait for steps that a scaler skips."""
        if self.within(optimizer) and living_joins_of(optimizer):
            raise RuntimeError(
                "a GradScaler steps OSS inside of torch's Join, where ranks whose data has ended do not learn of steps "
                "that it skips, and would wait for them. Write `with zero.join(ddp, optimizer, scaler):`."
            )

    def _is_inside(self, ddp: DistributedDataParallel) -> bool:
        """Whether the Join that marked it is still active: torch does not remove the mark. Looks once for each mark."""
        mark = join_mark(ddp)
        if self._ended.get(ddp) is mark:
            return False
        if living_joins_of(ddp):
            return True
        self._ended[ddp] = mark
        return False

    # --------------------------------------------------------------------------------------- gradients

    def share_gradients(self, shards: OwnedShards, param_groups: Sequence[dict[str, Any]], *, joined: bool) -> None:
        """Collective. Sends gradients and options to the ranks that have joined."""
        texts = self._comm.all_gather_text("" if joined else _as_text(shards, param_groups))
        source = next(rank for rank, text in enumerate(texts) if text)
        options_there, used = json.loads(texts[source])
        if joined:
            for group, options_of_group in zip(param_groups, options_there, strict=True):
                take_options(group, options_of_group)
        for rank, text in enumerate(texts):
            if not text:
                self._send_share(shards, source, rank, used)

    def _send_share(self, shards: OwnedShards, source: int, to: int, used: Sequence[bool]) -> None:
        if self._comm.rank == source:
            shares = [_share(flat, to) for flat in shards.shard_groups]
            self._comm.collect([(source, share) for share in shares], to)
        elif self._comm.rank == to:
            shares = [torch.empty_like(flat.full[flat.layout.segment(to)]) for flat in shards.shard_groups]
            self._comm.collect([(source, share) for share in shares], to)
            _give(shards, shares, {param for param, has in zip(shards, used, strict=True) if has})
        else:
            self._comm.collect([(source, None) for _ in shards.shard_groups], to)


class _Shadow(JoinHook):
    """Steps a rank that has joined whenever the others step."""

    def __init__(self, step: Callable[[], None], leave: Callable[[], None], params: Collection[nn.Parameter]) -> None:
        self._step, self._leave, self._params = step, leave, params

    def main_hook(self) -> None:
        """Collective. Steps unless gradients were not averaged, under no_sync."""
        if all(ddp.require_forward_param_sync for ddp in joining(self._params)):
            self._step()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._leave()


def _as_text(shards: OwnedShards, param_groups: Sequence[dict[str, Any]]) -> str:
    return json.dumps([plain_options(param_groups), [param.grad is not None for param in shards]])


def plain_options(param_groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The options of the groups that JSON can hold."""
    found = []
    for group in param_groups:
        values = {key: value.item() if _is_number(value) else value for key, value in options(group).items()}
        found.append({key: value for key, value in values.items() if _is_plain(value)})
    return found


def take_options(group: dict[str, Any], given: dict[str, Any]) -> None:
    """Sets the options of the group to those of another rank, from `plain_options`."""
    for key, value in given.items():
        if _is_number(group.get(key)):
            group[key].fill_(value)
        else:
            group[key] = tuple(value) if isinstance(value, list) else value


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _is_plain(value: object) -> bool:
    several = isinstance(value, tuple) and all(map(_is_plain, value))
    return several or value is None or isinstance(value, (bool, int, float, str))


def _share(flat: ShardGroup, rank: int) -> Tensor:
    """The slices of this rank's gradients that another rank owns, flat; zeros where there is no gradient."""
    share = torch.zeros_like(flat.full[flat.layout.segment(rank)])
    for span in flat.layout.spans(rank):
        gradient = flat.params[span.index].grad
        if gradient is not None:
            ordered = flat.shapes.in_memory_order(span.index, gradient)
            share[span.offset : span.offset + span.numel] = ordered[span.start : span.stop]
    return share


def _give(shards: OwnedShards, shares: Sequence[Tensor], used: Collection[nn.Parameter]) -> None:
    for flat, share in zip(shards.shard_groups, shares, strict=True):
        for index, span in flat.spans.items():
            param = flat.params[index]
            own = flat.shapes.shaped(index, share[span.offset : span.offset + span.numel], span)
            shards[param].grad = shards.masters.bring(flat, own) if param in used else None
