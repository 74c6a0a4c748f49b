"""Chooses the units of a model and the parameters to shard, before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from zero._torch.modules import parameters_of
from zero._torch.tensors import wraps_others
from zero.fsdp.units import Policy, params_by_unit, unit_modules
from zero.shards.arguments import refuse_two_devices
from zero.shards.shapes import refuse_shared, refuse_unsendable, refuse_unusable
from zero.wrap.wrapper import describe

# Parameters of models whose construction an error has ended: some of them are shards.
# By identity: torch compares the elements of tensors that are keys of a WeakKeyDictionary or WeakSet.
_half_sharded: WeakIdKeyDictionary = WeakIdKeyDictionary()


class UnitChoice:
    """The units of a model, and the parameters that are in none.

    nested: FSDPs in the model, by name, which will be dissolved; their units remain.
    sharded: the parameters of these units.
    ignored: parameters that belong to no unit.
    `units`: after `divide`, the modules that become units, by name, the root first.
    """

    def __init__(
        self,
        module: nn.Module,
        nested: Mapping[str, nn.Module],
        sharded: Collection[nn.Parameter],
        ignored: Sequence[nn.Parameter],
    ) -> None:
        self.module, self.ignored = module, ignored
        self._nested, self._sharded = nested, sharded
        self._left_out = {*ignored, *sharded}
        self.units: dict[str, nn.Module] = {}

    def divide(self, policy: Policy, as_one_unit: Sequence[nn.Module | type[nn.Module]], leaves: float | None) -> None:
        """Chooses the units, see `unit_modules`. Raises ValueError if the policy is unusable."""
        excluded = [*self._nested.values()]
        self.units = unit_modules(self.module, policy, as_one_unit, excluded=excluded, leaves_from=leaves)

    def refuse_unusable(self, *, synced: bool, sharded: Collection[nn.Parameter]) -> None:
        """Raises ValueError if the model cannot be sharded.

        synced: whether meta parameters receive the first rank's values.
        sharded: the parameters of all FSDPs, nested ones and others.
        """
        has_parameters = False
        ignored = {*self.ignored}
        for name, param in self.module.named_parameters():
            if param in ignored:
                if synced and param.is_meta and wraps_others(param):
                    raise ValueError(
                        f"{name!r} is a {type(param).__name__} on the meta device, which wraps other tensors and would "
                        "not get the first rank's values. Build it with values on every rank."
                    )
                continue
            has_parameters = True
            if param in self._sharded:
                continue
            if param in _half_sharded:
                raise ValueError(
                    f"{name!r} may be a shard: an error ended an earlier FSDP(...) of this model, and left it half "
                    "sharded. Build the model again."
                )
            if param in sharded:
                raise ValueError(
                    f"{name!r} is sharded by another FSDP already. Wrap a module once, or wrap the FSDP around it; in "
                    "a notebook whose cell runs again wrap what zero.unwrap(model) of that FSDP returns."
                )
            if not (param.is_meta and synced):
                refuse_unusable(param, repr(name))
        for name, buffer in self.module.named_buffers():
            if buffer.is_meta and not synced:
                refuse_unusable(buffer, f"the buffer {name!r}")
        whole = [(name, param) for name, param in self.module.named_parameters() if param in ignored]
        refuse_unsendable([*whole, *self.module.named_buffers()])
        if not has_parameters:
            raise ValueError("FSDP was given a module without parameters: there is nothing to shard.")
        refuse_two_devices(self.own())
        refuse_shared(((repr(name), param) for name, param in self.own()), self.module.named_buffers())

    def own(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters to shard, with their names."""
        yield from ((name, param) for name, param in self.module.named_parameters() if param not in self._left_out)

    def mark_half_sharded(self) -> None:
        """Makes every later FSDP of these parameters raise ValueError: the construction was not undone."""
        _half_sharded.update((param, True) for param in parameters_of(self.module) if param not in self._left_out)

    @property
    def modules(self) -> list[nn.Module]:
        """All modules except those in nested FSDPs, which have prepared them."""
        prepared = {module for fsdp in self._nested.values() for module in fsdp.modules()}
        return [module for module in self.module.modules() if module not in prepared]

    def devices(self) -> list[torch.device]:
        """Returns the devices of the parameters that will be sharded, without the meta device."""
        devices = {param.device: None for param in parameters_of(self.module) if param not in self._left_out}
        return [device for device in devices if device.type != "meta"]

    def signature(self) -> list[str]:
        """Returns descriptions of the units and the module, which must be the same on every rank."""
        return [f"units {', '.join(self.units)}", *describe(self.module, without=self._sharded)]

    def owned(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """Returns the parameters of each unit by its name, with their names once nested FSDPs are dissolved."""
        by_unit = params_by_unit(self.module, self.units, self._left_out)
        return {unit: [(self._plain_name(name), param) for name, param in named] for unit, named in by_unit.items()}

    def _plain_name(self, name: str) -> str:
        for prefix in self._nested:
            if name.startswith(f"{prefix}.module."):
                return prefix + name.removeprefix(f"{prefix}.module")
        return name
