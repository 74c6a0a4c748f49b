"""DistributedDataParallel: its instances in this process, the modules that none may wrap, and gradient averaging for
ranks of one host that can read one another's memory.

torch calls a hook when a module becomes a submodule. The constructor of DistributedDataParallel registers its module
before it communicates, so all ranks can still refuse there.

To average by `Comm.all_reduce` over host memory, where each rank reads its share from all others, takes a fraction of
the CPU time of Gloo's all-reduce, which copies every byte through the kernel twice.
"""

# No `from __future__ import annotations`: DistributedDataParallel compares the annotations of its hooks with types.

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, proxy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from zero._torch.modules import averaged_by, join_mark, parameters_of
from zero.comm import Comm
from zero.shards.claimed import claimed
from zero.wrap.refused import refuse_sparse

_alive: WeakSet[DistributedDataParallel] = WeakSet()

# By instance: the names of the parameters that were frozen when it was built, whose gradients it does not average.
_frozen: WeakKeyDictionary[DistributedDataParallel, dict[nn.Parameter, str]] = WeakKeyDictionary()

NO_GRADIENT = (
    "OSS found no gradient. If backward was called, the model has other parameters than OSS: load weights with "
    "assign=False, and build OSS after replacing any."
)


def joined_problem(params: Mapping[nn.Parameter, object]) -> str | None:
    """Returns an error message after torch's Join of what averages any of the parameters: ranks whose data has ended
    would not step their shards. torch does not take its mark away when a Join ends."""
    if any(join_mark(ddp).enable and _averages(ddp, params) for ddp in _alive):
        return (
            "DistributedDataParallel was put into torch's Join: ranks whose data has ended would not step what "
            "they own. In place of `with ddp.join():` write `for batch, weight in zero.join(batches, ddp):`, and "
            "multiply the loss by the weight. If that Join was of another optimizer and has ended, wrap the "
            "module again."
        )
    return None


def replaced_problem(params: Mapping[nn.Parameter, object]) -> str | None:
    """Returns an error message if a module had some of the parameters when it was put into a DistributedDataParallel,
    and has none now."""
    own = params.keys()
    for ddp in _alive:
        if not own.isdisjoint(averaged_by(ddp)) and own.isdisjoint(parameters_of(ddp)):
            return NO_GRADIENT
    return None


def unfrozen_problem(params: Mapping[nn.Parameter, object]) -> str | None:
    """Returns an error message if any of the parameters has a gradient of a backward that the DistributedDataParallel
    of its module does not average: it was frozen when that was built."""
    for frozen in _frozen.values():
        for param, name in frozen.items():
            if param.grad is not None and param.requires_grad and param in params:
                return (
                    f"{name} was frozen when DistributedDataParallel wrapped the model, which does not average its "
                    "gradient. Wrap the model again, with the same optimizer: DistributedDataParallel(zero.unwrap("
                    "model)); ShardedDDP and FSDP need not be."
                )
    return None


def averaged_by_others(ddp: DistributedDataParallel | None) -> set[nn.Parameter]:
    """The parameters of which another DistributedDataParallel averages gradients."""
    return {param for one in _alive if one is not ddp for param in _averaged(one)}


def _averages(ddp: DistributedDataParallel, params: Mapping[nn.Parameter, object]) -> bool:
    """Whether it averages gradients of any of the parameters."""
    return not params.keys().isdisjoint(_averaged(ddp))


def _averaged(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    return [param for name, param in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore]


def ddp_within(module: nn.Module, ignored: Collection[nn.Parameter] = ()) -> str | None:
    """The error message for a module that contains a DistributedDataParallel, except of ignored parameters."""
    for name, one in module.named_modules():
        if isinstance(one, DistributedDataParallel) and not {*_averaged(one)} <= {*ignored}:
            which = f"{name!r} is" if name else "the module is"
            return (
                f"{which} a DistributedDataParallel, which averages gradients of full parameters by itself. Wrap "
                "its .module instead, which zero.unwrap(model) returns."
            )
    return None


def _registered(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """Raises RuntimeError if DistributedDataParallel is about to wrap what is sharded."""
    if not isinstance(module, DistributedDataParallel) or name != "module" or submodule is None:
        return
    inside = {*submodule.modules()}
    for named, param in submodule.named_parameters():
        found = None if named in module.parameters_to_ignore else claimed(param)
        if found is None:
            continue
        owner, why = found
        if not isinstance(owner, nn.Module) or (owner in inside and param.requires_grad):
            raise RuntimeError(f"DistributedDataParallel wraps {named!r}, {why}")
    _alive.add(module)
    for before in _frozen.values():  # of an earlier one, which may still exist
        for param in parameters_of(submodule):
            before.pop(param, None)
    _frozen[module] = {
        param: name
        for name, param in submodule.named_parameters()
        if not param.requires_grad and name not in module.parameters_to_ignore
    }


def average_by_reading(model: DistributedDataParallel, comm: Comm) -> None:
    """Collective. Registers a communication hook that averages by reading, if the ranks can read one another.

    On two ranks the results are the same bit for bit.
    """
    if not comm.reads(next(parameters_of(model)).device):
        return
    channel, module = comm.channel("the averaging of DistributedDataParallel"), proxy(model.module)

    def average(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        if buffer.is_sparse:
            names = {param: name for name, param in module.named_parameters()}
            refuse_sparse(", ".join(names[param] for param in bucket.parameters()))
        comm.all_reduce(buffer, times=1 / comm.world, channel=channel)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    model.register_comm_hook(None, average)


def average_in_float32(
    model: DistributedDataParallel, comm: Comm, keep: Sequence[Callable[[Any, Tensor], object]]
) -> None:
    """Registers a communication hook that averages gradients of 16 bits in float32. DistributedDataParallel rounds the
    averages to the parameters' dtype; `keep` are called with each parameter and its average before that."""

    def average(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer, params, first = bucket.buffer(), bucket.parameters(), bucket.buffer().storage_offset()
        wide = buffer.float()
        # In the order that each parameter has in memory: so DistributedDataParallel lays gradients out, of which
        # bucket.gradients() are views row by row.
        starts = [of.storage_offset() - first for of in bucket.gradients()]
        places = zip(params, starts, strict=True)
        views = [wide.as_strided(param.shape, param.stride(), start) for param, start in places]
        bucket.set_buffer(wide)

        def rounded(_: Any) -> Tensor:
            if wide is not buffer:
                buffer.copy_(wide)
                for param, view in zip(params, views, strict=True):
                    for one in keep:
                        one(param, view)
            return buffer

        return allreduce_hook(comm.group, bucket).then(rounded)  # type: ignore[arg-type]

    model.register_comm_hook(None, average)


register_module_module_registration_hook(_registered)
