"""The transport of a group of one rank, which sends nothing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zero.comm.handle import Handle
from zero.comm.packing import concatenate
from zero.comm.sums import wide
from zero.comm.transport import Message, Transport


class Local(Transport):
    """The transport of a group of one rank."""

    name, overlaps = "this process alone", False

    def gather(self, full: Tensor, bounds: Sequence[int], channel: int) -> Handle:
        return Handle(lambda: None)

    def reduce(self, messages: Sequence[Message], times: float, into: Tensor | None, channel: int) -> Handle:
        def own() -> Tensor:
            sums = wide(concatenate([message for message, _ in messages]))
            sums = sums if times == 1 else sums * times
            return sums if into is None else into.copy_(sums)

        return Handle(own)

    def all_to_all(self, messages: Sequence[Message], channel: int) -> Handle:
        return Handle(lambda: [message.unsqueeze(0) for message, _ in messages])

    def broadcast(self, flat: Tensor, source: int) -> None: ...

    def all_reduce(self, tensor: Tensor, channel: int, *, maximum: bool) -> None: ...

    def collect(self, transfers: Sequence[tuple[int, Tensor | None]], to: int | None) -> None: ...

    def exchange(self, data: bytes) -> list[bytes]:
        return [data]

    def compare(self, channel: int, *, flag: bool = False) -> bool:
        return flag
