"""DistributedDataParallel, as users build it beside an OSS: its instances in this process, and the modules that none
may wrap.

torch calls a hook when a module becomes a submodule. The constructor of DistributedDataParallel registers its module
before it communicates, so all ranks can still refuse there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from zero._torch.modules import averaged_by, join_mark, parameters_of
from zero.shards.cut import held, take_over

_alive: WeakSet[DistributedDataParallel] = WeakSet()

# By instance: the names of the parameters that were frozen when it was built, whose gradients it does not average.
_frozen: WeakKeyDictionary[DistributedDataParallel, dict[nn.Parameter, str]] = WeakKeyDictionary()

NO_GRADIENT = (
    "OSS found no gradient. If backward was called, the model has other parameters than OSS: load weights with "
    "assign=False, and build OSS after replacing any."
)


def refuse_joined(params: Mapping[nn.Parameter, object]) -> None:
    """Raises RuntimeError after torch's Join of what averages any of the parameters: ranks whose data has ended would
    not step their shards. torch does not take its mark away when a Join ends."""
    if any(join_mark(ddp).enable and _averages(ddp, params) for ddp in _alive):
        raise RuntimeError(
            "DistributedDataParallel was put into torch's Join: ranks whose data has ended would not step what "
            "they own. In place of `with ddp.join():` write `for batch, weight in zero.join(batches, ddp):`, and "
            "multiply the loss by the weight. If that Join was of another optimizer and has ended, wrap the "
            "module again."
        )


def refuse_replaced(params: Mapping[nn.Parameter, object]) -> None:
    """Raises RuntimeError if a module had some of the parameters when it was put into a DistributedDataParallel,
    and has none now."""
    own = params.keys()
    for ddp in _alive:
        if not own.isdisjoint(averaged_by(ddp)) and own.isdisjoint(parameters_of(ddp)):
            raise RuntimeError(NO_GRADIENT)


def refuse_unfrozen(params: Mapping[nn.Parameter, object]) -> None:
    """Raises RuntimeError if any of the parameters has a gradient of a backward that the DistributedDataParallel
    of its module does not average: it was frozen when that was built."""
    for frozen in _frozen.values():
        for param, name in frozen.items():
            if param.grad is not None and param.requires_grad and param in params:
                raise RuntimeError(
                    f"{name} was frozen when DistributedDataParallel wrapped the model, which does not average its "
                    "gradient. Wrap the model again, with the same optimizer: DistributedDataParallel(zero.unwrap("
                    "model)); ShardedDDP and FSDP need not be."
                )


def _averages(ddp: DistributedDataParallel, params: Mapping[nn.Parameter, object]) -> bool:
    """Whether it averages gradients of any of the parameters."""
    return not params.keys().isdisjoint(_averaged(ddp))


def _averaged(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    return [param for name, param in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore]


def refuse_ddp_within(module: nn.Module, ignored: Collection[nn.Parameter] = ()) -> None:
    """Raises ValueError for a module that contains a DistributedDataParallel, except of ignored parameters."""
    for name, one in module.named_modules():
        if isinstance(one, DistributedDataParallel) and not {*_averaged(one)} <= {*ignored}:
            which = f"{name!r} is" if name else "the module is"
            raise ValueError(
                f"{which} a DistributedDataParallel, which averages gradients of full parameters by itself. Wrap "
                "its .module instead, which zero.unwrap(model) returns."
            )


def _registered(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """Raises RuntimeError if DistributedDataParallel is about to wrap what is sharded."""
    if not isinstance(module, DistributedDataParallel) or name != "module" or submodule is None:
        return
    inside, left = {*submodule.modules()}, list[nn.Parameter]()
    for named, param in submodule.named_parameters():
        owner = None if named in module.parameters_to_ignore else held(param).averaged_by()
        if owner is not None and (not isinstance(owner, nn.Module) or (owner in inside and param.requires_grad)):
            raise RuntimeError(f"DistributedDataParallel wraps {named!r}, {held(param).why}")
        if owner is not None and owner not in inside:
            left.append(param)
    take_over(left)
    _alive.add(module)
    for before in _frozen.values():  # of an earlier one, which may still exist
        for param in parameters_of(submodule):
            before.pop(param, None)
    _frozen[module] = {
        param: name
        for name, param in submodule.named_parameters()
        if not param.requires_grad and name not in module.parameters_to_ignore
    }


register_module_module_registration_hook(_registered)
