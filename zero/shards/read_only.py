"""Copies of what is sharded, which refuse to be written: a write would not reach the shards."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zero._torch.autograd import writes_so_far
from zero._torch.tensors import as_plain_tensors, shares_memory


class ReadOnly(Tensor):
    """A copy in which a write raises: under DistributedDataParallel it would reach the model. `told`: what it raises.

    What is computed from it, and what is pickled or copied, is plain; views of it are read-only, too. Found by torch's
    counts of writes, and by no table of operators.
    """

    told: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = [one for one in (*args, *(kwargs or {}).values()) if isinstance(one, ReadOnly)]
        own += [one for arg in args if isinstance(arg, (list, tuple)) for one in arg if isinstance(one, ReadOnly)]
        alone = all(issubclass(kind, ReadOnly) for kind in types)
        with as_plain_tensors():
            counted = [one for one in own if not one.is_inference()]  # others count no writes
            before = writes_so_far(counted)
            result = func(*args, **(kwargs or {})) if alone else None
        if not alone:  # what other classes do, they do with plain tensors
            given = [_plain(arg) for arg in args]
            result = func(*given, **{name: _plain(value) for name, value in (kwargs or {}).items()})
        with as_plain_tensors():
            if writes_so_far(counted) != before:
                raise RuntimeError(own[0].told.format(f"`{func.__name__}`"))
            for one in (result if isinstance(result, (list, tuple)) else [result]) if own else ():
                if type(one) is Tensor and shares_memory(one, own[0]):
                    read_only(one, own[0].told)
        return result

    def numpy(self, *, force: bool = False) -> Any:
        array = _plain(self).numpy(force=force)
        array.flags.writeable = False
        return array

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = copy = _plain(self).detach().clone()
        return copy


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    if not isinstance(value, ReadOnly):
        return value
    with as_plain_tensors():
        return value.as_subclass(Tensor)


def read_only(tensor: Tensor, told: str) -> Tensor:
    """Makes a plain tensor one that refuses writes. told: the error, with {} in place of the function."""
    if type(tensor) is Tensor:
        tensor.__class__ = ReadOnly
        vars(tensor)["told"] = told
    return tensor


def writable(tensor: Tensor) -> Tensor:
    """Ends `read_only`."""
    if type(tensor) is ReadOnly:
        tensor.__class__ = Tensor  # type: ignore[assignment]
    return tensor
