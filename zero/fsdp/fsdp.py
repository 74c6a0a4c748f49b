"""Stage 3: parameters, too, live only with their owner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from zero.fsdp.guard import Guard
from zero.fsdp.precision import MixedPrecision
from zero.fsdp.schedule import Schedule
from zero.fsdp.unit import Unit
from zero.fsdp.wrap import Policy, params_by_unit, unit_modules
from zero.oss import norm
from zero.oss.comm import Comm
from zero.oss.flat import FlatGroup, unusable
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
    mixed_precision: which dtypes are computed with and sent; parts keep the parameters' own.
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
        mixed_precision: MixedPrecision | None = None,
        sync_module_states: bool = True,
        broadcast_buffers: bool = True,
    ) -> None:
        super().__init__()
        self.module = module
        self._comm = Comm(process_group)
        problem = partition_problem(partition) or _unusable(module)
        modules = {} if problem else unit_modules(module, auto_wrap_policy)
        mixed_precision = mixed_precision or MixedPrecision()
        told = [f"partition {partition}, {mixed_precision}", f"units {', '.join(modules)}", *describe(module)]
        self._comm.compare("the models given to FSDP", told, problem)
        if sync_module_states:
            self._comm.broadcast([*module.parameters(), *module.buffers()])

        mixed_precision.prepare(module)
        loads = [0] * self._comm.world
        self._units = [
            Unit(
                name,
                modules[name],
                _lay_out_unit(module, owned, self._comm, partition, mixed_precision, loads),
                sent_as=mixed_precision.reduce_dtype,
            )
            for name, owned in params_by_unit(module, modules).items()
        ]
        self._schedule = Schedule(
            self._units, self._comm, reshard_after_forward=reshard_after_forward, precision=mixed_precision
        )
        self._buffers_in_step = BufferSync(module, self._comm) if broadcast_buffers else None
        self._guard = Guard(self._units)

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

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Collective. Scales all gradients so that their norm, as one vector over all ranks, is at most max_norm.

        Returns the norm before, 0-dim, the same on every rank. norm_type: 1, 2, any p > 0, or inf. To be called instead
        of torch.nn.utils.clip_grad_norm_, which sees this rank's parts only.
        """
        params = [param for unit in self._units for group in unit.groups for param in group.params]
        parts = [param.grad for param in params if param.grad is not None]
        total = norm.total_norm(parts, self._comm, float(norm_type), params[0].device)
        norm.clip(parts, total, float(max_norm))
        return total

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
        groups = [group for unit in self._units for group in unit.groups]
        for unit in self._units:
            unit.reshard()  # what a forward without backward may have left whole
        for group in groups:
            group.summon()
        keep = False
        try:
            yield
            keep = writeback
        finally:
            for group in groups:
                group.dismiss(keep=keep)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Collective. Whole parameters and buffers under the module's own names, on every rank, as copies."""
        found = self.module.state_dict(*args, **{**kwargs, "keep_vars": True})
        whole: dict[nn.Parameter, Tensor] = {}
        for unit in self._units:
            unit.reshard()
            for group in unit.groups:
                group.summon()
                whole |= {param: param.detach().clone() for param in group.params}
                group.dismiss(keep=False)
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


def _lay_out_unit(
    root: nn.Module,
    owned: list[tuple[str, nn.Parameter]],
    comm: Comm,
    partition: Partition,
    precision: MixedPrecision,
    loads: list[int],
) -> list[FlatGroup]:
    """A unit's parameters in flat groups of their own parts, those apart that are computed with in another dtype."""
    by_dtype: dict[torch.dtype | None, list[tuple[str, nn.Parameter]]] = {}
    for name, param in owned:
        holder = root.get_submodule(name.rpartition(".")[0])
        by_dtype.setdefault(precision.dtype_of(holder), []).append((name, param))
    return [
        group
        for dtype, named in by_dtype.items()
        for group in lay_out(
            [param for _, param in named],
            [name for name, _ in named],
            comm,
            cut="whole" if partition == "whole" else "even",
            loads=loads,
            own_part=True,
            compute_dtype=dtype,
        )
    ]


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
