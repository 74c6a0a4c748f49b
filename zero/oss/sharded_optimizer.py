"""What an OSS holds, and how its state is saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from zero._torch import add_all
from zero.comm import Comm
from zero.oss import state
from zero.oss.owned_shards import OwnedShards
from zero.oss.shard_group import Place, ShardGroup
from zero.oss.torch_checkpoint import asked_by_torch_checkpoint


class ShardedOptimizer(Optimizer):
    """Of an optimizer that steps this rank's shards by `optim`. The full state is put together on request only."""

    optim: Optimizer
    _comm: Comm
    _shards: OwnedShards
    _cut: Literal["even", "whole"]
    _granularity: int | None

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self._full_state: dict[str, Any] | None = None
        """Where it was brought here since the last step."""
        self._full_state_for_torch: dict[str, Any] | None = None
        super().__init__(groups, {})

    @property
    def comm(self) -> Comm:
        return self._comm

    @property
    def shard_groups(self) -> list[ShardGroup]:
        """The shard groups that the parameters lie in, in the order in which backward is expected to reach them."""
        return self._shards.shard_groups

    @property
    def places(self) -> Mapping[nn.Parameter, Place]:
        """Where each parameter lies."""
        return self._shards.places

    def part(self, param: nn.Parameter) -> nn.Parameter:
        """This rank's shard of a parameter, as the inner optimizer steps it.

        A view into the parameter's own memory, or into the master. Empty where this rank owns nothing of it. Its
        `.grad` is the shard's gradient: from backward on with ShardedDDP, otherwise only within the step.
        """
        return self._shards[param]

    @property
    def keeps_masters(self) -> bool:
        return self._shards.masters.of_more_bits

    @property
    def offloads(self) -> bool:
        """Whether what is stepped lies elsewhere than the parameters: in the memory of the CPU, or in files."""
        return self._shards.masters.store is not None

    @property
    def cuts_parameters(self) -> bool:
        """Whether parameters are cut inside, as with partition "even"."""
        return self._cut == "even"

    @property
    def granularity(self) -> int | None:
        """Elements that cuts inside parameters are multiples of, where the user said so."""
        return self._granularity

    # ----------------------------------------------------------------------------------------------- state

    @property  # type: ignore[override]
    def state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """By parameter: what the inner optimizer keeps of this rank's shard; without those that it keeps nothing of.

        What is in it is the inner optimizer's own; the dictionary around it is made anew each time. Collective where
        torch.distributed.checkpoint asks, which is given the full state.
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
        """For the base class's constructor, which sets one that this optimizer has no use for."""

    def consolidate_state_dict(self, to: int | None = 0, *, recipient_rank: int | None = None) -> None:
        """Collective. Brings the full state to rank `to` of the group (None: to all), for `state_dict` to return.

        recipient_rank: FairScale's name for `to`.
        """
        self._full_state = state.consolidate(self, to if recipient_rank is None else recipient_rank)

    def state_dict(self) -> dict[str, Any]:
        """The full state in the plain optimizer's format, where `consolidate_state_dict` brought it here since the
        last step (or where there is one rank only); otherwise this rank's shard. Options are those of now. Never
        communicates, never raises, but for torch.distributed.checkpoint: it is given the full state on every rank,
        which is collective."""
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
        """Collective the first time after a step: it asks once for each parameter."""
        if self._full_state_for_torch is None:
            self._full_state_for_torch = state.consolidate(self, None)
        assert self._full_state_for_torch is not None
        return {**self._full_state_for_torch, "state": dict(self._full_state_for_torch["state"])}

    def forget_full_state(self) -> None:
        """To be called where the state may have changed."""
        self._full_state = self._full_state_for_torch = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a full state (of OSS at any world size, or of the plain optimizer) or this rank's own shard.

        The dictionary stays as it is. Raises ValueError where it does not fit.
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
        """Gradients of this rank's shard, as the inner optimizer takes them: in the dtype and on the device of `part`.

        Where shards are offloaded from a GPU they are on their way until `arrive`.
        """
        return self._shards.masters.bring(group, sums)

    def receive(self, group: ShardGroup, gradients: Mapping[int, Tensor | None]) -> None:
        """Puts gradients that were brought, by position, where the inner optimizer takes them, or adds them there."""
        known = [(self.part(group.params[i]), gradient) for i, gradient in gradients.items() if gradient is not None]
        added = [(part.grad, gradient) for part, gradient in known if part.grad is not None]
        if added:
            self.arrive()
            add_all(*zip(*added, strict=True))
        for part, gradient in known:
            if part.grad is None:
                part.grad = gradient

    def arrive(self) -> None:
        """Waits for all gradients that were brought."""
        for flat in self.shard_groups:
            self._shards.masters.arrive(flat)

    def take_shards(self, taken: dict[nn.Parameter, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        """Takes this rank's shards of a state, by `part(param)`, and the options of the groups.

        The tensors are kept, not copied. Masters are not among them: fill `master` instead.
        """
        state.hand_over(self, taken, groups)
        self.forget_full_state()

    def master(self, flat: ShardGroup) -> Tensor | None:
        """This rank's master of a shard group, flat, of the length of its segment; None without one."""
        return self._shards.masters.of(flat)

    def settled_master(self, flat: ShardGroup) -> Tensor | None:
        """The same as the next step takes it, to be read: what was written into the parameters since the last wins."""
        return self._shards.masters.settled(flat)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "an OSS cannot be copied or pickled: its state is spread over the ranks. Save state_dict() after "
            "consolidate_state_dict(), and build another OSS to load it into."
        )
