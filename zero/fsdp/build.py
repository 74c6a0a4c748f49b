"""The units of a model: its parameters given memory, made the same on all ranks, laid out and bound, unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zero.fsdp.choice import Choice
from zero.fsdp.materialise import Materialiser
from zero.fsdp.precision import CastBuffer, MixedPrecision
from zero.fsdp.prefetch import Prefetch
from zero.fsdp.unit import Unit
from zero.fsdp.unwrap import give_back
from zero.oss.disk import Disk
from zero.oss.offload import CPUOffload, DiskOffload, Room
from zero.oss.partition import Partition, lay_out
from zero.oss.placement import Placement
from zero.oss.shard_group import GroupOptions, ShardGroup


@dataclass(frozen=True)
class Options:
    """How units are laid out, kept and gathered.

    stays: whether they stay unsharded from forward to backward.
    synced: whether all start from the first rank's values.
    offload: where shards lie, if not beside what is computed with.
    """

    partition: Partition
    precision: MixedPrecision
    stays: bool
    synced: bool
    offload: CPUOffload | DiskOffload | None
    prefetch: Prefetch

    def signature(self) -> str:
        """What must be the same on every rank."""
        return (
            f"reshard_after_forward {not self.stays}, partition {self.partition}, {self.precision}, "
            f"offload {type(self.offload).__name__}, {self.prefetch}"
        )


class Builder:
    """Makes units of one model one after another, so that never more than one is unsharded.

    Where this can fail, because modules are still to be initialised or shards may find no room, ranks compare after
    each unit whether it did. What was sharded until then is gathered again.

    param_init_fn: gives values to modules that were built on the meta device.
    `disk`: where shards lie, if in files.
    `cast_buffers`: those that were cast to another dtype; `hooks`: what was put on modules for mixed precision.
    """

    def __init__(
        self,
        choice: Choice,
        placement: Placement,
        options: Options,
        param_init_fn: Callable[[nn.Module], None] | None,
    ) -> None:
        self._choice, self._placement, self._options = choice, placement, options
        store = options.offload.store() if options.offload else None
        self.disk = store if isinstance(store, Disk) else None
        self._room = Room(store) if store else None
        self._materialiser = Materialiser(choice.module, param_init_fn, initialises=placement.first)
        self._loads = [0] * placement.comm.world
        self.cast_buffers: list[CastBuffer] = []
        self.hooks: list[RemovableHandle] = []
        self._can_fail = False

    def build(self) -> list[Unit]:
        """Collective. The units, the root first.

        Raises ValueError on every rank where modules could not be initialised or shards found no room on any. The
        model is plain then, and can be wrapped again: what had values has those of the first rank (without
        sync_module_states each shard's owner's), and what had none is on the meta device.
        """
        units: list[Unit] = []
        self._can_fail = self._on_any_rank(self._room is not None or self._materialiser.pending)
        try:
            self._materialiser.materialise_buffers()
            for name, owned in self._choice.owned().items():
                units.append(self._unit(name, owned))
                self._agree(units[-1].title)
            if self._options.synced:
                self._materialiser.materialise(self._choice.ignored)
                self._agree()
        except ValueError:
            give_back(units, (), ())
            self._materialiser.take_back()
            raise
        self.cast_buffers, self.hooks = self._options.precision.prepare(self._choice.modules)
        if self._options.synced:
            self._placement.broadcast([*self._choice.ignored, *self._choice.module.buffers()])
        return units

    def _unit(self, name: str, owned: list[tuple[str, nn.Parameter]]) -> Unit:
        params = [param for _, param in owned]
        title = f"unit {name!r}" if name else "the root unit"
        self._materialiser.materialise(params)
        self._agree(title)
        if self._options.synced:
            self._placement.broadcast(params)
        return Unit(
            name,
            self._choice.units[name],
            self._lay_out(owned, title),
            precision=self._options.precision,
            stays=self._options.stays,
        )

    def _lay_out(self, owned: Sequence[tuple[str, nn.Parameter]], title: str) -> list[ShardGroup]:
        """In groups, those apart that are computed with in another dtype."""
        shard_in_full = self._options.stays and self._options.precision.param_wire is None
        return [
            group
            for dtype, named in self._options.precision.apart(self._choice.module, [*owned]).items()
            for group in lay_out(
                [param for _, param in named],
                [name for name, _ in named],
                self._placement,
                cut="whole" if self._options.partition == "whole" else "even",
                loads=self._loads,
                options=GroupOptions(True, dtype, shard_in_full, self._room),
                label=title,
            )
        ]

    # ---------------------------------------------------------------------------------------------- failing

    def _on_any_rank(self, flag: bool) -> bool:
        """Collective."""
        found = torch.tensor(float(flag))
        for comm in self._placement.all_groups():
            comm.all_reduce(found, maximum=True)
        return bool(found)

    def _agree(self, title: str = "") -> None:
        """Collective, where building can fail. Raises ValueError on every rank where it did on any."""
        if not self._can_fail:
            return
        problem = self._materialiser.problem
        if problem is None and self._room is not None:
            problem = self._room.problem(f"the shards of {title}", self._options.offload)
        self._placement.compare("the units of FSDP", [], problem)
