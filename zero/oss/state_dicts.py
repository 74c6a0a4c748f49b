"""The state of an OSS: this rank's shard, or the full one, kept from its consolidation until the next step."""

from __future__ import annotations

from typing import Any
from weakref import ReferenceType

from torch.optim import Optimizer

from zero._torch.optimizers import takes_state_hooks
from zero.comm import AGREEMENT
from zero.comm.together import Together
from zero.measure.param_groups import params_of
from zero.shards.sharded_parameter import plain_state
from zero.state import optimizer_state as state
from zero.state.gathered import consolidate
from zero.state.shard_mark import mark
from zero.state.stepped import SteppedShards
from zero.tensor_parallel import parts


class StateDicts:
    """The full state of one OSS, where it was gathered since the last step. stepped: what the OSS steps now."""

    def __init__(self) -> None:
        # The full state, if it was consolidated here since the last step.
        self._full: dict[str, Any] | None = None

    def forget(self) -> None:
        """The state may have changed."""
        self._full = None

    def consolidate(self, stepped: SteppedShards, to: int | None) -> None:
        with Together([stepped.comm], AGREEMENT) as together:
            self._full = consolidate(stepped, to)
            together.agree()

    def state_dict(self, stepped: SteppedShards) -> dict[str, Any]:
        full = self._full
        # One rank's shard is all, and current; what was consolidated is a copy without later writes into the state.
        if full is None or (stepped.comm.world == 1 and parts.ranks(params_of(stepped)) is None):
            return state.shard_of(stepped)
        return {"state": dict(full["state"]), "param_groups": state.numbered_groups(stepped)}

    def load_state_dict(self, stepped: SteppedShards, state_dict: dict[str, Any]) -> None:
        state.load(stepped, state_dict)


def mark_shards(inner: Optimizer, of: ReferenceType[Any]) -> None:
    """Has the state_dict() of the optimizer inside of an OSS say which shard it is: no other rank must load it."""

    def marked(_: Optimizer, state_dict: dict[str, Any]) -> None:
        outer = of()
        if outer is not None and outer.comm.world > 1:
            state_dict["state"] = {number: plain_state(of_one) for number, of_one in state_dict["state"].items()}
            mark(state_dict, state.fingerprint(outer.stepped_shards))

    if takes_state_hooks(inner):
        inner.register_state_dict_post_hook(marked)
