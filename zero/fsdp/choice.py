"""What of a model is sharded, and into which units it is divided: found out before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from zero._torch import wraps_others
from zero.fsdp.precision import MixedPrecision
from zero.fsdp.wrap import Policy, params_by_unit, unit_modules
from zero.oss.groups import on_two_devices, unquantisable
from zero.oss.shapes import unusable
from zero.sdp.sharded_ddp import describe


class Choice:
    """The units of a model, and the parameters that are in none.

    inside: FSDPs in the model, by name, that will hand their modules back into their places. All in them stays divided
        as it is.
    taken: parameters that are in units of these already.
    ignored: parameters that belong to no unit.
    `units`: the modules that become units, by name, the root first, once they are divided.
    """

    def __init__(
        self,
        module: nn.Module,
        inside: Mapping[str, nn.Module],
        taken: Collection[nn.Parameter],
        ignored: Sequence[nn.Parameter],
    ) -> None:
        self.module, self.ignored = module, ignored
        self._inside, self._taken = inside, taken
        self._left_out = {*ignored, *taken}
        self.units: dict[str, nn.Module] = {}

    def divide(self, policy: Policy, as_one_unit: Sequence[nn.Module | type[nn.Module]], *, small: bool) -> str | None:
        """Chooses the units as `unit_modules` does; or says what is wrong with the way to, in words for the user."""
        apart = [*self._inside.values()]
        try:
            self.units = unit_modules(self.module, policy, as_one_unit, apart=apart, small=small)
        except ValueError as error:
            return str(error)
        return None

    def unusable(self, *, synced: bool, sharded: Collection[nn.Parameter]) -> str | None:
        """Why the model cannot be sharded, in words for the user; None if it can.

        synced: whether what has no values is given those of the first rank.
        sharded: what FSDPs have, these inside and others.
        """
        found = False
        ignored = {*self.ignored}
        for name, param in self.module.named_parameters():
            if param in ignored:
                if synced and param.is_meta and wraps_others(param):
                    return (
                        f"{name!r} is a {type(param).__name__} on the meta device, which wraps other tensors and would "
                        "not get the first rank's values. Build it with values on every rank."
                    )
                continue
            found = True
            if param in self._taken:
                continue
            if param in sharded:
                return f"{name!r} is sharded by another FSDP already. Wrap a module once, or wrap the FSDP around it."
            problem = None if param.is_meta and synced else unusable(param, repr(name))
            if problem is not None:
                return problem
        for name, buffer in self.module.named_buffers():
            if buffer.is_meta and not synced:
                return unusable(buffer, f"the buffer {name!r}")
        if not found:
            return "FSDP was given a module without parameters: there is nothing to shard."
        own = ((name, param) for name, param in self.module.named_parameters() if param not in self._left_out)
        return on_two_devices(own)

    def unquantisable(self, precision: MixedPrecision) -> str | None:
        """Why parameters or gradients cannot travel as they are asked to, in words for the user; None if they can."""
        own = [(repr(name), param) for name, param in self.module.named_parameters() if param not in self._left_out]
        return unquantisable(own, precision.param_wire, "param_wire") or unquantisable(
            own, precision.reduce_dtype, "reduce_dtype"
        )

    @property
    def modules(self) -> list[nn.Module]:
        """All but those in FSDPs inside, which these have set up."""
        inside = {module for one in self._inside.values() for module in one.modules()}
        return [module for module in self.module.modules() if module not in inside]

    def devices(self) -> list[torch.device]:
        """Where the parameters are that will be sharded, but for those that have no values yet."""
        found = {param.device: None for param in self.module.parameters() if param not in self._left_out}
        return [device for device in found if device.type != "meta"]

    def signature(self) -> list[str]:
        """What must be the same on every rank."""
        return [f"units {', '.join(self.units)}", *describe(self.module, without=self._taken)]

    def owned(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """The parameters of each unit, by its name, with the names that they have when FSDPs inside are gone."""
        found = params_by_unit(self.module, self.units, self._left_out)
        return {unit: [(self._plain(name), param) for name, param in named] for unit, named in found.items()}

    def _plain(self, name: str) -> str:
        for prefix in self._inside:
            if name.startswith(f"{prefix}.module."):
                return prefix + name.removeprefix(f"{prefix}.module")
        return name
