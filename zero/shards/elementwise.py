"""Which of torch's functions have the same result on a shard as on the full tensor, by their names."""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def in_place(name: str) -> bool:
    """Whether torch's function of this name writes into its first argument."""
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__int__", "__index__", "__invert__")
    return name.endswith("_")


# torch's names of functions that give each element by itself, without underscores and the prefix of those on lists.
ELEMENTWISE = _names(
    """
    abs absolute acos acosh add addcdiv addcmul alias amp_foreach_non_finite_check_and_unscale and angle arccos
    arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh atan atan2 atanh bfloat16 bitwise_and bitwise_not
    bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clip clone conj conj_physical constant contiguous copy
    copysign cos cosh cpu cuda deg2rad detach digamma div divide double empty_like eq erf erfc erfinv exp exp2 expm1
    fill float float_power floor floor_divide floordiv fmax fmin fmod frac frexp full_like ge gt half hypot iadd
    iand idiv ifloordiv ilshift imod imul int invert ior ipow irshift isfinite isinf isnan isneginf isposinf isub
    itruediv ixor ldexp le leaky_relu lerp lgamma log log10 log1p log2 logaddexp logical_and logical_not logical_or
    logical_xor logit long lt masked_fill maximum minimum mod mul multiply nan_to_num ne neg negative new_empty_like
    ones_like or pos positive pow radd rdiv reciprocal relu remainder rfloordiv rmod rmul round rpow rsqrt rsub
    rtruediv sgn sigmoid sign signbit silu sin sinc sinh sqrt square sub subtract tan tanh threshold to true_divide
    truediv trunc type type_as where xlogy xor zero zeros_like
    """
)

# Those that read no value, and are answered also while a module that reads the parameter runs.
SILENT = _names(
    """
    __delete__ __set__ can_cast get_device is_complex is_conj is_floating_point is_inference is_neg is_quantized
    is_signed is_sparse new_empty new_empty_strided new_full new_ones new_zeros register_hook
    register_post_accumulate_grad_hook requires_grad_ result_type retain_grad
    """
)

# Those that take the dtype and the device of another tensor, and no value.
LIKE_ANOTHER = {"to", "type_as"}

# Those that ask about the object: they are answered for the shard, and for the full tensor within a forward.
ABOUT = _names(
    """
    __dir__ __format__ __hash__ __repr__ _has_compatible_shallow_copy_type _is_view dim_order is_distributed
    is_inference is_pinned is_set_to is_shared storage_type
    """
)

# Methods and attributes of a tensor that return views of it.
VIEWING = _names(
    """
    T __getitem__ as_strided chunk diagonal expand expand_as flatten mT movedim narrow permute
    reshape reshape_as select split squeeze swapaxes t tensor_split transpose unbind unflatten unfold unsqueeze view
    view_as
    """
)

# Those by which programs tell tensors apart, or find which are tied.
TELLS_APART = {"data_ptr", "storage", "untyped_storage", "_typed_storage"}

# Functions and attributes that shape, strides and dtype answer.
OF_SHAPE = _names(
    """
    __len__ dim element_size is_contiguous nbytes ndim ndimension nelement numel shape size storage_offset stride
    """
)

# By which torch.amp.GradScaler looks for gradients that have overflowed: found by one rank, it counts on all.
FINITE_CHECK = "amp_foreach_non_finite_check_and_unscale"

# Attributes that are tensors, and which of them have each element by itself.
VIEWS, ELEMENTWISE_VIEWS = {"T", "mT", "H", "mH", "data", "real", "imag"}, {"data", "real", "imag"}

ABOUT_ATTRIBUTES = {"shape", "nbytes", "ndim"}
