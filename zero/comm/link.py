"""What ranks tell each other about what they do, so that they do the same.

Every operation has a number, which is compared between ranks: small notes over Unix sockets where ranks are neighbours
(neighbours.py), else one exchange of a fixed length. Ranks that are out of step get an error, on each of them, and not
a hang or another's data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero.oss.collectives import Collectives
from zero.oss.differences import as_text, refuse_differences
from zero.oss.handle import Handle
from zero.oss.neighbours import Neighbours, meet
from zero.oss.traffic import count
from zero.oss.wire import COMPARISON, Wire, wire_of

_LEAD = 1 << 15
"""Bytes of a segment that travel with its operation's number by collectives; of small segments that is all there is.

With 4 KiB, or 64 bytes, a comparison without a segment took as long within the noise (0.43 CPU ms at 2 ranks, 1.1 at
4), and a segment of 16 to 32 KiB, which then takes a second message, 0.15 to 0.7 ms more.
"""

NUMBER = 8
"""Bytes of the number of an operation."""

_CPU = torch.device("cpu")


def agreement_bytes(world: int) -> tuple[int, int]:
    """What comparing an operation between ranks takes a rank: bytes held as long as it lasts, and bytes sent.

    Held by collectives; ranks that read one another's memory hold nothing.
    """
    return (NUMBER + _LEAD) * (1 + world) if world > 1 else 0, NUMBER * (world - 1)


class Agreement:
    """Who the ranks of a group are, and that they do the same: what `Comm` stands on."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is not None and dist.get_rank(group) < 0:
            raise ValueError(
                f"rank {dist.get_rank()} of the job is not in the process group that it was given. "
                "Build the model and its optimizer only on the ranks of the group, or pass each rank its own group."
            )
        self._set_group(group)

    def _set_group(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)
        self._wire = Wire(self.rank, self.world) if group is None else wire_of(group)
        self._by_collectives = None if group is None else Collectives(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Agreement:
        return self  # a process group cannot be copied, and a copied module belongs to the same one

    # ------------------------------------------------------------------------------------------- agreeing

    def channel(self, name: str) -> int:
        """A number for one stream of transfers, given out in the same order on every rank; `name` is for errors."""
        return self._wire.channel(name)

    def announce(self, channel: int | None) -> None:
        """Tells with every operation to come, until told otherwise, what this rank is going to do after it.

        What is not compared by itself, such as a reduce, is safe to launch once an operation that announced it passed.
        """
        self._wire.announced = channel or 0

    def agree(self, channel: int) -> None:
        """Collective. Raises RuntimeError on every rank unless all ranks have come to this same point."""
        if self.world > 1:
            compare = self._launch_lead(None, channel)
            if self._neighbours() is None:
                compare()
            else:
                Handle(compare, self._wire.queue).wait()

    def _launch_lead(self, segment: Tensor | None, channel: int) -> Callable[[], list[Tensor]]:
        """Tells the others which operation this rank has come to, and maybe the first bytes of its segment with it.

        This message has the same length in every operation, so it arrives whatever each rank is doing: ranks that are
        out of step get an error, not a hang or another's data. The result, called, raises RuntimeError where they are,
        or returns the first bytes of every rank's segment, of all the same length, and none without a segment.
        """
        number = self._wire.number(channel)
        count(other=NUMBER * (self.world - 1))
        near = self._neighbours()
        if near is not None:
            hear = self._tell(near, number, 0, None)
            return lambda: [torch.empty(0, dtype=torch.uint8) for _ in range(len(hear()) + 1)]
        self._wire.refuse_if_broken()
        told = torch.zeros(NUMBER + _LEAD, dtype=torch.uint8)
        told[:NUMBER].view(torch.int64).fill_(number)
        if segment is not None:
            lead = segment[:_LEAD]
            told[NUMBER : NUMBER + len(lead)] = lead
        work, heard = self._collectives.launch_exchange(told)

        def compare() -> list[Tensor]:
            self._wait([work], channel, (told, heard))
            numbers = {peer: int(one[:NUMBER].view(torch.int64)) for peer, one in enumerate(heard)}
            self._wire.refuse_others(number, numbers)
            return [one[NUMBER:] for one in heard]

        return compare

    def compare(self, what: str, lines: Sequence[str], problem: str | None = None) -> None:
        """Collective. Raises ValueError on every rank if any rank has a `problem`, or if `lines` differ between ranks.

        Costs one exchange of 32 bytes where all is well. lines: what must be the same, one thing a line.
        """
        texts = [as_text(lines, problem)]
        if self.world > 1:
            self.agree(COMPARISON)
            digest = hashlib.sha256(texts[0].encode()).digest()
            digests = self._exchange(torch.tensor(list(digest), dtype=torch.uint8))
            if problem is not None or any(not torch.equal(digests[0], other) for other in digests[1:]):
                texts = self.all_gather_text(texts[0])
            elif problem is None:
                return
        refuse_differences(what, texts)

    def all_gather_text(self, text: str) -> list[str]:
        """Collective. The text of every rank, by rank."""
        if self.world == 1:
            return [text]
        self.agree(COMPARISON)
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        lengths = [int(n) for n in torch.cat(self._exchange(torch.tensor([len(data)])))]
        padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
        padded[: len(data)] = data
        return [
            bytes(received[:length].numpy()).decode()
            for received, length in zip(self._exchange(padded), lengths, strict=True)
        ]

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        count(other=tensor.nbytes * (self.world - 1))
        return self._collectives.exchange(tensor)

    # ------------------------------------------------------------------------------- how the others are reached

    def _neighbours(self, device: torch.device = _CPU) -> Neighbours | None:
        """Collective the first time. The other ranks, where tensors on `device` are read from their memory."""
        if device.type != "cpu":
            return None
        if not self._wire.have_met:
            self._wire.have_met = True
            if self._collectives.backend(device) == "gloo":
                seconds = self._collectives.timeout.total_seconds()
                self._wire.neighbours = meet(self._collectives.exchange_bytes, self.rank, self.world, seconds)
        return self._wire.neighbours

    def _tell(self, near: Neighbours, number: int, address: int, buffers: object) -> Callable[[], dict[int, int]]:
        """Tells the others which operation this rank has come to, and the address of what they are to read for it.

        The result, called, raises RuntimeError where another has come to another operation, or returns the addresses
        on the others, by rank. It is to be called in the order in which operations were launched.
        """
        self._wire.refuse_if_broken()
        with self._wire.in_vain(number, buffers):
            near.tell(number, address)

        def hear() -> dict[int, int]:
            with self._wire.in_vain(number, buffers):
                heard = near.hear()
            self._wire.refuse_others(number, {peer: told.number for peer, told in heard.items()})
            return {peer: told.address for peer, told in heard.items()}

        return hear

    @property
    def _collectives(self) -> Collectives:
        assert self._by_collectives is not None, "a process alone sends nothing"
        return self._by_collectives

    def _wait(self, works: Sequence[dist.Work], channel: int | None, buffers: object) -> None:
        with self._wire.in_vain(channel, buffers):
            for work in works:
                work.wait()
