"""Which dtype is stored, computed with and sent.

    part      what is stored and stepped: the parameter's own dtype, float32 as a rule
    whole     what is gathered and computed with: param_dtype
    gradient  what autograd writes: param_dtype; travels as reduce_dtype; added up, stored and stepped as float32

(P. Micikevicius et al., Mixed Precision Training, 2018, section 3.1: float32 masters; here the parts are the masters.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zero._torch import buffers_of
from zero.sdp.tensors import map_tensors


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes of an FSDP; None leaves a dtype as it is.

    param_dtype: parameters are gathered and computed with in it; gradients are written in it.
    reduce_dtype: gradients travel in it, by default as they were written. Sums are float32 all the same.
    buffer_dtype: floating-point buffers are cast to it once.
    cast_forward_inputs: cast floating-point inputs of every unit to param_dtype.
    keep_fp32: classes of modules, such as torch.nn.LayerNorm, that compute in float32: their parameters are gathered as
        they are stored, their inputs are cast to float32 and their outputs back to param_dtype.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    keep_fp32: tuple[type[nn.Module], ...] = ()

    def dtype_of(self, module: nn.Module) -> torch.dtype | None:
        """What the module's own parameters are computed with, if not as they are stored."""
        return None if isinstance(module, self.keep_fp32) else self.param_dtype

    def apart(
        self, root: nn.Module, named: list[tuple[str, nn.Parameter]]
    ) -> dict[torch.dtype | None, list[tuple[str, nn.Parameter]]]:
        """Parameters of `root` with their names, by what they are computed with, as `dtype_of` says."""
        by_dtype: dict[torch.dtype | None, list[tuple[str, nn.Parameter]]] = {}
        for name, param in named:
            holder = root.get_submodule(name.rpartition(".")[0])
            by_dtype.setdefault(self.dtype_of(holder), []).append((name, param))
        return by_dtype

    def cast_inputs(self, module: nn.Module, inputs: Any) -> Any:
        return cast(inputs, self.dtype_of(module)) if self.cast_forward_inputs else inputs

    def prepare(self, root: nn.Module) -> None:
        """Casts buffers, and has the modules that are kept in float32 cast what they take and return."""
        for module in root.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if self.buffer_dtype is not None and buffer.is_floating_point():
                    buffers_of(module)[name] = buffer.to(self.buffer_dtype)
            if self.param_dtype is not None and isinstance(module, self.keep_fp32):
                module.register_forward_pre_hook(_cast_arguments, with_kwargs=True)
                module.register_forward_hook(_cast_output(self.param_dtype))


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """The same structure with each floating-point tensor in the dtype."""
    if dtype is None:
        return value
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


def _cast_arguments(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return cast(args, torch.float32), cast(kwargs, torch.float32)


def _cast_output(dtype: torch.dtype) -> Callable[[nn.Module, Any, Any], Any]:
    def cast_output(_: nn.Module, args: Any, output: Any) -> Any:
        return cast(output, dtype)

    return cast_output
