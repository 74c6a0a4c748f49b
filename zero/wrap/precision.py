"""The dtypes of storage, computing and transfers: what `precision=` means at every stage.

    shard             stored and stepped in the parameter's own dtype, float32 as a rule
    full parameter    computed with in param_dtype
    gradient          written by autograd in param_dtype; sent as reduce_dtype; summed, stored and stepped in float32
                      (GPUs of several hosts sum what they send in bfloat16 in bfloat16)

(P. Micikevicius et al., Mixed Precision Training, 2018, section 3.1. Here the shards are the master weights.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero._torch.modules import BATCH_NORM, OwnHook, buffers_of, classes_to_ignore, hooks_on_saving
from zero._torch.tensors import wraps_others
from zero.wrap.tensors import map_tensors

if TYPE_CHECKING:
    from typing import TypeAlias

    from torch.distributed import fsdp as torchs

    GivenPrecision: TypeAlias = (
        "Literal['fp32', 'bf16', 'fp16'] | torch.dtype | MixedPrecision | torchs.MixedPrecision"
        " | torchs.MixedPrecisionPolicy | None"
    )

DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""In which a model computes, by the names of precisions."""


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of a stage; None leaves a dtype as it is.

    param_dtype: the dtype in which parameters are computed with, and gradients are written. Stage 3 gathers them so;
        stages 1 and 2 store them so, beside master weights in the dtype that they had.
    reduce_dtype: the dtype in which gradients are sent, by default the one in which they were written. Sums are
        float32, and so are the averages that hybrid strategies send across replicas, but for GPUs of several hosts:
        there torch.bfloat16 means sums in bfloat16, as of FSDP2, and torch.float16 sends float32.
    buffer_dtype: the dtype to which floating-point buffers are cast once. Saved and loaded weights have the original.
    cast_forward_inputs: casts floating-point inputs of every unit to param_dtype.
    cast_root_forward_inputs: overrides cast_forward_inputs for the root unit, unless None.
    keep_fp32: classes of modules, such as torch.nn.LayerNorm, that compute in float32: their parameters are gathered in
        the dtype of the shards, their buffers are not cast, their inputs are cast to float32 and their outputs back to
        param_dtype. By default batch normalisation, whose running averages would stand still in 16 bits.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    keep_fp32: tuple[type[nn.Module], ...] = (BATCH_NORM,)
    cast_root_forward_inputs: bool | None = None

    def dtype_of(self, module: nn.Module) -> torch.dtype | None:
        """Returns the dtype in which the module's own parameters are computed with, None for that of the shards."""
        return None if isinstance(module, self.keep_fp32) else self.param_dtype

    def by_dtype(
        self, root: nn.Module, named: list[tuple[str, nn.Parameter]]
    ) -> dict[torch.dtype | None, list[tuple[str, nn.Parameter]]]:
        """Returns the named parameters of `root` by the dtype in which they are computed with; see `dtype_of`."""
        by_dtype: dict[torch.dtype | None, list[tuple[str, nn.Parameter]]] = {}
        for name, param in named:
            holder = root.get_submodule(name.rpartition(".")[0])
            by_dtype.setdefault(self.dtype_of(holder), []).append((name, param))
        return by_dtype

    def cast_inputs(self, module: nn.Module, inputs: Any, *, root: bool) -> Any:
        """Casts the inputs of a unit's module, if the options say so. root: whether the unit is the root."""
        casts = self.cast_forward_inputs
        if root and self.cast_root_forward_inputs is not None:
            casts = self.cast_root_forward_inputs
        return cast(inputs, self.dtype_of(module)) if casts else inputs

    def register_cast(self, module: nn.Module, *, root: bool) -> RemovableHandle:
        """Registers a hook that casts the inputs of a unit's module."""

        def cast_given(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return self.cast_inputs(module, (args, kwargs), root=root)

        return module.register_forward_pre_hook(cast_given, with_kwargs=True)

    def prepare(self, modules: Iterable[nn.Module]) -> list[RemovableHandle]:
        """Casts buffers, and registers hooks that cast inputs and outputs of modules kept in float32."""
        hooks: list[RemovableHandle] = []

        def to_float32(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            return cast(args, torch.float32), cast(kwargs, torch.float32)

        def back(_: nn.Module, args: Any, output: Any) -> Any:
            return cast(output, self.param_dtype)

        for module in modules:
            if isinstance(module, self.keep_fp32):
                if self.param_dtype is not None:
                    hooks.append(module.register_forward_pre_hook(to_float32, with_kwargs=True))
                    hooks.append(module.register_forward_hook(back))
            elif self.buffer_dtype is not None:
                for name, buffer in [*module.named_buffers(recurse=False)]:
                    if buffer.is_floating_point():
                        buffers_of(module)[name] = buffer.to(self.buffer_dtype)
                        hooks.append(module.register_state_dict_post_hook(Uncast(name, buffer.dtype)))
        return hooks


@dataclass
class Uncast(OwnHook):
    """A hook after a module's state_dict() that casts a buffer to its original dtype, except for keep_vars=True."""

    name: str
    dtype: torch.dtype

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        saved = state_dict.get(prefix + self.name)
        if isinstance(saved, Tensor) and saved is not buffers_of(module).get(self.name):
            state_dict[prefix + self.name] = saved.to(self.dtype)


def _casts(module: nn.Module) -> Iterator[tuple[dict[str, Tensor | None], str, torch.dtype]]:
    """The buffers inside of a module that are cast: the dictionaries that hold them, their names, original dtypes."""
    for one in module.modules():
        for hook in hooks_on_saving(one):
            if isinstance(hook, Uncast):
                yield buffers_of(one), hook.name, hook.dtype


def original_dtypes(module: nn.Module) -> dict[Tensor, torch.dtype]:
    """Those of buffers inside of a module that are cast."""
    return {buffer: dtype for of, name, dtype in _casts(module) if (buffer := of.get(name)) is not None}


def uncast(module: nn.Module) -> None:
    """Gives buffers inside of a module their original dtypes, before the hooks of `prepare` are removed."""
    for of, name, dtype in _casts(module):
        if (buffer := of.get(name)) is not None:
            of[name] = buffer.to(dtype)


def rounds(param: Tensor, dtype: torch.dtype) -> bool:
    """Whether stages 1 and 2 store a parameter in this dtype: not one that is quantised, and computed with as it is."""
    return param.is_floating_point() and param.itemsize > dtype.itemsize and not wraps_others(param)


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Returns the same structure with each floating-point tensor in the dtype."""
    if dtype is None:
        return value
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


def as_precision(given: Any) -> MixedPrecision:
    """What the user means by `precision=`. Raises ValueError for what is none."""
    if given is None or given is torch.float32:
        return MixedPrecision()
    if isinstance(given, MixedPrecision):
        return given
    if isinstance(given, str) and given in DTYPES:
        return MixedPrecision(DTYPES[given])
    if given in (torch.float16, torch.bfloat16):
        return MixedPrecision(given)
    found = None if isinstance(given, (str, torch.dtype)) else _of_torch(given)
    if found is None:
        near = get_close_matches(str(given), [*DTYPES], n=1, cutoff=0.5)
        remedy = f"Write precision={near[0]!r}." if near else f"Pass {', '.join(map(repr, DTYPES))}, a dtype,"
        raise ValueError(
            f"precision={given!r} is unknown. {remedy}"
            + ("" if near else " or a policy, such as zero.MixedPrecision(torch.bfloat16).")
        )
    return found


def _of_torch(given: Any) -> MixedPrecision | None:
    """Converts PyTorch's MixedPrecision and MixedPrecisionPolicy. Raises ValueError for options that zero lacks."""
    from torch.distributed import fsdp  # takes 0.7 s; whoever passes one of its classes has imported it

    if isinstance(given, fsdp.MixedPrecisionPolicy):  # of FSDP2, which does not except batch normalisation
        if given.output_dtype is not None:
            raise ValueError(
                f"MixedPrecisionPolicy(output_dtype={given.output_dtype}) is not available. Leave it out, and cast the "
                "output of forward."
            )
        if getattr(given, "param_dtype_override_fn", None) is not None:  # of torch 2.15
            raise ValueError(
                "MixedPrecisionPolicy(param_dtype_override_fn=...) is not available. Pass "
                "zero.MixedPrecision(keep_fp32=...) with the classes of modules that compute in float32."
            )
        cast_inputs = given.cast_forward_inputs
        return MixedPrecision(given.param_dtype, given.reduce_dtype, cast_forward_inputs=cast_inputs, keep_fp32=())
    if not isinstance(given, fsdp.MixedPrecision):
        return None
    if given.keep_low_precision_grads:
        raise ValueError(
            "MixedPrecision(keep_low_precision_grads=True) leaves gradients in 16 bits, but zero adds them up and "
            "steps them in the parameters' own dtype. Leave it out."
        )
    return MixedPrecision(
        given.param_dtype,
        given.reduce_dtype,
        given.buffer_dtype,
        cast_forward_inputs=given.cast_forward_inputs,
        cast_root_forward_inputs=given.cast_root_forward_inputs,
        keep_fp32=classes_to_ignore(given),
    )
