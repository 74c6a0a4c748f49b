"""One model at stage 3: its units, where its parameters lie, who unshards them, and its forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import ReferenceType, WeakSet, ref

from torch import nn
from torch.optim import Optimizer

from zero._torch.modules import parameters_of, params_of
from zero.comm import Comm, fail_together
from zero.comm.streams import streams_in
from zero.comm.together import Together
from zero.fsdp.backward import Backward
from zero.fsdp.options import Options, in_flight
from zero.fsdp.schedule import Reads, Schedule, ShownUnits
from zero.fsdp.unit import Index, Order, Unit
from zero.shards.cut import claim, release
from zero.shards.placement import Placement
from zero.shards.shard_group import GroupState, refuse_moved
from zero.tensor_parallel.parts import others_of

# All models that exist, in the order of their construction, which is the same on all ranks.
_alive: list[ReferenceType[Model]] = []


_AVERAGES = (
    "of which FSDP keeps another shard on each rank. Remove DistributedDataParallel: FSDP averages gradients itself."
)


_SHARDED = (
    "is sharded by FSDP, which is stage 3: no OSS can shard it once more. Build the plain optimizer of the parameters: "
    "torch.optim.Adam(model.parameters())."
)


class Model:
    """What an FSDP runs, as long as the sharded module exists or until `dismiss`. Hooks on modules keep it alive, and
    it keeps no module.

    module: the user's. units: the root first. ignored: modules that are not sharded.
    partition: the user's.
    `index`: where the parameters lie. `together`: around what ranks do together with it.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        placement: Placement,
        options: Options,
        ignored: Sequence[nn.Module] = (),
    ) -> None:
        self._module, self.units, self.placement, self.ignored = ref(module), units, placement, WeakSet(ignored)
        self.partition = options.partition
        self.index = Index(units)
        comms = placement.all_groups()
        self.together = Together(comms, "a call of FSDP, such as forward, backward or state_dict")
        # Where modules hold sharded parameters.
        self._holders = [
            (params_of(holder), name, param)
            for holder in module.modules()
            # A module may hold one parameter by two names, and either may be replaced.
            for name, param in holder.named_parameters(recurse=False, remove_duplicate=False)
            if param in self.index
        ]
        self._shown = ShownUnits(self.index)
        streams = streams_in(group.streams for group in self.index.groups)
        common = self.index, comms, streams, self.together
        overlaps = any(unit.overlaps for unit in units)
        order = Order(self.index, in_flight(options.prefetch, overlaps=overlaps), overlaps=overlaps)
        self.backward = Backward(*common, order)
        others = others_of(self.index)
        if others:
            fail_together([*comms, *others], self.index.groups[0].full.device)
        self.reads = Reads(self.index, comms, self.backward, [self.comm, *others])
        for group in self.index.groups:
            group.reads = ref(self.reads)  # units keep their groups, and hooks on modules keep units and this
        self.schedule = Schedule(*common, self.backward, order)
        # How to restore what steps have hidden, which are running or have raised.
        self.unfinished_steps: list[tuple[Callable[[Optimizer], None], ReferenceType[Optimizer]]] = []
        claim(self.index, self, _AVERAGES, sharded=_SHARDED)
        _alive[:] = [model for model in _alive if model() is not None]
        _alive.append(ref(self))

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, "the sharded module does not exist any more"
        return module

    @property
    def comm(self) -> Comm:
        """The ranks that own shards."""
        return self.placement.comm

    @property
    def comms(self) -> list[Comm]:
        """All groups of ranks."""
        return self.placement.all_groups()

    def units_of(self, module: nn.Module, *, recurse: bool = True) -> list[Unit]:
        """Returns the units that hold parameters of the module; without `recurse` only the module's own unit."""
        if not recurse:
            return [unit for unit in self.units if unit.exists and unit.module is module]
        params = {*parameters_of(module)}
        return [unit for unit in self.units if not params.isdisjoint(unit.params)]

    def refuse_replaced(self) -> None:
        """Raises RuntimeError if a module holds another sharded parameter than when it was wrapped."""
        for held, name, param in self._holders:
            now = held.get(name)
            if now is None or now is param:
                continue
            other = next((model.index[now] for model in models() if now in model.index), None)
            if other is not None:
                raise RuntimeError(
                    f"{self.index[param].name!r} was replaced by the sharded {other.name!r} since the model was "
                    "wrapped, but units gather what they were built with. Tie parameters first, then wrap the model."
                )

    def finish_steps(self) -> None:
        """Restores what steps have hidden that have raised."""
        for restore, optimizer in reversed([*self.unfinished_steps]):
            if (stepped := optimizer()) is not None:
                restore(stepped)

    def refuse_moved(self) -> None:
        """Collective where it raises: RuntimeError if parameters were moved, cast or given other data. Before, restores
        what steps have hidden that have raised: the caller binds parameters anew, or gathers what they wrote."""
        self.finish_steps()
        try:
            refuse_moved(group for group in self.index.groups if group.state is not GroupState.SUMMONED)
        except RuntimeError as error:  # not a section, which costs two calls in each forward
            self.together.tell(error)
            raise

    def refuse_unreduced(self) -> None:
        """Collective where it raises: RuntimeError if no_sync has left full gradients, of which no rank has the
        average."""
        names = (bucket.name_of_unreduced(self.index) for unit in self.units for bucket in unit.buckets)
        for name in filter(None, names):
            with self.together:
                raise RuntimeError(
                    f"{name} has a gradient that was not averaged: the last backward ran under no_sync(). Run the "
                    "last backward of a step outside it."
                )

    def dismiss(self) -> None:
        """Ends the model: its modules are called as if they were not sharded."""
        _alive[:] = [model for model in _alive if model() is not self]
        self.schedule.remove()
        release(self.index, self)
        self._shown.remove()


def models() -> list[Model]:
    """Returns all models that exist, in the same order on every rank."""
    return [model for reference in _alive if (model := reference()) is not None]


def models_of(module: nn.Module) -> list[tuple[Model, list[Unit]]]:
    """Returns each model with its units that hold parameters of the module, if it has any."""
    pairs = [(model, model.units_of(module)) for model in models()]
    return [(model, units) for model, units in pairs if units]


def sharded_params() -> set[nn.Parameter]:
    """Returns the parameters of all models that exist."""
    return {param for model in models() for param in model.index}
