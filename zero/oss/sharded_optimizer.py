"""The base of OSS: its shards, and its state dictionaries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero._torch import add_all
from zero.comm import Comm
from zero.interop.torch_checkpoint import asked_by_torch_checkpoint
from zero.shards.home import Home
from zero.shards.owned_shards import OwnedShards
from zero.shards.places import Place
from zero.shards.shard_group import ShardGroup
from zero.state import optimizer_state as state


class ShardedOptimizer(Optimizer):
    """An optimizer whose inner optimizer, `optim`, steps this rank's shards. Gathers the full state on request only."""

    optim: Optimizer
    _comm: Comm
    _shards: OwnedShards
    _home: Home
    _cut: Literal["even", "whole"]
    _granularity: int | None

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self._full_state: dict[str, Any] | None = None
        """The full state, if it was consolidated here since the last step."""
        self._full_state_for_torch: dict[str, Any] | None = None
        super().__init__(groups, {})

    @property
    def comm(self) -> Comm:
        return self._comm

    @property
    def shard_groups(self) -> list[ShardGroup]:
        """The shard groups of the parameters, in the order in which backward is expected to reach them."""
        return self._shards.shard_groups

    @property
    def places(self) -> Mapping[nn.Parameter, Place]:
        """The group of each parameter, and its position there."""
        return self._shards.places

    @property
    def join_device(self) -> torch.device:
        """For torch's Join, as is `join_process_group`."""
        return self.shard_groups[0].full.device

    @property
    def join_process_group(self) -> torch.distributed.ProcessGroup | None:
        return self._comm.group

    def part(self, param: nn.Parameter) -> nn.Parameter:
        """This rank's shard of a parameter, which the inner optimizer steps.

        A view of the parameter's memory, or of the master weights. Empty if this rank owns nothing of the parameter.
        Its `.grad` is the shard's gradient: from backward on with ShardedDDP, otherwise only within the step.
        """
        return self._shards[param]

    @property
    def keeps_masters(self) -> bool:
        return self._shards.masters.of_more_bits

    @property
    def steps_apart(self) -> bool:
        """Whether the stepped tensors lie elsewhere than the parameters."""
        return self._home.apart

    @property
    def cuts_parameters(self) -> bool:
        """Whether parameters are cut inside, as with partition "even"."""
        return self._cut == "even"

    @property
    def granularity(self) -> int | None:
        """Elements; cuts inside parameters are multiples of it. None if the user gave none."""
        return self._granularity

    # ----------------------------------------------------------------------------------------------- state

    @property  # type: ignore[override]
    def state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """The inner optimizer's state of this rank's shards, by parameter; only of parameters that have state.

        The dictionary is new each time, its values are the inner optimizer's own. torch.distributed.checkpoint gets the
        full state, which is collective.
        """
        if not hasattr(self, "optim"):
            return {}
        if self._comm.world > 1 and asked_by_torch_checkpoint():
            params = [param for group in self.param_groups for param in group["params"]]
            return {params[number]: kept for number, kept in self._for_torch()["state"].items()}
        kept = self.optim.state
        return {param: kept[shard] for param, shard in self._shards.items() if shard in kept}

    @state.setter
    def state(self, empty: object) -> None:
        """Ignores the empty state that the base class's constructor sets."""

    def consolidate_state_dict(self, to: int | None = 0, *, recipient_rank: int | None = None) -> None:
        """Collective. Gathers the full state on rank `to` of the group (None: on all), for `state_dict` to return.

        recipient_rank: FairScale's name for `to`.
        """
        self._full_state = state.consolidate(self, to if recipient_rank is None else recipient_rank)

    def state_dict(self) -> dict[str, Any]:
        """The full state in the plain optimizer's format if `consolidate_state_dict` gathered it here since the last
        step, or if there is one rank; otherwise this rank's shard, which warns when it is pickled. Options are current.

        Does not communicate and does not raise, except for torch.distributed.checkpoint, which gets the full state on
        every rank: that is collective.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        found = self._state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, found)
            found = found if changed is None else changed
        return found

    def _state_dict(self) -> dict[str, Any]:
        if self._comm.world == 1:
            return state.consolidate(self, None) or {}
        full = self._for_torch() if asked_by_torch_checkpoint() else self._full_state
        if full is None:
            return state.shard_of(self)
        return {**full, "param_groups": state.numbered_groups(self)}

    def _for_torch(self) -> dict[str, Any]:
        """Collective the first time after a step; torch asks once for each parameter."""
        if self._full_state_for_torch is None:
            self._full_state_for_torch = state.consolidate(self, None)
        assert self._full_state_for_torch is not None
        return {**self._full_state_for_torch, "state": dict(self._full_state_for_torch["state"])}

    def forget_full_state(self) -> None:
        """Called where the state may have changed."""
        self._full_state = self._full_state_for_torch = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a full state (of OSS at any world size, or of the plain optimizer) or this rank's own shard.

        Does not change the dictionary. Raises ValueError if it does not fit.
        """
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        state.load(self, state_dict)
        self.forget_full_state()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def bring(self, group: ShardGroup, sums: Tensor) -> Tensor:
        """Converts gradients of this rank's shard to the dtype and device of `part`.

        A copy to another device is complete after `arrive`.
        """
        return self._shards.masters.bring(group, sums)

    def receive(self, group: ShardGroup, gradients: Mapping[int, Tensor | None]) -> None:
        """Sets the gradients of this rank's shards, or adds to them. gradients: by position of the parameter."""
        known = [(self.part(group.params[i]), gradient) for i, gradient in gradients.items() if gradient is not None]
        added = [(part.grad, gradient) for part, gradient in known if part.grad is not None]
        if added:
            self.arrive()
            add_all(*zip(*added, strict=True))
        for part, gradient in known:
            if part.grad is None:
                part.grad = gradient

    def arrive(self) -> None:
        """Waits for all copies of `bring`."""
        for group in self.shard_groups:
            self._shards.masters.arrive(group)

    def take_shards(self, taken: dict[nn.Parameter, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        """Loads this rank's shards of a state, by `part(param)`, and the options of the groups.

        Keeps the tensors without copying them. Master weights are not among them: write into `master`.
        """
        state.hand_over(self, taken, groups)
        self.forget_full_state()

    def master(self, group: ShardGroup) -> Tensor | None:
        """This rank's master weights of a shard group, flat, as long as its segment; None if it has none."""
        return self._shards.masters.of(group)

    def settled_master(self, group: ShardGroup) -> Tensor | None:
        """The master weights for the next step: elements that were written into the parameters since replace theirs."""
        return self._shards.masters.settled(group)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "an OSS cannot be copied or pickled: its state is spread over the ranks. Save state_dict() after "
            "consolidate_state_dict(), and build another OSS to load it into."
        )
