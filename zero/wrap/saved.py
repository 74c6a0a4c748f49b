"""What state_dict() of a wrapper returns: weights that are found under their names with and without `module.`, which
DistributedDataParallel puts before them, and, where they are copies of shards, that refuse writes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zero._torch.autograd import writes_so_far
from zero._torch.compiling import versions_in, with_versions
from zero._torch.tensors import as_plain_tensors, shares_memory


class Weights(OrderedDict[str, Any]):
    """A state dict. Pickled and copied it is torch's own, which needs no `zero` to be loaded."""

    def __missing__(self, name: Any) -> Any:
        if name in self:
            return self[name.removeprefix("module.")]
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        own = super().__contains__
        return own(name) or (isinstance(name, str) and name.startswith("module.") and own(name.removeprefix("module.")))

    def get(self, name: Any, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 (which would call this)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return with_versions(OrderedDict(self), versions_in(self)).__reduce_ex__(protocol)

    def copy(self) -> OrderedDict[str, Any]:  # type: ignore[override]
        return with_versions(OrderedDict(self), versions_in(self))


def as_weights(given: Mapping[str, Any]) -> Any:
    """A state dict of torch's as Weights."""
    return with_versions(Weights(given), versions_in(given))


class ReadOnly(Tensor):
    """A copy of a weight in a state dict. A write raises: under DistributedDataParallel it would reach the model.

    What is computed from it, and what is pickled or copied, is plain; views of it are read-only, too.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = [one for one in (*args, *(kwargs or {}).values()) if isinstance(one, ReadOnly)]
        own += [one for arg in args if isinstance(arg, (list, tuple)) for one in arg if isinstance(one, ReadOnly)]
        with as_plain_tensors():
            counted = [one for one in own if not one.is_inference()]  # others count no writes
            before = writes_so_far(counted)
            result = func(*args, **(kwargs or {}))
            if writes_so_far(counted) != before:
                raise RuntimeError(
                    f"`{func.__name__}` writes into a copy that state_dict() of FSDP has made, and would not reach the "
                    "model. Write into the parameters in place, under torch.no_grad(): for name, param in "
                    "model.named_parameters(); buffers likewise. To keep a changed copy, clone() it first."
                )
            found = result if isinstance(result, (list, tuple)) else [result]
            for one in found if own else ():
                if type(one) is Tensor and shares_memory(one, own[0]):
                    one.__class__ = ReadOnly
        return result

    def numpy(self, *, force: bool = False) -> Any:
        array = self._plain().numpy(force=force)
        array.flags.writeable = False
        return array

    def _plain(self) -> Tensor:
        with as_plain_tensors():
            return self.as_subclass(Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = copy = self._plain().detach().clone()
        return copy


def read_only(tensor: Tensor) -> Tensor:
    """Makes a plain tensor one that refuses writes."""
    if type(tensor) is Tensor:
        tensor.__class__ = ReadOnly
    return tensor


def writable(tensor: Tensor) -> Tensor:
    """Ends `read_only`."""
    if type(tensor) is ReadOnly:
        tensor.__class__ = Tensor  # type: ignore[assignment]
    return tensor
