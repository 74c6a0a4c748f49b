"""What an FSDP gives and takes of weights and optimizer state: full, or this rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from zero.comm import Comm
from zero.fsdp import full_params
from zero.fsdp.guard import Guard
from zero.fsdp.optim_state import SteppedShards, refuse_other_shards
from zero.fsdp.precision import CastBuffer
from zero.fsdp.summon import summon
from zero.fsdp.unit import Unit
from zero.oss import state
from zero.oss.placement import Placement
from zero.oss.shard_group import ShardGroup
from zero.sdp.wrapper import Wrapper

if TYPE_CHECKING:
    from typing_extensions import Self


class Weights(Wrapper):
    """Of the units of one model."""

    _units: list[Unit]
    _comm: Comm
    _placement: Placement
    _guard: Guard
    _cast_buffers: Sequence[CastBuffer]

    @property
    def shard_groups(self) -> list[ShardGroup]:
        """The shard groups that the parameters lie in."""
        return [group for unit in self._units for group in unit.groups]

    def reshard(self) -> None:
        """Releases what a forward without backward may have left unsharded. Not within a step."""
        for unit in self._units:
            unit.reshard()

    def summon_full_params(  # of `module`, not self: called on the class it takes any module, as PyTorch's does
        module: nn.Module,
        *,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> AbstractContextManager[None]:
        """Collective. In its context all parameters are unsharded, in their own dtype, on every rank.

            with model.summon_full_params(): ...
            with FSDP.summon_full_params(module): ...  # of an FSDP, of what contains some, or of a module inside one

        Forwards in there must be under no_grad; they gather nothing, which suits `generate()`. Of a module inside an
        FSDP, full units become unsharded; where nothing is sharded, nothing happens.

        recurse: False is of the module's own unit only, not of units inside it.
        writeback: changes made in there stay, those of each shard's owner; otherwise they are lost.
        rank0_only: only the first rank of the group sees them unsharded, with writeback=False.
        offload_to_cpu: they lie in the memory of the CPU meanwhile.
        with_grads: averaged gradients are unsharded in `param.grad`, too; not with offload_to_cpu.

        Raises ValueError for rank0_only with writeback or with_grads with offload_to_cpu, and, on every rank, where
        parameters were given other data in there that is to stay; RuntimeError where they were given some before, and
        within forward and backward.
        """
        return summon(
            module,
            wrapped=module.module if isinstance(module, Weights) else module,
            recurse=recurse,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        )

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Collective. Calls fn with every module, as nn.Module.apply, on full parameters; rank 0's results count."""
        with self.summon_full_params():
            super().apply(fn)
            self._placement.broadcast([*self.module.parameters(), *self.module.buffers()])
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Collective. Full parameters and buffers under the module's own names, on every rank, as copies.

        Raises RuntimeError where parameters were moved, cast or given other data.
        """
        self._guard.refuse_moved()
        return full_params.state_dict(self.module, self._units, *args, **kwargs)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Collective. Called by the `load_state_dict` of a plain module around this one."""
        given = {name.removeprefix(prefix): state_dict.pop(name) for name in [*state_dict] if name.startswith(prefix)}
        try:
            assign = local_metadata.get("assign_to_params_buffers", False)
            missing, unexpected = self.load_state_dict(given, strict=False, assign=assign)
            missing_keys += [prefix + name for name in missing]
            unexpected_keys += [prefix + name for name in unexpected]
        except (RuntimeError, ValueError) as error:
            error_msgs.append(str(error))
        # The modules inside are asked next: they are given what they have.
        own = self.module.state_dict(keep_vars=True)
        state_dict.update({f"{prefix}module.{name}": value for name, value in own.items()})

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Collective. Takes full weights under the module's own names; every rank must be given the same.

        Raises ValueError for assign=True, which would leave the optimizer with other tensors.
        """
        if assign:
            raise ValueError("assign=True replaces the parameters that are sharded. Load with assign=False.")
        with self.summon_full_params():
            return self.module.load_state_dict(state_dict, strict)

    def optim_state_dict(self, optimizer: Optimizer, to: int | None = 0) -> dict[str, Any] | None:
        """Collective. The state of an optimizer of these parameters, full, in the plain optimizer's own format.

        to: the rank of the group that gets it, or None for all; other ranks get None. It loads into the optimizer of
        the plain model, and by `load_optim_state_dict` at any number of ranks. Each rank's shard alone is what
        `optimizer.state_dict()` gives. Raises ValueError, on every rank, for state that cannot be put together.
        """
        return state.consolidate(self._stepping(optimizer), None if to is None else self._placement.owner(to))

    def load_optim_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Takes a full state, the same on every rank: the plain optimizer's, or what `optim_state_dict` gave.

        This rank's own `optimizer.state_dict()` will do, too. Raises ValueError, and changes nothing, where the state
        does not fit.
        """
        stepping = self._stepping(optimizer)
        if refuse_other_shards(stepping, state_dict["param_groups"]):
            optimizer.load_state_dict(state_dict)
        else:
            state.load(stepping, state_dict)

    def register_optimizer(self, optimizer: Optimizer) -> None:
        """Has `optimizer.load_state_dict` take full state from now on, as it does from its first step on anyway."""
        self._guard.know(optimizer)

    def _stepping(self, optimizer: Optimizer) -> SteppedShards:
        self.reshard()
        return SteppedShards(optimizer, self.shard_groups, self._comm)

    def local_state_dict(self) -> dict[str, Any]:
        """This rank's shards, and all buffers, as copies, without communication: for saving each rank's by itself.

        All are tensors, but for what modules give by get_extra_state(). Under "zero_shard" is which shard it is.

        Raises RuntimeError, on this rank, where its parameters were moved, cast or given other data.
        """
        problem = self._guard.moved_problem()
        if problem is not None:
            raise RuntimeError(problem)
        return full_params.local_state_dict(self.module, self._units, self._cast_buffers)

    def load_local_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Collective. Takes what `local_state_dict` gave on this rank, of the same model on as many ranks.

        Raises ValueError on every rank, and changes nothing, where one was given something else.
        """
        problem = self._guard.moved_problem() or full_params.local_problem(self.module, self._units, state_dict)
        self._comm.compare("the shards given to FSDP", [], problem)
        full_params.load_local_state_dict(self.module, self._units, state_dict)
