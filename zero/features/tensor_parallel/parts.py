"""The local tensors of DTensors, which are sharded in place of these."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero._torch import has_hooks, is_of_ddp, params_of, with_local
from zero.comm import Comm
from zero.features.tensor_parallel import table
from zero.features.tensor_parallel.shown import hide_everywhere, show_everywhere
from zero.features.tensor_parallel.states import remove_hooks, state_hooks
from zero.shards.parts import Parts

_REMEDY = "leave it out (ignored_parameters at stage 3)"


class TensorParallel(Parts):
    """See Parts. A part is the local tensor of a DTensor."""

    def takes(self, param: Tensor) -> bool:
        return table.is_dtensor(param)

    def problem(self, named: Iterable[tuple[str, Any]], comms: Sequence[Comm]) -> str | None:
        ranks = [table.ranks_of(comm) for comm in comms]
        meshes: dict[Any, str] = {}
        for name, param in named:
            if is_of_ddp(param):
                return (
                    f"{name!r} is the local tensor of a DTensor, as DistributedDataParallel(device_mesh=) makes it. "
                    "Call zero.setup(model, optim, stage=1, device_mesh=mesh['dp']) with the model as it was."
                )
            dtensor = param if table.is_dtensor(param) else table.dtensor_of(param)
            if dtensor is None:
                continue
            problem = _problem(name, dtensor, ranks)
            if problem is not None:
                return problem
            meshes.setdefault(dtensor.device_mesh, name)
            if len(meshes) > 1:
                (one, first), (other, second) = [*meshes.items()]
                return (
                    f"{first!r} is a DTensor over {one}, and {second!r} over {other}. zero shards models that are "
                    "parallelised over one mesh: pass the same DeviceMesh to parallelize_module everywhere."
                )
        return None

    def of(self, param: Any) -> Any:
        return table.made_plain(param) if table.is_dtensor(param) else param

    def put_into(self, module: nn.Module, without: Collection[nn.Parameter] = ()) -> None:
        replaced, left_out = set(), {*without}
        for holder in module.modules():
            own = {name: param for name, param in params_of(holder).items() if param not in left_out}
            found = {name: param for name, param in own.items() if table.is_dtensor(param)}
            for name, param in found.items():
                params_of(holder)[name] = self.of(param)
            replaced |= {*found.values()}
            if found:
                state_hooks(holder)
        for param in replaced:
            assert param is not None
            param.grad = None
            with_local(param, torch.empty(0, dtype=param.dtype, device=param.device))

    def take_out_of(self, module: nn.Module) -> None:
        hide_everywhere(module)
        own: dict[nn.Parameter, Any] = {}
        for holder in module.modules():
            for name, param in params_of(holder).items():
                dtensor = None if param is None else table.dtensor_of(param)
                if dtensor is not None and param is not None:
                    params_of(holder)[name], own[param] = dtensor, dtensor  # type: ignore[assignment]
            remove_hooks(holder)
        for param, dtensor in own.items():
            with_local(dtensor, param.detach())
            dtensor.requires_grad_(param.requires_grad)
            table.forget(param)

    def show(self, module: nn.Module) -> None:
        show_everywhere(module)

    def others(self, param: nn.Parameter) -> Comm | None:
        dtensor = table.dtensor_of(param)
        return table.comm_of(dtensor) if dtensor is not None and table.is_cut(dtensor) else None

    def slice_of(self, param: nn.Parameter) -> tuple[Sequence[int], int, int, int] | None:
        dtensor = table.dtensor_of(param)
        if dtensor is None or not table.is_cut(dtensor):
            return None
        comm, dim = table.comm_of(dtensor), dtensor.placements[0].dim % dtensor.ndim  # type: ignore[attr-defined]
        return dtensor.shape, dim, -(-dtensor.shape[dim] // comm.world), comm.rank  # as torch.chunk

    def whole(self, param: Tensor, value: Tensor) -> Tensor:
        if table.is_dtensor(value):
            return value.full_tensor()  # type: ignore[attr-defined, no-any-return]
        dtensor = table.dtensor_of(param)
        if dtensor is None:
            return value
        return table.like(dtensor, value.detach()).full_tensor()

    def cut(self, param: Tensor, value: Tensor) -> Tensor:
        dtensor = table.dtensor_of(param)
        if dtensor is None:
            return value
        from torch.distributed.tensor import distribute_tensor

        if table.is_dtensor(value):
            value = value.full_tensor()  # type: ignore[attr-defined]
        if value.shape != dtensor.shape:
            raise ValueError(f"has the shape {list(value.shape)}, but the whole tensor has {list(dtensor.shape)}")
        # Without a rank to send from each rank cuts its own.
        return distribute_tensor(value, dtensor.device_mesh, dtensor.placements, src_data_rank=None).to_local()

    def numel(self, param: Tensor, numel: int) -> int:
        dtensor = table.dtensor_of(param)
        return numel if dtensor is None else dtensor.numel()

    def ranks(self, params: Iterable[Tensor]) -> Comm | None:
        found = (table.dtensor_of(param) for param in params)
        return next((table.comm_of(one) for one in found if one is not None), None)


def _problem(name: str, param: Any, ranks: Sequence[set[int]]) -> str | None:
    """Returns an error message if a DTensor cannot be sharded over these ranks, else None."""
    from torch.distributed.tensor import Replicate, Shard

    mesh, placements = param.device_mesh, param.placements
    at = f"{name!r} is a DTensor with placements {placements} over {mesh}"
    if mesh.ndim != 1:
        return f"{at}. zero shards DTensors over one dimension of a mesh: parallelise over mesh['tp'], or {_REMEDY}."
    if type(placements[0]) not in (Shard, Replicate):
        return f"{at}. zero shards DTensors that are Shard or Replicate. Redistribute it, or {_REMEDY}."
    over = {*mesh.mesh.flatten().tolist()}
    if any(len(over & group) > 1 for group in ranks):
        return (
            f"{at}, over ranks that are to shard the model as well: another library (FSDP2) has sharded it already. "
            "Undo that, or give zero another dimension of the mesh than the model is parallelised over, by "
            "FSDP(device_mesh=mesh['dp']) or OSS(group=mesh['dp'].get_group())."
        )
    if param.is_meta:
        return f"{at}, on the meta device. Give the model memory and values first: to_empty(), and initialise it."
    if has_hooks(param):
        return f"{at}, with hooks on its gradient. Register hooks after wrapping."
    return None
