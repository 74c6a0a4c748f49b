"""One wrapped module's parameters, and when they are unsharded: while the module computes. At rest they are shards.

Its gradients are in unit_gradients.py.
"""

from __future__ import annotations

import enum
import math

from torch import nn
from torch.autograd.graph import Node

from zero.fsdp.precision import MixedPrecision
from zero.fsdp.unit_gradients import UnitGradients
from zero.oss.shard_group import GroupState, ShardGroup


class TrainingState(enum.Enum):
    """What a unit is doing."""

    IDLE = "idle"
    BACKWARD = "in backward"


class Call:
    """One forward of a unit.

    begun, ended: its place among all forwards of units: how many had begun when it had, and when it ended.
    seen_off: whether a hook is called when its backward is complete; else it is complete at the end of that backward.
    waited_for: the unit's round in which its backward was last expected; -1 once that is complete.
    shares_casts: whether it may compute with what autocast has cast in an earlier one.
    """

    ended: float = math.inf
    seen_off = True
    waited_for = -1

    def __init__(self, begun: int, *, shares_casts: bool) -> None:
        self.begun, self.shares_casts = begun, shares_casts


class Unit:
    """The parameters that are gathered together for one module.

    stays: whether they stay unsharded from forward to backward.
    `params`: all that are in the groups.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        groups: list[ShardGroup],
        *,
        precision: MixedPrecision,
        stays: bool,
    ) -> None:
        self.name, self.module, self.groups = name, module, groups
        self.params = {param for group in groups for param in group.params}
        self.precision, self.stays = precision, stays
        self.state = TrainingState.IDLE
        self.entrance: nn.Module | None = None
        """The module by which the running forward came in, if not the unit's own."""
        self.running: list[Call] = []
        """Forwards that are running: more than one where a module calls itself."""
        self.calls = 0
        """Forwards whose backward is expected or under way."""
        self.earliest: float = math.inf
        """When the first of them began."""
        self._shares_casts = False
        self._round = 0
        """Goes up when all of these are forgotten, as a backward ends."""
        self.inputs: set[Node] = set()
        """What made the inputs of the running forwards."""
        self.reads: list[Unit] = []
        """Other units whose parameters the module reads."""
        self.readers = 0
        """Forwards of others that are running and read parameters of this unit."""
        self.is_read = False
        """Whether others read its parameters, so that its gradients are complete at the end of backward only."""
        self.before: Unit | None = None
        self.after: Unit | None = None
        """The units that ran before and after it in the last forward."""
        self.gradients = UnitGradients(groups, sent_as=precision.reduce_dtype)
        self._entitle()
        self.passed_by = False
        """Whether the last backward that came here was asked for gradients in particular, of which these were none."""

    def _entitle(self) -> None:
        self.title = f"unit {self.name!r}" if self.name else "the root unit"

    def move_below(self, prefix: str) -> None:
        """From now on its module is known by its name in a larger model, where it lies below `prefix`."""
        self.name = f"{prefix}.{self.name}".rstrip(".")
        self._entitle()
        for group in self.groups:
            group.rename([f"{prefix}.{name}" for name in group.names], self.title)

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {self.state.value}, {self.groups})"

    @property
    def depth(self) -> int:
        """How many of its forwards are running."""
        return len(self.running)

    def expects(self, call: Call) -> bool:
        """Whether the backward of the call is to come, or under way."""
        return call.waited_for == self._round

    def expect(self, call: Call) -> None:
        """The backward of the call is to come, or has come."""
        if not self.expects(call):
            call.waited_for = self._round
            self.calls += 1
            self.earliest = min(self.earliest, call.begun)
            self._shares_casts |= call.shares_casts

    def leave(self, call: Call) -> bool:
        """The backward of the call is complete. Returns whether it was expected."""
        expected = self.expects(call)
        if expected:
            call.waited_for = -1
            self.calls -= 1
        return expected

    @property
    def ends_last(self) -> bool:
        """Whether its gradients are complete only when all of backward is."""
        return self.is_read or self._shares_casts

    def forget_calls(self) -> None:
        self.calls = 0
        self._shares_casts = False
        self.earliest = math.inf
        self._round += 1

    def leave_forward(self) -> None:
        """Forgets forwards that an exception ended."""
        self.readers = 0
        self.running.clear()
        self.entrance = None
        self.inputs.clear()

    # ------------------------------------------------------------------------------------------ parameters

    @property
    def unsharded(self) -> bool:
        return all(group.state is GroupState.UNSHARDED for group in self.groups)

    @property
    def readable(self) -> bool:
        """Whether the parameters are full on this rank."""
        return all(group.readable for group in self.groups)

    @property
    def summoned(self) -> bool:
        """Whether the parameters are full because the user asked for it."""
        return any(group.summoned for group in self.groups)

    @property
    def gathering(self) -> bool:
        return any(group.gathering for group in self.groups)

    @property
    def overlaps(self) -> bool:
        """Whether its parameters are gathered beside the computing."""
        return any(group.overlaps for group in self.groups)

    def unshard(self) -> None:
        """Collective. Unshards the parameters. Raises RuntimeError where they have not arrived, because an earlier
        gather failed."""
        wire = self.precision.param_wire
        for group in self.groups:
            if group.state is GroupState.SHARDED:
                group.launch_unshard(wire=wire)
        for group in self.groups:
            if group.gathering:
                group.finish_unshard()
        if any(group.state is GroupState.LOST for group in self.groups):
            raise RuntimeError(
                f"the parameters of {self.title} of FSDP have not arrived: gathering them failed before. Look for the "
                "first error, and start the process group anew."
            )

    def unshard_ahead(self) -> None:
        """Collective. Starts to unshard the parameters, where they are sharded, which are needed later."""
        for group in self.groups:
            if group.state is GroupState.SHARDED:
                group.launch_unshard(wire=self.precision.param_wire, ahead=True)

    def finish_unshard(self) -> None:
        """Waits until the parameters are unsharded."""
        for group in self.groups:
            if group.gathering:
                group.finish_unshard()

    def reshard(self) -> None:
        """Leaves of the parameters this rank's shard."""
        self.finish_unshard()
        for group in self.groups:
            if group.state is GroupState.UNSHARDED:
                group.reshard()

    def look_for_writes(self) -> None:
        """Has the next `reshard` look whether the module wrote into its parameters, if it was unsharded till then."""
        for group in self.groups:
            group.look_for_writes()

    def settle(self) -> None:
        """Waits until the shards and their gradients are the host's to read and write."""
        for group in self.groups:
            group.settle()

    # -------------------------------------------------------------------------------------------- backward

    def enter_backward(self) -> None:
        """From here on autograd may write full gradients; the parameters are unsharded."""
        self.state = TrainingState.BACKWARD
        self.passed_by = False
        self.gradients.enter_backward()

    def keep_gradients(self) -> None:
        """Ends a backward under no_sync."""
        full = self.gradients.take_full()
        self.leave_backward()
        self.gradients.keep(full)

    def leave_backward(self) -> None:
        """Its gradients are taken; of the parameters the shards are left."""
        self.state = TrainingState.IDLE
        self.forget_calls()
        self.reshard()

    @property
    def at_rest(self) -> bool:
        """Whether `param.grad` is the shard's, with nothing on its way to it."""
        return self.state is TrainingState.IDLE and not (self.gradients.sends or self.readable or self.gathering)

    def take_resting(self, param: nn.Parameter, name: str) -> None:
        """Autograd is about to add a gradient of the shard to `param.grad`.

        Raises RuntimeError within the backward of the unit, where that is the full's.
        """
        if not self.at_rest:
            raise RuntimeError(
                f"{name} got a gradient of this rank's shard within the backward of {self.title} of FSDP: something, "
                "such as a penalty, was computed from it before the forward of the model. Compute it after: "
                "loss = criterion(model(inputs), targets) + penalty."
            )
        self.gradients.take_resting(param)

    def interrupt(self) -> None:
        """Puts the gradients from before a backward that an exception ended where they were. Waits for nobody.

        Where that backward has not come they are there.
        """
        if self.state is TrainingState.BACKWARD:
            self.gradients.clear_full()
            self.leave_backward()
        if self.gradients.waits and not self.gathering:
            self.reshard()
            self.gradients.put_back()

    def abandon(self) -> None:
        """Forgets a forward or backward that an exception ended."""
        self.gradients.abandon()
        self.leave_forward()
        self.finish_unshard()
        self.interrupt()
        self.leave_backward()
