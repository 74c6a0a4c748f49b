"""What is checked before an optimizer steps parameters of FSDP. OSS has its own checks in zero/oss/checks.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer

from zero._torch.modules import parameters_of, params_of_each
from zero.fsdp.model import Model
from zero.fsdp.optimizer_state import refuse_other_state
from zero.fsdp.unit import Need
from zero.measure.built import around, finding_of_built
from zero.measure.kinds import Finding, Kind, title
from zero.measure.param_groups import SHARD_MARK
from zero.shards.bound import refuse_moved
from zero.shards.partition import refuse_optimizer
from zero.shards.sharded_parameter import GRADIENT


@dataclass(frozen=True)
class _Measured:
    """What an optimizer was found to need, when it had so many groups.

    tensorwise: the parameters that must not be cut, with the name of the optimizer that needs them so, and why.
    """

    groups: int
    tensorwise: dict[nn.Parameter, tuple[str, Finding]]


class StepChecks:
    """Checks the steps of optimizers that hold parameters of one model."""

    def __init__(self, model: Model) -> None:
        self.model, self._index = model, model.index
        self._module_params = {*parameters_of(model.module)}
        self._findings: WeakKeyDictionary[Optimizer, _Measured] = WeakKeyDictionary()

    def refuse(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        """Raises RuntimeError for what is wrong on this rank."""
        found = self._measured(optimizer)
        units = [unit for unit in self._index.units if Need.SUMMONED not in unit.needed_by]
        refuse_moved(group.bound for unit in units for group in unit.groups)
        self._refuse_new_parameters()
        if any(SHARD_MARK in group for group in optimizer.param_groups):
            refuse_other_state(self.model, optimizer)
        self._refuse_gradients(optimizer, params, found.tensorwise)

    def _measured(self, optimizer: Optimizer) -> _Measured:
        """Measures an optimizer at its first step, and again if the number of its groups has changed."""
        found = self._findings.get(optimizer)
        if found is None or found.groups != len(optimizer.param_groups):
            found = self._findings[optimizer] = self._measure(optimizer)
        return found

    def _measure(self, optimizer: Optimizer) -> _Measured:
        """Measures the optimizer, and optimizers around it that step by it (SAM)."""
        each = (*around(optimizer), optimizer) if self.model.comm.world > 1 else ()
        findings = {title(type(one)): finding_of_built(one) for one in each}
        for name, finding in findings.items():
            if finding.kind is not Kind.TENSORWISE:  # refused only if a parameter with a gradient is cut
                try:
                    refuse_optimizer(name, finding, self.model.partition, of="FSDP")
                except ValueError as error:
                    raise RuntimeError(str(error)) from None
        return _Measured(
            groups=len(optimizer.param_groups),
            tensorwise=self._tensorwise(each) if Kind.TENSORWISE in {one.kind for one in findings.values()} else {},
        )

    def _tensorwise(self, each: Sequence[Optimizer]) -> dict[nn.Parameter, tuple[str, Finding]]:
        """Group by group: an optimizer may treat some as Muon does, and others as AdamW."""
        found = {}
        for one in each:
            for group in one.param_groups:
                finding = finding_of_built(one, group)
                if finding.kind is Kind.TENSORWISE:
                    found.update(dict.fromkeys(group["params"], (title(type(one)), finding)))
        return found

    def _refuse_new_parameters(self) -> None:
        module, known = self.model.module, self._module_params
        new = {param for param in params_of_each(module) if param not in known and param.grad is not None}
        for name, param in module.named_parameters() if new else ():
            if param in new:
                if any(param is ignored for module in self.model.ignored for ignored in parameters_of(module)):
                    continue
                raise RuntimeError(
                    f"{name!r} is in no unit of FSDP: it was replaced (by load_state_dict with assign=True, say) or "
                    "added since the model was wrapped, and FSDP does not average its gradient. Change the model "
                    "first, then wrap it; or list its module in ignored_modules, and average its gradient yourself."
                )

    def _refuse_gradients(
        self,
        optimizer: Optimizer,
        params: Sequence[nn.Parameter],
        tensorwise: dict[nn.Parameter, tuple[str, Finding]],
    ) -> None:
        stepped = [param for param in params if GRADIENT.__get__(param) is not None]
        kind, held = type(optimizer).__name__, {*stepped}
        for unit in self._index.units_of(stepped):
            if Need.SUMMONED in unit.needed_by or Need.BACKWARD in unit.needed_by:
                name = next(self._index[param].name for param in stepped if param in unit.params)
                raise RuntimeError(
                    f"{name!r} is unsharded, not this rank's shard, while {kind}.step() is called: backward is not "
                    "complete, or this is inside summon_full_params(). Step after backward, outside it."
                )
            for name in filter(None, [bucket.name_of_unreduced(held) for bucket in unit.buckets]):
                raise RuntimeError(
                    f"{name!r} has a gradient that was not reduced: the last backward ran under no_sync(). Run the "
                    "last backward before step() outside it."
                )
        for param in stepped:
            group, index = self._index[param]
            name, own, full_shape = group.bound.names[index], group.shard_views[index], group.shapes.full[index]
            needs_whole = tensorwise.get(param)
            if needs_whole is not None and group.layout.numels[index] != own.numel() != 0:
                raise RuntimeError(
                    f"{needs_whole[0]} needs each parameter whole, but {name!r} is cut between ranks: "
                    f"{needs_whole[1].reason}. Wrap the model with FSDP(partition='whole')."
                )
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, Tensor) and value.dim() and value.shape == full_shape != own.shape:
                    raise RuntimeError(
                        f"the state {key!r} of {name!r} has the shape of the full parameter, {list(full_shape)}, but "
                        f"this rank steps a shard of shape {list(own.shape)}. It was made before wrapping, or loaded "
                        "full: wrap before the first step, and load full state by "
                        "zero.load_full_optimizer_state_dict(model, optimizer, state)."
                    )
