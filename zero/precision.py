"""One precision at every stage: a model computes in 16 bits, and what is added up over ranks and steps is float32.

    stage 0   torch.autocast around the forward
    stage 1   parameters of 16 bits, which are the rounded masters; float32 masters in shards; gradients are averaged in
    and 2     float32; inputs of the model and of its units are cast
    stage 3   units are gathered in 16 bits from float32 shards

Stages 1 to 3 cast in the same places: the inputs of what stage 3 makes units, and of modules that are kept in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from zero._torch.modules import parameters_of
from zero.comm import Comm
from zero.fsdp.choice import smallest_leaves, unit_modules
from zero.oss import OSS
from zero.sdp import ShardedDDP
from zero.tensor_parallel import parts
from zero.wrap.precision import MixedPrecision, rounds


def refuse_precision(policy: MixedPrecision, model: nn.Module, stage: object) -> None:
    """Raises ValueError for a precision that a model cannot have at a stage."""
    dtype = policy.param_dtype
    for name, param in model.named_parameters() if dtype is not None else ():
        if param.requires_grad and param.is_floating_point() and param.itemsize < 4:
            raise ValueError(
                f"precision={str(dtype).removeprefix('torch.')} keeps float32 masters of a float32 model, but {name!r} "
                f"is {param.dtype}. Load the model in float32, or call model.float()."
            )
    if stage in (1, 2) and dtype is not None and any(map(parts.takes, parameters_of(model))):
        raise ValueError(
            f"the model has DTensors, which stage {stage} cannot round. Take stage 3; or convert the model to 16 bits "
            "before it is parallelised, and build zero.OSS(params, precision='bf16') yourself."
        )


class Rounding:
    """How stages 1 and 2 round a model and cast the inputs of units inside of it.

    policy: a `param_dtype` of 16 bits, and what is kept in float32; without one nothing is rounded. auto_wrap_policy:
    chooses the units, as of FSDP. comm: the ranks.
    """

    def __init__(self, policy: MixedPrecision, model: nn.Module, auto_wrap_policy: Any, comm: Comm) -> None:
        self._policy, self._model, self._comm = policy, model, comm
        self._units, self.dtypes = dict[str, nn.Module](), dict[nn.Parameter, torch.dtype]()
        if policy.param_dtype is None:
            return
        leaves = smallest_leaves(None, beside=any(comm.link.overlaps(param.device) for param in parameters_of(model)))
        self._units = unit_modules(model, auto_wrap_policy, leaves_from=leaves)  # by the size that they have now
        for dtype, of_dtype in policy.by_dtype(model, [*model.named_parameters()]).items():
            if dtype is not None:
                self.dtypes |= {param: dtype for _, param in of_dtype if rounds(param, dtype)}

    def start_alike(self) -> None:
        """Collective. All ranks start from the first one's values, before these are rounded."""
        if self._policy.param_dtype is not None:
            self._comm.broadcast([*parameters_of(self._model), *self._model.buffers()])

    def wrap(self, kind: type[ShardedDDP] | None, optimizers: Sequence[OSS], **options: Any) -> nn.Module:
        """Collective. The model in a wrapper of stage 1 or 2, whose optimizers were given `dtypes`. kind: None for the
        model without a wrapper."""
        trained = [
            name for name, param in self._model.named_parameters() if param.requires_grad and param in self.dtypes
        ]
        if kind is not None and trained and not optimizers:
            raise ValueError(
                f"a model was prepared in 16 bits without its optimizer: the float32 masters of {trained[0]!r} would "
                "start from rounded weights. Prepare both in one call; or freeze what is not trained."
            )
        # Frozen parameters that the optimizers do not have, with their dtypes before.
        rest = {param: param.dtype for param in self.dtypes if not any(param in one.shards for one in optimizers)}
        for param in rest:
            param.data = param.data.to(self.dtypes[param])
        if kind is None:
            wrapped, casts = self._model, self._policy.prepare(self._model.modules())
        else:
            made = kind(self._model, optimizers, precision=self._policy, **options)
            made.rounded |= rest
            wrapped, casts = made, made.casts
        for module in self._units.values():
            if kind is None or module is not self._model:  # wrappers cast the inputs of the model
                casts.append(self._policy.register_cast(module, root=module is self._model))
        return wrapped


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
