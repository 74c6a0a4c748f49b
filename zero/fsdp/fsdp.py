"""Stage 3: parameters, too, live only with their owner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from zero.fsdp.schedule import Schedule
from zero.fsdp.unit import Unit
from zero.fsdp.wrap import Policy, params_by_unit, unit_modules
from zero.oss.comm import Comm
from zero.oss.flat import unusable
from zero.oss.partition import Partition, lay_out, partition_problem
from zero.sdp.buffers import BufferSync
from zero.sdp.sharded_ddp import describe


class FSDP(nn.Module):
    """Fully sharded data parallelism: parameters, gradients and optimizer state in parts, one a rank (ZeRO stage 3;
    Rajbhandari et al., 2020, section 5.3).

        model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    The module is divided into units. A unit's parameters are gathered before its forward and its backward, and released
    after. Parameters stay the objects they were, under their names, so an optimizer may be built before or after; at
    rest their data and gradient are this rank's part, with as many dimensions as the whole.

    module: stays usable as it is; its attributes can be read through this one.
    process_group: by default all ranks. Without torch.distributed, this process alone.
    auto_wrap_policy: which modules become units: a policy of torch.distributed.fsdp.wrap. By default the blocks that
        the model repeats in an nn.ModuleList.
    partition: "even" (also "auto") cuts inside parameters, for optimizers that treat each element by itself; "whole"
        keeps each parameter with one rank.
    reshard_after_forward: False keeps the parameters from forward to backward: less to send, more memory.
    sync_module_states: start from the parameters and buffers of rank 0.
    broadcast_buffers: before a forward, buffers are those of rank 0, as with DistributedDataParallel.

    Collective: the constructor, forward, backward, `state_dict`, `load_state_dict`, `summon_full_params`.
    Raises ValueError, on every rank, for what cannot be sharded or differs between ranks; RuntimeError, on every rank,
    where ranks run different units.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: torch.distributed.ProcessGroup | None = None,
        auto_wrap_policy: Policy = None,
        partition: Partition = "even",
        reshard_after_forward: bool = True,
        sync_module_states: bool = True,
        broadcast_buffers: bool = True,
    ) -> None:
        super().__init__()
        self.module = module
        self._comm = Comm(process_group)
        problem = partition_problem(partition) or _unusable(module)
        modules = {} if problem else unit_modules(module, auto_wrap_policy)
        told = [f"partition {partition}", f"units {', '.join(modules)}", *describe(module)]
        self._comm.compare("the models given to FSDP", told, problem)
        if sync_module_states:
            self._comm.broadcast([*module.parameters(), *module.buffers()])

        loads = [0] * self._comm.world
        self._units: list[Unit] = []
        for name, owned in params_by_unit(module, modules).items():
            groups = lay_out(
                [param for _, param in owned],
                [param_name for param_name, _ in owned],
                self._comm,
                cut="whole" if partition == "whole" else "even",
                loads=loads,
                own_part=True,
            )
            for group in groups:
                group.release()
            self._units.append(Unit(name, modules[name], groups))
        self._schedule = Schedule(self._units, self._comm, reshard_after_forward=reshard_after_forward)
        self._buffers_in_step = BufferSync(module, self._comm) if broadcast_buffers else None

    # --------------------------------------------------------------------------------------------- running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward. Collective."""
        if self._buffers_in_step is not None:
            self._buffers_in_step.before_forward()
        output = self.module(*args, **kwargs)
        if self._buffers_in_step is not None:
            self._buffers_in_step.after_forward(reduced=self._schedule.active)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here keep whole gradients on every rank, to be added to by later ones; nothing is reduced.

        The first backward outside sends them along. Forward and backward both belong in here. `param.grad` shows this
        rank's own share meanwhile; clearing it clears what is kept.
        """
        before, self._schedule.active = self._schedule.active, False
        try:
            yield
        finally:
            self._schedule.active = before

    @property
    def unit_bytes(self) -> int:
        """Bytes of the largest unit's parameters: what is whole at a time."""
        return max(sum(group.full.nbytes for group in unit.groups) for unit in self._units)

    # ---------------------------------------------------------------------------------------- whole weights

    @contextmanager
    def summon_full_params(self, writeback: bool = True) -> Iterator[None]:
        """Collective. In here all parameters are whole, on every rank.

        writeback: changes made in here stay, those of each part's owner; otherwise they are lost.
        """
        for unit in self._units:
            unit.unshard()
        try:
            yield
            if writeback:
                for unit in self._units:
                    for group in unit.groups:
                        group.keep()
        finally:
            for unit in self._units:
                unit.reshard()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Collective. Whole parameters and buffers under the module's own names, on every rank, as copies."""
        found = self.module.state_dict(*args, **{**kwargs, "keep_vars": True})
        whole: dict[nn.Parameter, Tensor] = {}
        for unit in self._units:
            was_whole = unit.whole
            unit.unshard()
            whole |= {param: param.detach().clone() for group in unit.groups for param in group.params}
            if not was_whole:
                unit.reshard()
        for key, value in found.items():
            if isinstance(value, nn.Parameter):
                found[key] = whole.get(value, value)
            elif isinstance(value, Tensor):
                found[key] = value.detach().clone()
        return found

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Collective. Takes whole weights under the module's own names; every rank must be given the same.

        Raises ValueError for assign=True, which would leave the optimizer with other tensors.
        """
        if assign:
            raise ValueError("assign=True replaces the parameters that are sharded. Load with assign=False.")
        with self.summon_full_params():
            return self.module.load_state_dict(state_dict, strict)

    # ------------------------------------------------------------------------------------------ the module

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "an FSDP cannot be copied or pickled: its parameters are spread over the ranks. Save full_state_dict(), or "
            "copy the module before wrapping it."
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def _unusable(module: nn.Module) -> str | None:
    if any(isinstance(inner, FSDP) for inner in module.modules()):
        return "the module contains an FSDP already. Wrap once, from the outside, and choose units by auto_wrap_policy."
    found = False
    for name, param in module.named_parameters():
        found = True
        problem = unusable(param, repr(name))
        if problem:
            return problem
    return None if found else "FSDP was given a module without parameters: there is nothing to shard."
