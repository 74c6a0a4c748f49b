"""The state of a user's optimizer that steps shards, in the form that the functions of OSS expect.

`optimizer.state_dict()` is this rank's shard. Hooks mark it, so that no other rank loads it as its own, and convert to
and from full state where full state is asked for or given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zero._torch import takes_state_hooks
from zero.comm import Comm
from zero.interop.torch_checkpoint import asked_by_torch_checkpoint
from zero.measure.param_groups import SHARD_MARK
from zero.shards.shard_group import ShardGroup
from zero.state import optimizer_state as state
from zero.state.shard_mark import ShardMark, texts_of


@dataclass
class SteppedShards:
    """An optimizer whose parameters are in the shard groups of an FSDP; see zero.state.optimizer_state.Sharded."""

    optim: Optimizer
    shard_groups: list[ShardGroup]
    comm: Comm
    granularity: None = None
    keeps_masters: bool = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optim.param_groups

    @property
    def cuts_parameters(self) -> bool:
        return any(
            span.numel < group.layout.numels[span.index]
            for group in self.shard_groups
            for rank in range(group.layout.world)
            for span in group.layout.spans(rank)
        )

    def part(self, param: nn.Parameter) -> nn.Parameter:
        return param

    def master(self, flat: ShardGroup) -> Tensor | None:
        return None


class StateHooks:
    """Hooks on the state_dict() and load_state_dict() of one optimizer with parameters of these shard groups.

    state_dict() marks each parameter group. Called by torch's distributed checkpoint, it is collective and returns the
    full state. load_state_dict() cuts a full state, and raises ValueError for another rank's shard.

    alone: whether all its parameters are of this FSDP. If not, torch's distributed checkpoint is refused.
    """

    def __init__(self, optimizer: Optimizer, shard_groups: list[ShardGroup], comm: Comm, *, alone: bool) -> None:
        self._shard_groups, self._comm, self._alone = shard_groups, comm, alone
        if comm.world > 1 and takes_state_hooks(optimizer):
            optimizer.register_state_dict_post_hook(self._mark)
            optimizer.register_load_state_dict_pre_hook(self._cut)

    def _mark(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        stepping = SteppedShards(optimizer, self._shard_groups, self._comm)
        if asked_by_torch_checkpoint():
            if not self._alone:
                raise RuntimeError(
                    "torch.distributed.checkpoint was given an optimizer that holds parameters of several FSDPs. Build "
                    "one optimizer for each, or save with zero.checkpoint."
                )
            return state.consolidate(stepping, None)
        groups = state_dict["param_groups"]
        mark = ShardMark([*_marks_of(groups), state.fingerprint(stepping)])  # one, which warns once
        for group in groups:
            group[SHARD_MARK] = mark
        return None

    def _cut(self, optimizer: Optimizer, given: dict[str, Any]) -> dict[str, Any] | None:
        if given.get(SHARD_MARK) == state.OWN:
            return None
        stepping = SteppedShards(optimizer, self._shard_groups, self._comm)
        if refuse_other_shards(stepping, given["param_groups"]):
            return None
        return state.numbered(optimizer, *state.own_shard(stepping, given))


def refuse_other_shards(stepping: SteppedShards, groups: list[dict[str, Any]]) -> bool:
    """Returns whether the groups have marks of this rank's shard. Raises ValueError for marks of another shard."""
    marks = _marks_of(groups)
    remedy = "Save state that loads anywhere: FSDP's optim_state_dict(optimizer), or zero.checkpoint."
    state.refuse_other_shard(stepping, marks, remedy)
    return bool(marks)


def _marks_of(groups: list[dict[str, Any]]) -> set[str]:
    return {text for group in groups for text in texts_of(group.get(SHARD_MARK))}
