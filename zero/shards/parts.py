"""The seam for parameters that are this rank's part of a larger tensor, whose other parts ranks outside of the shard
group have (tensor parallelism). By default there are none, and tensors that wrap others are refused.

The stages shard, reduce and step a plain parameter in place of the user's: this rank's part. A feature says which it
is, and has the module's forward see the user's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from zero.comm import Comm


class Parts:
    """No parameter is a part."""

    def takes(self, param: Tensor) -> bool:
        """Returns whether a tensor that wraps another can be sharded, in the form of its part."""
        return False

    def problem(self, named: Iterable[tuple[str, Any]], comms: Sequence[Comm]) -> str | None:
        """Returns an error message if parameters that it takes cannot be sharded over these ranks, else None."""
        return None

    def of(self, param: Any) -> Any:
        """Returns the plain parameter that is sharded in place of one of the user's: by default that one itself."""
        return param

    def put_into(self, module: nn.Module, without: Collection[nn.Parameter] = ()) -> None:
        """Replaces parameters of the module by their parts. Ranks have agreed that they can."""

    def take_out_of(self, module: nn.Module) -> None:
        """Puts the user's own parameters back. The parts have full values."""

    def show(self, module: nn.Module) -> None:
        """Has the module's forward see the user's parameters in place of parts, until they are taken out."""

    def others(self, param: nn.Parameter) -> Comm | None:
        """Returns the ranks that have the other elements of the tensor that a parameter is a part of; None if the part
        has all."""
        return None

    def slice_of(self, param: nn.Parameter) -> tuple[Sequence[int], int, int, int] | None:
        """Returns, for a part, the shape of the whole tensor, the dimension along which it is cut, the length of the
        slices along it, of which the last ones may be shorter, and the number of this slice. None if the part has all.
        """
        return None

    def whole(self, param: Tensor, value: Tensor) -> Tensor:
        """Collective among the ranks that have the parts. Returns the whole tensor of which `value`, in the shape of
        the parameter, is this rank's part."""
        return value

    def cut(self, param: Tensor, value: Tensor) -> Tensor:
        """Returns this rank's part of a whole tensor. Raises ValueError for another shape."""
        return value

    def numel(self, param: Tensor, numel: int) -> int:
        """Returns the elements of the whole tensor. numel: those of the part."""
        return numel

    def ranks(self, params: Iterable[Tensor]) -> Comm | None:
        """Returns the ranks that have the parts, of which the first keeps what is brought together on one rank; None if
        none of the parameters is a part."""
        return None


parts: list[Parts] = [Parts()]
"""The last one is asked."""


def parts_here() -> Parts:
    return parts[-1]


def is_first(params: Iterable[Tensor]) -> bool:
    """Returns whether this one of the ranks that have the parts keeps what is brought together on one rank."""
    comm = parts_here().ranks(params)
    return comm is None or comm.rank == 0


def others_of(params: Iterable[nn.Parameter]) -> list[Comm]:
    """Returns the ranks that have other elements of the tensors that these parameters are parts of, each group once."""
    return [comm for comm in dict.fromkeys(map(parts_here().others, params)) if comm is not None]
