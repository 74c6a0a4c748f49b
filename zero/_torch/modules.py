"""Modules: their children, buffers and hooks, torch's wrap policies, and what DistributedDataParallel and Join keep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.join import Joinable
from torch.nn.modules import module as everywhere
from torch.nn.parallel import DistributedDataParallel


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The module's own dictionary of its children, to be read and written."""
    # named_children() leaves out children that are None or occur twice, and setattr may run code of the user's class.
    children: dict[str, nn.Module | None] = vars(module)["_modules"]  # past __getattr__, which may ask for it
    return children


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own dictionary of its buffers, to be read and written."""
    # register_buffer() would need to know whether a buffer is saved, and setattr may run code of the user's class.
    return module._buffers


def params_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own dictionary of parameters, to be written; register_parameter takes no tensor with a graph."""
    return module._parameters


def parameters_of(root: nn.Module, *, recurse: bool = True) -> Iterator[nn.Parameter]:
    """All parameters of the module, each once, also where the user's class has a parameters() that leaves some out,
    takes no arguments or makes groups."""
    return (param for _, param in nn.Module.named_parameters(root, recurse=recurse))


def params_of_each(root: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of all modules of `root`; one that several modules hold is there several times."""
    return (param for module in modules_of(root) for param in module._parameters.values() if param is not None)


def modules_of(root: nn.Module) -> Iterator[nn.Module]:
    """The module and all inside, each once, in the same order on every rank."""
    # root.modules() also makes names of them, which takes five times as long: too long for each step.
    found, left = {root}, [root]
    while left:
        module = left.pop()
        yield module
        inside = [one for one in dict.fromkeys(children_of(module).values()) if one is not None and one not in found]
        found.update(inside)
        left += reversed(inside)


_registered = 0


def registrations() -> int:
    """How many modules and parameters torch has registered in modules of this process since this was first asked."""
    if not _registered:
        _count()
        everywhere.register_module_module_registration_hook(_count)
        everywhere.register_module_parameter_registration_hook(_count)
    return _registered


def _count(*_: Any) -> None:
    global _registered
    _registered += 1


def saved_of(module: nn.Module) -> dict[str, Tensor]:
    """The module's own parameters and persistent buffers, by the names that state_dict() gives them."""
    buffers = ((name, one) for name, one in module._buffers.items() if name not in module._non_persistent_buffers_set)
    return {name: one for name, one in (*module._parameters.items(), *buffers) if one is not None}


def saves_by_itself(module: nn.Module) -> bool:
    """Whether the user's class or hooks save more than its parameters and buffers, or in another way."""
    names = ("state_dict", "_save_to_state_dict", "get_extra_state")
    own = any(getattr(type(module), name) is not getattr(nn.Module, name) for name in names)
    hooks = (*module._state_dict_pre_hooks.values(), *module._state_dict_hooks.values())
    return own or not all(isinstance(hook, OwnHook) for hook in hooks)


def hooks_on_saving(module: nn.Module) -> list[Any]:
    """The module's own hooks after its state_dict()."""
    return [*module._state_dict_hooks.values()]


def loads_by_itself(module: nn.Module) -> bool:
    """Whether the user's class or hooks load it in another way than by copying into parameters and buffers. torch's own
    classes convert files of earlier versions, and copy."""
    kind = type(module)
    hooks = (*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values())
    own = kind._load_from_state_dict is not nn.Module._load_from_state_dict and not kind.__module__.startswith("torch.")
    return own or not all(isinstance(getattr(hook, "hook", hook), OwnHook) for hook in hooks)


def forward_hooks_of(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """The module's own dictionaries of hooks before and after its forward, to be read and written."""
    return module._forward_pre_hooks, module._forward_hooks


def chosen_by_policy(policy: object, root: nn.Module) -> set[nn.Module] | None:
    """The modules that a policy object of torch.distributed.fsdp.wrap chooses; None if `policy` is no such object."""
    run = getattr(policy, "_run_policy", None)  # which has no public name
    return None if run is None else set(run(root, set(), {}))


# The class of all batch normalisation, lazy and synchronised too. Only its subclasses have public names.
BATCH_NORM: type[nn.Module] = nn.modules.batchnorm._BatchNorm


def classes_to_ignore(precision: Any) -> tuple[type[nn.Module], ...]:
    """The classes that torch.distributed.fsdp.MixedPrecision leaves in float32. Users set this field, but its name is
    private."""
    return tuple(precision._module_classes_to_ignore)


# Returns a module in a wrapper that keeps its inputs and recomputes the rest in backward, under the module's own names.
# PyTorch's FSDP is used with this wrapper, which is in a private module. torch.utils.checkpoint is for functions.
recomputed_in_backward = checkpoint_wrapper


def join_mark(joinable: Joinable) -> Any:
    """How a Join last marked the object: `enable`, whether it may end early; `is_first_joinable`. Stays afterwards."""
    return joinable._join_config


def averaged_by(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    """The parameters whose gradients DistributedDataParallel averages: those of its module when it was built."""
    return list(ddp._module_parameters)


class OwnHook:
    """A hook on the state_dict() of a module or an optimizer that changes no value but as that itself would: not the
    user's."""
