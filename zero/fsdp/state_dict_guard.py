"""Refuses state_dict(), load_state_dict() and copies of modules inside an FSDP, which have shards in place of full
weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch import nn

from zero._torch.modules import OwnHook, parameters_of
from zero.shards.group_state import GroupState
from zero.shards.partition import Place
from zero.shards.shard_group import ShardGroup
from zero.shards.sharded_parameter import NO_COPIES


class StateDictGuard:
    """Registers refusals on every module that holds parameters of the index.

    keeps: what is to live as long as these modules, also if the FSDP is dropped and the module inside is used.
    """

    def __init__(self, root: nn.Module, index: Mapping[nn.Parameter, Place], keeps: object) -> None:
        self._hooks = []
        for module in root.modules():
            groups = [index[param].group for param in parameters_of(module, recurse=False) if param in index]
            if groups:
                self._hooks.append(module.register_state_dict_pre_hook(Refusal(groups, keeps)))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


class Refusal(OwnHook):
    """A hook before the state_dict() of a module, which raises RuntimeError. Copying it raises TypeError."""

    def __init__(self, groups: Sequence[ShardGroup], keeps: object) -> None:
        self._groups, self._keeps = groups, keeps

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        reads = self._groups[0].reads()
        if reads is not None and reads.without_values:  # then nothing is taken for a full weight
            return
        sharded = [one for one in self._groups if one.comm.world > 1 and one.state is not GroupState.SUMMONED]
        if sharded and not keep_vars:
            raise RuntimeError(
                f"state_dict() of a module inside FSDP ({type(module).__name__} {prefix.rstrip('.')!r}) would hold "
                "this rank's shards, not full weights. Call state_dict() of the FSDP model, or zero.full_state_dict"
                "(model), on every rank; or call this one inside summon_full_params(). keep_vars=True gives the shards."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(NO_COPIES)
