"""The state of an OSS, cached until the next step. `state_dict()` is this rank's shard, unless full state is asked."""

from __future__ import annotations

from typing import Any

from torch import nn

from zero._torch import asked_by_torch_checkpoint
from zero.measure.param_groups import params_of
from zero.state import optimizer_state as state
from zero.state.stepped import SteppedShards
from zero.state.whole import consolidate_whole, cut_whole, has_parts


class Saved:
    """The state of one OSS as users save and load it. torch.distributed.checkpoint gets the full state."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self._full: dict[str, Any] | None = None
        """The full state, if it was consolidated here since the last step."""
        self._full_for_torch: dict[str, Any] | None = None

    @property
    def stepped(self) -> SteppedShards:
        """What the inner optimizer steps now."""
        oss, shards = self.optimizer, self.optimizer.shards
        return SteppedShards(
            oss.optim,
            shards.shard_groups,
            oss.comm,
            param_groups=oss.param_groups,
            part=oss.part,
            granularity=oss.granularity,
            cuts=shards.cut == "even",
            keeps_masters=bool(shards.masters),
            loaded=shards.note_versions,
        )

    @property
    def asked_for_full(self) -> bool:
        """Whether the caller must get the full state although it did not consolidate it, which is collective."""
        return asked_by_torch_checkpoint()

    def forget(self) -> None:
        """The state may have changed."""
        self._full = self._full_for_torch = None

    def consolidate(self, to: int | None) -> None:
        self._full = consolidate_whole(self.stepped, to)

    def of_params(self) -> dict[nn.Parameter, dict[str, Any]]:
        """Returns the full state by parameter, if the caller asks for it."""
        params = params_of(self.optimizer)
        return {params[number]: kept for number, kept in self._for_torch()["state"].items()}

    def state_dict(self) -> dict[str, Any]:
        full = self._for_torch() if self.asked_for_full else self._full
        if full is None or (self.optimizer.comm.world == 1 and not has_parts(self.stepped)):
            return state.shard_of(self.stepped)
        return {**full, "param_groups": state.numbered_groups(self.stepped)}

    def _for_torch(self) -> dict[str, Any]:
        """Collective the first time after a step; torch asks once for each parameter."""
        if self._full_for_torch is None:
            self._full_for_torch = consolidate_whole(self.stepped, None)
        assert self._full_for_torch is not None
        return {**self._full_for_torch, "state": dict(self._full_for_torch["state"])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state.load(self.stepped, cut_whole(self.stepped, state_dict))
        self.forget()

    def gathered(self) -> Any:
        """Collective. Returns the full state on every rank, in a form that `restore` takes after another layout."""
        return consolidate_whole(self.stepped, None, settle=False)

    def restore(self, full: Any) -> None:
        state.load(self.stepped, cut_whole(self.stepped, full))

    def take(self, taken: dict[nn.Parameter, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        """Loads this rank's shards of a state, by `part(param)`, and the options of the groups.

        Keeps the tensors without copying them. Master weights are not among them: write into `ShardGroup.master`.
        """
        state.hand_over(self.stepped, taken, groups)
        self.forget()
