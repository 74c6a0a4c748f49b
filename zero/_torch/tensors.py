"""Tensors: lists of them, without memory, of classes that wrap others, in nested containers, and read from files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor  # the class of tensors without values
from torch.utils import _python_dispatch

# For nests of tuples, lists, dicts and other containers that torch knows. They have no public names (torch 2.13).
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_iter as tree_iter
from torch.utils._pytree import tree_map as tree_map
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T", bound=Tensor)

# What operators raise that cannot run on tensors without values.
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


class _WithoutValues(FakeTensorMode):
    """Its operators take two thirds of the time of torch's: most of that went into the keys of torch's cache."""

    def _prep_args_for_hash(self, result: list[object], args: Any, *more: Any) -> None:
        """Adds to the key what the result depends on: all that has a number or name by itself, what torch takes of a
        tensor at once, and the rest as torch does."""
        if not isinstance(args, (tuple, list)):
            super()._prep_args_for_hash(result, args, *more)
            return
        result += type(args), len(args)
        for arg in args:
            is_own = isinstance(arg, FakeTensor) and arg.fake_mode is self and arg.constant is None
            if type(arg) in _HASHED:
                result += type(arg), arg
            elif is_own and arg.layout == torch.strided:
                place = arg.shape, arg.stride(), arg.storage_offset(), arg.untyped_storage().nbytes()
                flags = arg.requires_grad, arg.is_conj(), arg.is_neg(), arg.is_inference()
                result.append((arg.dtype, arg.fake_device, place, flags))
            else:
                super()._prep_args_for_hash(result, (arg,), *more)


_HASHED = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


def without_values() -> FakeTensorMode:
    """In this context new tensors have shapes but no memory, on any device. torch's class has no public name."""
    return _WithoutValues(allow_non_fake_inputs=True)


# The contexts, inside of such a one, in which new tensors have memory, and in which deep copies of models have none.
with_values, copying_without_values = unset_fake_temporarily, FakeCopyMode


def has_values(tensor: Tensor) -> bool:
    """Whether the tensor has memory, and not only a shape, as in `without_values`."""
    return not isinstance(tensor, FakeTensor)


class Rebound(FakeTensor):
    """Whose device is that of the data that it was given last, as of a tensor with memory."""

    made_on: torch.device

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, data: Tensor) -> None:
        device, storage = data.device, data.untyped_storage()
        if device != self.made_on:  # torch refuses a tensor of the meta device for one of the CPU
            place = data.storage_offset(), data.shape, data.stride()
            data = torch.empty(0, dtype=data.dtype, device=self.made_on).set_(storage, *place)
        Tensor.data.__set__(self, data)  # type: ignore[attr-defined]
        self.fake_device = device


def let_move(param: Tensor) -> None:
    """Has the data of a tensor without values be set to data on another device. torch leaves the device of a FakeTensor
    what it was."""
    made_on = param.device
    param.__class__ = Rebound
    param.made_on = made_on  # type: ignore[attr-defined]


# Returns a context in which torch takes tensors of classes of one's own for plain ones.
as_plain_tensors: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass


def part_of(flat: Tensor, shape: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """A tensor on some of the memory of a flat one, which autograd does not know as a view: `detach_()` refuses views.
    One without values is a view."""
    if not has_values(flat):
        return flat.as_strided(shape, stride, offset)
    return flat.new_empty(0).set_(flat.untyped_storage(), offset, shape, stride)


def foreach(method: str, *lists: Sequence[Any]) -> None:
    """Calls a method of each tensor of a list with what others have in its place, in a few kernels however many."""
    if all(map(has_values, lists[0])):
        getattr(torch, f"_foreach_{method}")(*map(list, lists))  # as torch's own optimizers do
    else:  # these operators would allocate copies that a real device does not need
        for tensor, *others in zip(*lists, strict=True):
            getattr(tensor, method)(*others)


# The norm of each of a list, in a few kernels however many it has.
norms_of = torch._foreach_norm

# Whether a tensor is of a class that wraps other tensors (DTensor, quantised), and whether that is such a class.
wraps_others: Callable[[object], bool] = _python_dispatch.is_traceable_wrapper_subclass
is_wrapping_class: Callable[[type], bool] = _python_dispatch.is_traceable_wrapper_subclass_type


def wrapped_in(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold a tensor's bytes: those that it wraps, and that these wrap; the tensor itself otherwise."""
    if not wraps_others(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [each for name in names for each in wrapped_in(getattr(tensor, name))]


# Whether two tensors lie in one storage. Nothing public tells of tensors without memory, or of sparse ones.
shares_memory: Callable[[Tensor, Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]


def with_local(tensor: Tensor, local: Tensor) -> None:
    """Gives a DTensor another local tensor. DTensor.from_local would make another object."""
    tensor._local_tensor = local  # type: ignore[attr-defined]


def is_of_ddp(param: Tensor) -> bool:
    """Whether DistributedDataParallel(device_mesh=) has made a parameter of a DTensor. Nothing public tells."""
    return hasattr(param, "_st_info")


def has_hooks(param: Tensor) -> bool:
    """Whether a parameter has hooks on its gradient. There are public methods to register them, none to list them."""
    return bool(param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None))


def call_last(hooks: Mapping[Tensor, RemovableHandle]) -> None:
    """Has hooks on accumulated gradients, by parameter, be called after others there."""
    for param, hook in hooks.items():
        there: Any = getattr(param, "_post_accumulate_grad_hooks", None)
        if there is not None and len(there) > 1 and hook.id in there:
            there[hook.id] = there.pop(hook.id)  # not move_to_end: torch reads what is below an OrderedDict, its dict


def as_dispatching(own: Tensor, cls: type[T]) -> T:
    """The same memory as a tensor of a class whose __torch_dispatch__ torch asks: not as_subclass, for which it asks
    none, and not an exchange of classes."""
    made: T = Tensor._make_subclass(cls, own)
    return made


class WithoutMemory(Tensor):
    """Tensors of classes of one's own, which have a shape and no memory."""

    @classmethod
    def like(cls, like: Tensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Self:
        """One with the shape of a tensor, and by default its dtype and device."""
        made: Self = Tensor._make_wrapper_subclass(
            cls, like.shape, like.stride(), dtype=dtype or like.dtype, device=device or like.device
        )
        return made
