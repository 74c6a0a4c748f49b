"""Parameters that are this rank's part of a larger tensor, whose other parts ranks outside of the shard group have.

The stages shard, reduce and step a plain parameter in place of the user's DTensor: its local tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from zero._torch.tensors import has_hooks, is_of_ddp
from zero.comm import Comm
from zero.tensor_parallel import table

_REMEDY = "leave it out (ignored_parameters at stage 3)"

takes = table.is_dtensor
"""Whether a tensor is a DTensor, of which the local tensor is sharded."""


def refuse_unfit(named: Iterable[tuple[str, Any]], comms: Sequence[Comm]) -> None:
    """Raises ValueError if DTensors among the parameters cannot be sharded over these ranks."""
    groups = [{0} if one.group is None else {*dist.get_process_group_ranks(one.group)} for one in comms]
    meshes: dict[Any, str] = {}
    for name, given in named:
        if is_of_ddp(given):
            raise ValueError(
                f"{name!r} is the local tensor of a DTensor, as DistributedDataParallel(device_mesh=) makes it. "
                "Call zero.setup(model, optimizer, stage=1, device_mesh=mesh['dp']) with the model as it was."
            )
        param: Any = given if takes(given) else table.dtensor_of(given)
        if param is None:
            continue
        from torch.distributed.tensor import Replicate, Shard

        mesh, placements = param.device_mesh, param.placements
        at = f"{name!r} is a DTensor with placements {placements} over {mesh}"
        if mesh.ndim != 1:
            raise ValueError(
                f"{at}. zero shards DTensors over one dimension of a mesh: parallelise over mesh['tp'], or {_REMEDY}."
            )
        if type(placements[0]) not in (Shard, Replicate):
            raise ValueError(f"{at}. zero shards DTensors that are Shard or Replicate. Redistribute it, or {_REMEDY}.")
        over = {*mesh.mesh.flatten().tolist()}
        if any(len(over & group) > 1 for group in groups):
            raise ValueError(
                f"{at}, over ranks that are to shard the model as well: another library (FSDP2) has sharded it "
                "already. Undo that, or give zero another dimension of the mesh than the model is parallelised over, "
                "by FSDP(device_mesh=mesh['dp']) or OSS(process_group=mesh['dp'].get_group())."
            )
        if param.is_meta:
            raise ValueError(
                f"{at}, on the meta device. Give the model memory and values first: to_empty(), and initialise it."
            )
        if has_hooks(param):
            raise ValueError(f"{at}, with hooks on its gradient. Register hooks after wrapping.")
        meshes.setdefault(mesh, name)
        if len(meshes) > 1:
            (one, first), (other, second) = [*meshes.items()]
            raise ValueError(
                f"{first!r} is a DTensor over {one}, and {second!r} over {other}. zero shards models that are "
                "parallelised over one mesh: pass the same DeviceMesh to parallelize_module everywhere."
            )


def of(param: Any) -> Any:
    """The plain parameter that is sharded in place of one of the user's, made if there is none: by default that one."""
    return table.made_plain(param) if takes(param) else param


def others(param: nn.Parameter) -> Comm | None:
    """The ranks that have the other elements of a parameter's whole tensor; None if the part has all."""
    dtensor = table.dtensor_of(param) if table.made else None
    return table.comm_of(dtensor) if dtensor is not None and table.is_cut(dtensor) else None


def others_of(params: Iterable[nn.Parameter]) -> list[Comm]:
    """The ranks that have other elements of the tensors that these parameters are parts of, each group once."""
    return [comm for comm in dict.fromkeys(map(others, params)) if comm is not None]


def slice_of(param: nn.Parameter) -> tuple[Sequence[int], int, int, int] | None:
    """Of a part: the whole tensor's shape, the dimension that is cut, the length of slices, and this one's number."""
    dtensor = table.dtensor_of(param)
    if dtensor is None or not table.is_cut(dtensor):
        return None
    comm, dim = table.comm_of(dtensor), dtensor.placements[0].dim % dtensor.ndim  # type: ignore[attr-defined]
    return dtensor.shape, dim, -(-dtensor.shape[dim] // comm.world), comm.rank  # as torch.chunk


def whole(param: Tensor, value: Tensor) -> Tensor:
    """Collective among the ranks that have the parts. The whole tensor of which `value` is this rank's part."""
    if takes(value):
        return value.full_tensor()  # type: ignore[attr-defined, no-any-return]
    dtensor = table.dtensor_of(param)
    if dtensor is None:
        return value
    return table.like(dtensor, value.detach()).full_tensor()


def cut(param: Tensor, value: Tensor) -> Tensor:
    """This rank's part of a whole tensor. Raises ValueError for another shape."""
    dtensor = table.dtensor_of(param)
    if dtensor is None:
        return value
    from torch.distributed.tensor import distribute_tensor

    if takes(value):
        value = value.full_tensor()  # type: ignore[attr-defined]
    if value.shape != dtensor.shape:
        raise ValueError(f"has the shape {list(value.shape)}, but the whole tensor has {list(dtensor.shape)}")
    # Without a rank to send from each rank cuts its own.
    return distribute_tensor(value, dtensor.device_mesh, dtensor.placements, src_data_rank=None).to_local()


def shape(param: Tensor, shape: Sequence[int]) -> Sequence[int]:
    """The shape of the whole tensor. shape: that of the part."""
    dtensor = table.dtensor_of(param)
    return shape if dtensor is None else dtensor.shape


def ranks(params: Iterable[Tensor]) -> Comm | None:
    """The ranks that have the parts, of which the first keeps what is brought together; None without parts."""
    found = (table.dtensor_of(param) for param in params)
    return next((table.comm_of(one) for one in found if one is not None), None)


def is_first(params: Iterable[Tensor]) -> bool:
    """Whether this one of the ranks that have the parts keeps what is brought together on one rank."""
    comm = ranks(params)
    return comm is None or comm.rank == 0
