"""The DistributedDataParallel instances of this process, and the modules that none may wrap.

torch calls a hook when a module becomes a submodule. The constructor of DistributedDataParallel registers its module
before it communicates, so all ranks can still refuse there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from zero._torch import averaged_by, join_mark
from zero.comm import Comm
from zero.shards.refusals import Wrapping, refusals

_alive: WeakSet[DistributedDataParallel] = WeakSet()
_refusals: list[Callable[[nn.Module, Collection[str]], str | None]] = []


def refuse_within_ddp(refusal: Callable[[nn.Module, Collection[str]], str | None]) -> None:
    """Makes every later constructor of DistributedDataParallel call `refusal` first.

    refusal: called with the module and the names of the parameters that DistributedDataParallel ignores. Returns an
        error message, which the constructor raises as RuntimeError, or None.
    """
    _refusals.append(refusal)


def joining(params: Collection[nn.Parameter]) -> list[DistributedDataParallel]:
    """The instances that average gradients of any of these parameters and that torch marks as inside of a Join."""
    return [ddp for ddp in _alive if join_mark(ddp).enable and any(param in params for param in _averaged(ddp))]


def replaced(params: Collection[nn.Parameter]) -> bool:
    """Whether a module had some of the parameters when it was put into a DistributedDataParallel, and has none now."""
    return any(
        any(param in params for param in averaged_by(ddp)) and not any(param in params for param in ddp.parameters())
        for ddp in _alive
    )


def evaluated(closure: Callable[[], Any], params: Collection[nn.Parameter], comm: Comm) -> Any:
    """Returns the result of a step's closure. An error of DistributedDataParallel's, which names connections and times,
    gets a note with what this rank waited for (Python 3.11)."""
    with torch.enable_grad():
        try:
            return closure()
        except RuntimeError as error:
            if hasattr(error, "add_note") and any(param in params for ddp in _alive for param in _averaged(ddp)):
                error.add_note(
                    f"Rank {comm.rank} was in the closure of a step of OSS. If the error is of DistributedDataParallel "
                    f"having waited for others, one of the group of {comm.world} has stopped or did not come to this "
                    "backward. Look for the first error of any rank."
                )
            raise


def _ddp_within(wrapping: Wrapping) -> str | None:
    """The error message for a module that contains a DistributedDataParallel; None if it contains none. It may have
    parameters that are ignored."""
    left_out = {*wrapping.ignored}
    for name, one in wrapping.module.named_modules():
        if isinstance(one, DistributedDataParallel) and any(param not in left_out for param in _averaged(one)):
            which = f"{name!r} is" if name else "the module is"
            return (
                f"{which} a DistributedDataParallel, which averages gradients of full parameters by itself. Wrap "
                "its .module instead."
            )
    return None


def _averaged(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    return [param for name, param in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore]


def _registered(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    if not isinstance(module, DistributedDataParallel) or name != "module" or submodule is None:
        return
    for refusal in _refusals:
        problem = refusal(submodule, module.parameters_to_ignore)
        if problem is not None:
            raise RuntimeError(problem)
    _alive.add(module)


register_module_module_registration_hook(_registered)


refusals.append(_ddp_within)
