"""Which dtype is stored, computed with and sent.

    shard      what is stored and stepped: the parameter's own dtype, float32 as a rule
    full     what is gathered and computed with: param_dtype; travels as param_wire
    gradient  what autograd writes: param_dtype; travels as reduce_dtype; added up, stored and stepped as float32

(P. Micikevicius et al., Mixed Precision Training, 2018, section 3.1: float32 masters; here the shards are the masters.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero._torch import BATCH_NORM, buffers_of, classes_to_ignore
from zero.comm import Int8
from zero.sdp.tensors import map_tensors


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes of an FSDP; None leaves a dtype as it is.

    param_dtype: parameters are gathered and computed with in it; gradients are written in it.
    reduce_dtype: gradients travel in it, by default as they were written. Sums are float32 all the same. Also
        zero.Int8(); what hybrid strategies average across replicas travels as float32 then, as with all dtypes.
    buffer_dtype: floating-point buffers are cast to it once. Saved and loaded weights have their own.
    cast_forward_inputs: cast floating-point inputs of every unit to param_dtype.
    cast_root_forward_inputs: the same of the root unit, instead of what cast_forward_inputs says, unless None.
    keep_fp32: classes of modules, such as torch.nn.LayerNorm, that compute in float32: their parameters are gathered as
        they are stored, their buffers stay, their inputs are cast to float32 and their outputs back to param_dtype. By
        default those of batch normalisation, whose averages would stand still in 16 bits.
    param_wire: zero.Int8(): parameters are quantised as they are gathered. All ranks, the owner of a shard too, compute
        with what has arrived; the shards keep their precision, and so do full weights that are asked for or saved.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | Int8 | None = None
    buffer_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    keep_fp32: tuple[type[nn.Module], ...] = (BATCH_NORM,)
    cast_root_forward_inputs: bool | None = None
    param_wire: Int8 | None = None

    def __post_init__(self) -> None:
        if self.param_wire is not None and not isinstance(self.param_wire, Int8):
            raise ValueError(
                f"MixedPrecision(param_wire={self.param_wire!r}): choose zero.Int8() or None. param_dtype is the "
                "other dtype that parameters can travel in; they are computed with in it, too."
            )
        for option in ("param_dtype", "buffer_dtype"):
            if isinstance(getattr(self, option), Int8):
                raise ValueError(
                    f"MixedPrecision({option}={getattr(self, option)}): nothing is computed with in Int8, which is for "
                    "what travels: param_wire and reduce_dtype."
                )

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

    def cast_inputs(self, module: nn.Module, inputs: Any, *, root: bool) -> Any:
        """Those of a unit's module. root: whether the unit is the root."""
        due = self.cast_forward_inputs
        if root and self.cast_root_forward_inputs is not None:
            due = self.cast_root_forward_inputs
        return cast(inputs, self.dtype_of(module)) if due else inputs

    def buffers_to_cast(self, modules: Iterable[nn.Module]) -> Iterator[CastBuffer]:
        """The buffers of these modules, each by itself, that are computed with in `buffer_dtype`."""
        for module in modules:
            if self.buffer_dtype is not None and not isinstance(module, self.keep_fp32):
                for name, buffer in module.named_buffers(recurse=False):
                    if buffer.is_floating_point():
                        yield CastBuffer(module, name, buffer.dtype)

    def prepare(self, modules: Iterable[nn.Module]) -> tuple[list[CastBuffer], list[RemovableHandle]]:
        """Casts buffers, and has the modules that are kept in float32 cast what they take and return, by hooks."""
        modules = [*modules]
        found, hooks = [*self.buffers_to_cast(modules)], []
        for one in found:
            buffers_of(one.module)[one.name] = one.tensor.to(self.buffer_dtype)
            hooks.append(one.module.register_state_dict_post_hook(Uncast(one.name, one.dtype)))
        for module in modules:
            if self.param_dtype is not None and isinstance(module, self.keep_fp32):
                hooks.append(module.register_forward_pre_hook(_cast_arguments, with_kwargs=True))
                hooks.append(module.register_forward_hook(_cast_output(self.param_dtype)))
        return found, hooks


class CastBuffer(NamedTuple):
    """A buffer that is cast, and the dtype that it had."""

    module: nn.Module
    name: str
    dtype: torch.dtype

    @property
    def tensor(self) -> Tensor:
        return self.module.get_buffer(self.name)


@dataclass
class Uncast:
    """Called after the state_dict() of a module: gives a buffer in its own dtype, but for keep_vars=True."""

    name: str
    dtype: torch.dtype

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        saved = state_dict.get(prefix + self.name)
        if isinstance(saved, Tensor) and saved is not buffers_of(module).get(self.name):
            state_dict[prefix + self.name] = saved.to(self.dtype)


def as_precision(given: Any) -> MixedPrecision:
    """Takes PyTorch's MixedPrecision and MixedPrecisionPolicy too.

    Raises ValueError for what is none, and for what zero does not do.
    """
    if given is None:
        return MixedPrecision()
    if isinstance(given, MixedPrecision):
        return given
    from torch.distributed import fsdp  # takes 0.7 s, and has been imported where it is needed

    if isinstance(given, fsdp.MixedPrecisionPolicy):
        return _of_policy(given)
    if not isinstance(given, fsdp.MixedPrecision):
        raise ValueError(
            f"mixed_precision={given!r}: pass a zero.MixedPrecision, such as zero.MixedPrecision(param_dtype="
            "torch.bfloat16), torch.distributed.fsdp.MixedPrecision or MixedPrecisionPolicy, or None."
        )
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


def _of_policy(given: Any) -> MixedPrecision:
    """FSDP2's MixedPrecisionPolicy, which makes no exception of batch normalisation."""
    if given.output_dtype is not None:
        raise ValueError(
            f"MixedPrecisionPolicy(output_dtype={given.output_dtype}) is not available: leave it out, and cast what "
            "forward returns."
        )
    return MixedPrecision(
        given.param_dtype, given.reduce_dtype, cast_forward_inputs=given.cast_forward_inputs, keep_fp32=()
    )


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
