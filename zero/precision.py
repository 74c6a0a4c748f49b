"""One precision at every stage: a model computes in 16 bits, and what is added up over ranks and steps is float32.

    stage 0   torch.autocast around the forward
    stage 1   parameters of 16 bits, which are the rounded masters; float32 masters in shards; gradients are averaged in
    and 2     float32; inputs of the model and of its units are cast
    stage 3   MixedPrecision(param_dtype): units are gathered in 16 bits from float32 shards

Stages 1 to 3 cast in the same places: the inputs of what stage 3 makes units, and of modules that are kept in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any
from weakref import finalize

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zero._torch.modules import parameters_of
from zero._torch.tensors import wraps_others
from zero.comm import Comm
from zero.fsdp.precision import DTYPES, MixedPrecision
from zero.fsdp.units import smallest_leaves, unit_modules
from zero.oss import OSS
from zero.tensor_parallel import parts


def precision_problem(precision: object, model: nn.Module, stage: object, beside: Sequence[str]) -> str | None:
    """Returns an error message for a precision that a model cannot have at a stage, else None. beside: the names of
    other options that say in which dtypes it trains."""
    if not isinstance(precision, str) or precision not in DTYPES:
        names = [str(name) for name in DTYPES]
        near = [
            name for name, dtype in zip(names, DTYPES.values(), strict=True) if (dtype or torch.float32) == precision
        ]
        near = near or get_close_matches(str(precision), names, n=1, cutoff=0.5)
        if isinstance(precision, MixedPrecision):
            return f"precision={precision!r} is no name. At stage 3 pass it as mixed_precision=."
        asked = f"Write precision={near[0]!r}." if near else f"Choose {', '.join(map(repr, names))}."
        return f"precision={precision!r} is unknown. {asked}"
    if beside:
        return f"precision={precision!r} and {beside[0]} both say in which dtypes the model trains. Pass one of them."
    for name, param in model.named_parameters():
        if param.requires_grad and param.is_floating_point() and param.itemsize < 4:
            return (
                f"precision={precision!r} keeps float32 masters of a float32 model, but {name!r} is {param.dtype}. "
                "Load the model in float32, or call model.float(); or pass master_dtype=torch.float32 at stages 1 and "
                "2."
            )
    if stage in (1, 2) and DTYPES[precision] and any(map(parts.takes, parameters_of(model))):
        return (
            f"the model has DTensors, which precision={precision!r} cannot round at stage {stage}. Take stage 3; or "
            "convert the model to 16 bits before it is parallelised, and pass master_dtype=torch.float32."
        )
    return None


class Rounding:
    """How stages 1 and 2 round a model and cast its inputs.

    policy: a `param_dtype` of 16 bits, and what is kept in float32. auto_wrap_policy: chooses the units, as of FSDP.
    comm: the ranks.
    """

    def __init__(self, policy: MixedPrecision, model: nn.Module, auto_wrap_policy: Any, comm: Comm) -> None:
        self._policy, self._model, self._comm = policy, model, comm
        leaves = smallest_leaves(None, beside=any(comm.link.overlaps(param.device) for param in parameters_of(model)))
        self._units = unit_modules(model, auto_wrap_policy, leaves_from=leaves)  # by the size that they have now
        named = [*model.named_parameters()]
        self.dtypes: dict[nn.Parameter, torch.dtype] = {
            param: dtype
            for dtype, of_dtype in policy.by_dtype(model, named).items()
            for _, param in of_dtype
            if dtype is not None and param.is_floating_point() and param.itemsize > dtype.itemsize
            if not wraps_others(param)  # quantised, and computed with as it is
        }

    def start_alike(self) -> None:
        """Collective. All ranks start from the first one's values, before these are rounded."""
        self._comm.broadcast([*parameters_of(self._model), *self._model.buffers()])

    def round_rest(self, optimizers: Sequence[OSS]) -> None:
        """Rounds the frozen parameters that the optimizers do not have."""
        for param, dtype in self.dtypes.items():
            if not any(param in one.shards for one in optimizers):
                param.data = param.data.to(dtype)

    def cast_inputs(self, wrapper: nn.Module) -> None:
        """Registers hooks that cast inputs, for as long as the wrapper exists."""
        _, hooks = self._policy.prepare(self._model.modules())
        for module in self._units.values():
            cast = partial(_cast, self._policy, module is self._model)
            hooks.append(module.register_forward_pre_hook(cast, with_kwargs=True))
        if wrapper is not self._model:
            finalize(wrapper, _remove, hooks)


def _cast(policy: MixedPrecision, root: bool, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return policy.cast_inputs(module, (args, kwargs), root=root)


def _remove(hooks: Sequence[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def compute_under_autocast(module: nn.Module, dtype: torch.dtype) -> None:
    """Runs each forward of the module under torch.autocast."""
    device, entered = next(parameters_of(module)).device.type, list[torch.autocast]()

    def enter(*_: Any) -> None:
        entered.append(torch.autocast(device, dtype))
        entered[-1].__enter__()

    def leave(*_: Any) -> None:
        if entered:  # a hook before `enter` may have raised
            entered.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)
