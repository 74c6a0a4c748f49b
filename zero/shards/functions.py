"""What torch's functions ask of a sharded tensor between steps: one table, by their names."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from functools import cache
from typing import Any


class Kind(Enum):
    """How a function is answered; GATHERED where the table has none."""

    SILENT = auto()
    """It reads no value, and is answered also while a module that reads the parameter runs."""
    LIKE_ANOTHER = auto()
    """It takes dtype and device of another tensor, and of that no value."""
    SHAPE = auto()
    """Shape, strides and dtype of the full tensor answer it."""
    IDENTITY = auto()
    """By it programs tell tensors apart, or find which are tied."""
    OBJECT = auto()
    """It asks about the object: of the shard, and within a forward of the full tensor."""
    ELEMENTWISE = auto()
    """It gives each element by itself: of this rank's elements."""
    ALIAS = auto()
    """An attribute that does so, on the same memory."""
    NORM = auto()
    """It gives the norm of a tensor, or of each of a list."""
    NUMBER = auto()
    """It gives a number, if it is given tensors alone: ranks compute it of their elements together."""
    DRAWN = auto()
    """It draws numbers in the shape of a tensor."""
    NEVER = auto()
    """It would change what the gathered copy lies in."""
    GATHERED = auto()
    """All else: of a copy that is gathered for the call."""


_NAMES = {
    Kind.SILENT: """
        __delete__ __set__ can_cast get_device is_complex is_conj is_floating_point is_inference is_neg
        is_quantized is_signed is_sparse new_empty new_empty_strided new_full new_ones new_zeros register_hook
        register_post_accumulate_grad_hook requires_grad_ result_type retain_grad
    """,
    Kind.LIKE_ANOTHER: "to type_as",
    Kind.SHAPE: """
        __len__ dim element_size is_contiguous nbytes ndim ndimension nelement numel shape size storage_offset
        stride
    """,
    Kind.IDENTITY: "data_ptr storage untyped_storage _typed_storage",
    Kind.OBJECT: """
        __dir__ __format__ __hash__ __repr__ _has_compatible_shallow_copy_type _is_view dim_order
        is_distributed is_inference is_pinned is_set_to is_shared storage_type
    """,
    Kind.ALIAS: "data real imag",
    Kind.NORM: "norm vector_norm linalg_vector_norm linalg_norm _foreach_norm",
    Kind.NEVER: "resize_ resize_as_ share_memory_ pin_memory module_load __dlpack__ to_dlpack",
    Kind.GATHERED: "T mT H mH",  # attributes that read values
}
"""By the names that torch has for them."""

_WORDS = {
    Kind.ELEMENTWISE: """
        abs absolute acos acosh add addcdiv addcmul alias amp_foreach_non_finite_check_and_unscale and angle
        arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh atan atan2 atanh bfloat16 bitwise_and
        bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clip clone conj conj_physical
        constant contiguous copy copysign cos cosh cpu cuda deg2rad detach digamma div divide double
        empty_like eq erf erfc erfinv exp exp2 expm1 fill float float_power floor floor_divide floordiv fmax
        fmin fmod frac frexp full_like ge gt half hypot iadd iand idiv ifloordiv ilshift imod imul int invert
        ior ipow irshift isfinite isinf isnan isneginf isposinf isub itruediv ixor ldexp le leaky_relu lerp
        lgamma log log10 log1p log2 logaddexp logical_and logical_not logical_or logical_xor logit long lt
        masked_fill maximum minimum mod mul multiply nan_to_num ne neg negative new_empty_like ones_like or
        pos positive pow radd rdiv reciprocal relu remainder rfloordiv rmod rmul round rpow rsqrt rsub
        rtruediv sgn sigmoid sign signbit silu sin sinc sinh sqrt square sub subtract tan tanh threshold to
        true_divide truediv trunc type type_as where xlogy xor zero zeros_like
    """,
    Kind.NUMBER: "sum mean max amax min amin any all count_nonzero dot vdot equal",
    Kind.DRAWN: "rand_like randn_like randint_like",
}
"""By torch's names without underscores and the prefix of those on lists."""

_KIND = {name: kind for names in (_WORDS, _NAMES) for kind, listed in names.items() for name in listed.split()}


@cache
def kind_of(func: Callable[..., Any]) -> tuple[str, str, Kind]:
    """The name of a function or an attribute, that without underscores and the prefix of those on lists, and its
    kind."""
    name = getattr(func, "__name__", "")
    unknown = Kind.GATHERED
    if name == "__get__":  # of the descriptor of an attribute, which alone has the name
        name, unknown = getattr(getattr(func, "__self__", None), "__name__", ""), Kind.SILENT
    word = name.removeprefix("_foreach_").strip("_")
    return name, word, _KIND.get(name) or _KIND.get(word, unknown)


def in_place(name: str) -> bool:
    """Whether torch's function of this name writes into its first argument."""
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__int__", "__index__", "__invert__")
    return name.endswith("_")


FINITE_CHECK = "amp_foreach_non_finite_check_and_unscale"
"""By which torch.amp.GradScaler looks for gradients that have overflowed: found by one rank, it counts on all."""

VIEWING = {
    *("T", "__getitem__", "as_strided", "chunk", "diagonal", "expand", "expand_as", "flatten", "mT"),
    *("movedim", "narrow", "permute", "reshape", "reshape_as", "select", "split", "squeeze", "swapaxes"),
    *("t", "tensor_split", "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as"),
}
"""Methods and attributes of a tensor that return views of it."""
