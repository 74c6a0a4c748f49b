"""Builds the units of a model one by one: initialises, lays out and shards their parameters; and makes the
module plain again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zero.comm.together import alike
from zero.fsdp.choice import UnitChoice
from zero.fsdp.meta import Materialiser
from zero.fsdp.options import Options
from zero.fsdp.unit import Need, Unit
from zero.shards.cut import forget
from zero.shards.group_state import GroupOptions
from zero.shards.offload import Offload
from zero.shards.partition import lay_out
from zero.shards.placement import Placement
from zero.shards.shard_group import ShardGroup
from zero.shards.shares import Shares
from zero.tensor_parallel.shown import take_out_of

# Who needs a unit full for longer than a forward.
_BUSY = {Need.BACKWARD, Need.SUMMONED}


class Builder:
    """Builds the units of one model one after another, so that at most one is unsharded.

    If this can fail, because modules must be initialised or shards may find no room, ranks compare after each unit
    whether it has failed on any. If it has, the units that were sharded before are gathered again.

    param_init_fn: initialises modules that were built on the meta device. whole: the parameters that are not cut.
    `hooks`: those of mixed precision on modules.
    """

    def __init__(
        self,
        choice: UnitChoice,
        placement: Placement,
        options: Options,
        param_init_fn: Callable[[nn.Module], None] | None,
        whole: Collection[nn.Parameter],
    ) -> None:
        self._choice, self._placement, self._options = choice, placement, options
        self._values = Materialiser(choice.module, param_init_fn, initialises=placement.first)
        self._division = Shares(placement.comm.world).divide([param for _, param in choice.own()], whole)
        self.hooks: list[RemovableHandle] = []
        self._can_fail = False

    def build(self) -> list[Unit]:
        """Collective. Returns the units, the root first.

        Raises ValueError on every rank if, on any, a module could not be initialised or there was no room for a shard.
        The model is plain then, and can be wrapped again: parameters that had values have those of the first rank
        (without sync_module_states those of each shard's owner), and the others are on the meta device.
        """
        units: list[Unit] = []
        try:
            self._can_fail = self._on_any_rank(self._options.offload.active or self._values.pending)
            self._values.materialise_buffers()
            named = self._choice.owned()
            numels = [sum(param.numel() for _, param in owned) for owned in named.values()]
            offloads = self._options.offload.of_groups(numels)
            for (name, owned), offload in zip(named.items(), offloads, strict=True):
                units.append(self._unit(name, owned, offload))
                self._agree(units[-1].title)
            if self._options.synced:
                self._values.materialise(self._choice.ignored)
                self._agree()
            self.hooks = self._options.precision.prepare(self._choice.modules)
            if self._options.synced:
                self._placement.broadcast([*self._choice.ignored, *self._choice.module.buffers()])
        except ValueError:  # of all ranks
            restore_units(units)
            take_out_of(self._choice.module)
            self._values.undo()
            raise
        except BaseException:  # perhaps of this rank alone: the others cannot be asked for their shards
            self._choice.mark_half_sharded()
            raise
        return units

    def _unit(self, name: str, owned: list[tuple[str, nn.Parameter]], offload: Offload) -> Unit:
        params = [param for _, param in owned]
        title = f"unit {name!r}" if name else "the root unit"
        self._values.materialise(params)
        self._agree(title)
        return Unit(
            name,
            self._choice.units[name],
            self._lay_out(owned, title, offload),
            precision=self._options.precision,
            stays=self._options.stays,
        )

    def _lay_out(self, owned: Sequence[tuple[str, nn.Parameter]], title: str, offload: Offload) -> list[ShardGroup]:
        """Returns the shard groups of a unit's parameters, one for each dtype of computing."""
        return [
            group
            for dtype, named in self._options.precision.by_dtype(self._choice.module, [*owned]).items()
            for group in lay_out(
                [param for _, param in named],
                [name for name, _ in named],
                self._placement,
                self._division,
                options=GroupOptions(True, dtype, self._options.stays, offload, from_first=self._options.synced),
                label=title,
            )
        ]

    def _on_any_rank(self, flag: bool) -> bool:
        """Collective. Returns whether any rank has the flag."""
        # torch.set_default_device() may name another, such as meta, on which no rank can send.
        result = torch.tensor(float(flag), device="cpu")
        for comm in self._placement.all_groups():
            comm.all_reduce(result, maximum=True)
        return bool(result)

    def _agree(self, title: str = "") -> None:
        """Collective, if building can fail. Raises ValueError on every rank if it has failed on any."""
        if not self._can_fail:
            return
        with alike(self._placement.all_groups(), "the units of FSDP"):
            if self._values.problem is not None:
                raise ValueError(self._values.problem)
            self._options.offload.refuse_full(f"the shards of {title}")


def restore_units(units: Sequence[Unit]) -> None:
    """Collective. Unshards the units' parameters for good on every rank, and drops gradients.

    Raises RuntimeError within forward, backward and summon_full_params().
    """
    refuse_busy(units, "zero.unwrap()")
    for unit in units:
        unit.reshard()
        for group in unit.groups:
            for param in group.params:
                param.grad = None
        unit.summon()
        for group in unit.groups:
            group.stay_full()
        forget(unit.params)


def refuse_busy(units: Sequence[Unit], call: str) -> None:
    """Raises RuntimeError if `call` is made within forward, backward or summon_full_params()."""
    busy = [unit.title for unit in units if unit.running or not unit.needed_by.isdisjoint(_BUSY)]
    if busy:
        raise RuntimeError(
            f"{call} was called while {busy[0]} is unsharded already: within forward, backward or another "
            "summon_full_params(). Call it between steps, and once."
        )
