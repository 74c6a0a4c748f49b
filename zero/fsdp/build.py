"""The units of a model: its parameters given memory, made the same on all ranks, laid out and bound, unit by unit."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch import nn

from zero.fsdp.materialise import Materialiser
from zero.fsdp.precision import MixedPrecision
from zero.fsdp.strategy import Placement
from zero.fsdp.unit import Unit
from zero.fsdp.wrap import params_by_unit
from zero.oss.flat import FlatGroup, Home
from zero.oss.partition import Partition, lay_out


@dataclass
class Builder:
    """Makes units of one model one after another, so that never more than one is whole.

    stays: whether units stay whole from forward to backward.
    synced: whether all start from the first rank's values.
    home: where parts lie, if not beside what is computed with.
    `problem`: what kept values from being made or parts from being put there, in words for the user.
    """

    module: nn.Module
    placement: Placement
    materialiser: Materialiser
    precision: MixedPrecision
    partition: Partition
    stays: bool
    synced: bool
    home: Home | None = None
    problem: str | None = field(init=False, default=None)
    _loads: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._loads = [0] * self.placement.comm.world

    def build(
        self, modules: dict[str, nn.Module], ignored: Sequence[nn.Parameter], apart: Collection[nn.Parameter]
    ) -> list[Unit]:
        """Collective. The units of these modules by name, the root first.

        ignored: parameters that belong to none, and are only made the same on all ranks.
        apart: parameters that belong to other units already.
        """
        self.precision.prepare(self.module)
        owned = params_by_unit(self.module, modules, {*ignored, *apart})
        units = [self._unit(name, modules[name], params) for name, params in owned.items()]
        if self.synced:
            self.materialiser.materialise(ignored)
            self.placement.broadcast([*ignored, *self.module.buffers()])
        self.problem = self.materialiser.problem or self.problem
        return units

    def _unit(self, name: str, module: nn.Module, owned: list[tuple[str, nn.Parameter]]) -> Unit:
        self.materialiser.materialise(param for _, param in owned)
        if self.synced:
            self.placement.broadcast([param for _, param in owned])
        label = f"unit {name!r}" if name else "the root unit"
        try:
            groups = self._lay_out(owned, label, self.home)
        except OSError as error:
            self.problem = self.problem or (
                f"there is no room for the parts of {label} in {self.home}: {error}. Free some, or choose another "
                "directory."
            )
            groups = self._lay_out(owned, label, None)  # so that this rank comes to where all ranks are told
        return Unit(name, module, groups, precision=self.precision, stays=self.stays, replicas=self.placement.replicas)

    def _lay_out(self, owned: Sequence[tuple[str, nn.Parameter]], label: str, home: Home | None) -> list[FlatGroup]:
        """In flat groups of their own parts, those apart that are computed with in another dtype."""
        return [
            group
            for dtype, named in self.precision.apart(self.module, [*owned]).items()
            for group in lay_out(
                [param for _, param in named],
                [name for name, _ in named],
                self.placement.comm,
                cut="whole" if self.partition == "whole" else "even",
                loads=self._loads,
                own_part=True,
                compute_dtype=dtype,
                part_in_whole=self.stays,
                home=home,
                label=label,
            )
        ]
