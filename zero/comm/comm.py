"""One process group as the stages use it.

Two operations carry the three stages: `gather` (every shard reaches every rank from its owner) and `reduce` (every
shard, summed over the ranks, reaches its owner). Which transport runs is chosen once for a group and type of device
(link.py), and makes no difference to the results: reduce adds up in rank order at the owner, in float32 what travelled
with 16 bits. Both can quantise what they send (quantised.py).

All ranks must call the same operations in the same order. Where they do not, each of them gets an error, and nothing
that they disagree on is applied (order.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero.comm.differences import as_text, refuse_differences
from zero.comm.handle import Handle
from zero.comm.link import Link, group_in_order, link_of
from zero.comm.order import COMPARISON, GATHER, REDUCTION, SUM
from zero.comm.packing import batches, room_for, spread, together
from zero.comm.quantised import Int8
from zero.comm.rehearsal import Observer, Rehearsed, RehearsedLink
from zero.comm.traffic import count
from zero.comm.transport import Message


class Comm:
    """One process group, seen from this rank. `rank` and `world` are of the group, never of the whole job.

    group: None is the default group, or this process alone where torch.distributed is not initialised. A Comm stands
        for its own ranks: wherever users pass a process group, plans pass a rehearsal.
    Raises ValueError where this rank is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup | Comm | None = None) -> None:
        if isinstance(group, Comm):
            self._use(group.group, group._link)
            return
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is not None and dist.get_rank(group) < 0:
            raise ValueError(
                f"rank {dist.get_rank()} of the job is not in the process group that it was given. "
                "Build the model and its optimizer only on the ranks of the group, or pass each rank its own group."
            )
        self._use(group, Link(None) if group is None else link_of(group))

    @classmethod
    def alone(cls) -> Comm:
        """This process by itself, whatever torch.distributed knows."""
        comm = cls.__new__(cls)
        comm._use(None, Link(None))
        return comm

    @classmethod
    def rehearsal(cls, rank: int, world: int, like: Rehearsed, observer: Observer | None = None) -> Comm:
        """One rank of a group that does not exist: nothing is sent. See rehearsal.py."""
        comm = cls.__new__(cls)
        comm._use(None, RehearsedLink(rank, world, like, observer) if world > 1 else Link(None))
        return comm

    @classmethod
    def of_both(cls, within: Comm, across: Comm) -> Comm:
        """Collective over all ranks of the job. The ranks of a grid: those of `within` and of `across` are this rank's
        row and column of it. Ranks of one column follow one another: rank = within.rank * across.world + across.rank.

        Raises ValueError, on every rank, where the grid has not all ranks of the job.
        """
        if within.world == 1 or across.world == 1:
            return cls(across if within.world == 1 else within)
        if isinstance(within._link, RehearsedLink):
            rank = within.rank * across.world + across.rank
            link = within._link
            return cls.rehearsal(rank, within.world * across.world, link.like, link.observer)
        column = ",".join(map(str, dist.get_process_group_ranks(across.group)))
        ranks = [int(rank) for text in within.all_gather_text(column) for rank in text.split(",")]
        if sorted(ranks) != [*range(dist.get_world_size())]:
            raise ValueError(
                f"the groups to shard within and to replicate across have the ranks {sorted(ranks)} together, not all "
                f"{dist.get_world_size()} of the job. Pass rows and columns of one DeviceMesh of all ranks."
            )
        return cls(group_in_order(ranks))

    def _use(self, group: dist.ProcessGroup | None, link: Link) -> None:
        self.group, self._link, self._order = group, link, link.order
        self.rank, self.world = link.rank, link.world

    def __deepcopy__(self, memo: dict[int, Any]) -> Comm:
        return self  # a process group cannot be copied, and a copied module belongs to the same one

    # ---------------------------------------------------------------------------------------- the transport

    def transport_name(self, device: torch.device) -> str:
        """Collective the first time. What tensors on such a device are sent by, for logs."""
        return self._link.transport(device).name

    def reads(self, device: torch.device) -> bool:
        """Collective the first time. Whether ranks read tensors on the device from one another's memory."""
        return self.world > 1 and self.transport_name(device) == "host memory"

    def runs_beside(self, tensor: Tensor) -> bool:
        """Collective the first time. Whether such tensors are sent without taking the processor from what computes."""
        return self.world > 1 and self._link.transport(tensor.device).overlaps

    def device_problem(self, devices: Sequence[torch.device]) -> str | None:
        """Why tensors on these devices cannot be sent in this group, in words for the user; None if they can."""
        missing = None if self.group is None else self._link.without_backend(devices)
        if missing is None:
            return None
        return (
            f"parameters are on {missing}, but the process group sends nothing from there (its backend is "
            f"{dist.get_backend(self.group)}). Call torch.cuda.set_device(local_rank), move the model by "
            "model.to(device) first, or initialise the group with a backend for both: "
            'init_process_group("cpu:gloo,cuda:nccl").'
        )

    def refuse_if_broken(self, buffers: object) -> None:
        """Raises RuntimeError where a transfer has failed: nothing that was in flight counts as arrived.

        buffers: of one that was, which are kept then: it may still write into them.
        """
        with self._order.transfer(None, buffers):
            pass

    # ------------------------------------------------------------------------------------------- agreeing

    def channel(self, name: str) -> int:
        """A number for one stream of operations, given out in the same order on every rank; `name` is for errors."""
        return self._order.channel(name)

    def begin_schedule(self) -> None:
        """Operations begin here that may have run before in the same order, such as those of a forward."""
        self._order.begin()

    def agree(self, channel: int, *, flag: bool = False) -> bool:
        """Collective. Raises RuntimeError on every rank unless all ranks have come to this same point, by the same
        operations. Returns whether any rank has the flag."""
        if self.world > 1:
            flag = self._link.transport().compare(channel, flag=flag)
            self._order.begin()
        return flag

    def compare(self, what: str, lines: Sequence[str], problem: str | None = None) -> None:
        """Collective. Raises ValueError on every rank if any rank has a `problem`, or if `lines` differ between ranks.

        Costs one exchange of 32 bytes where all is well. lines: what must be the same, one thing a line.
        """
        texts = [as_text(lines, problem)]
        if self.world > 1:
            self.agree(COMPARISON)
            digests = self._exchange(hashlib.sha256(texts[0].encode()).digest())
            if problem is not None or len(set(digests)) > 1:
                texts = self.all_gather_text(texts[0])
            else:
                return
        refuse_differences(what, texts)

    def all_gather_text(self, text: str) -> list[str]:
        """Collective. The text of every rank, by rank."""
        if self.world == 1:
            return [text]
        self.agree(COMPARISON)
        data = text.encode()
        lengths = [int.from_bytes(length, "little") for length in self._exchange(len(data).to_bytes(8, "little"))]
        padded = data.ljust(max(lengths), b"\0")
        found = self._exchange(padded) if padded else [b""] * self.world
        return [received[:length].decode() for received, length in zip(found, lengths, strict=True)]

    def _exchange(self, data: bytes) -> list[bytes]:
        """What every rank gives, as many bytes on each, at least one."""
        count(other=len(data) * (self.world - 1))
        return self._link.transport().exchange(data)

    # ------------------------------------------------------------------------------------------ the shards

    def gather(
        self,
        full: Tensor,
        bounds: Sequence[int],
        channel: int = GATHER,
        *,
        sent_as: Int8 | None = None,
        keeps_own: bool = False,
    ) -> Handle:
        """Collective. Fills the flat `full`: shard [bounds[r], bounds[r + 1]) comes from rank r, which has it there.

        channel: number of the operation, by which ranks notice that they are out of step: this call, or `wait`, raises
            RuntimeError then, on every rank.
        sent_as: how floats of 16 or 32 bits travel, if not as they are; integers do as they are. keeps_own: this rank's
            shard stays as it is then; otherwise it becomes what the other ranks get. One rank by itself sends nothing,
            and rounds nothing.

        `full` must not change until `wait` has returned, which may be when the other ranks have called it too.
        """
        if sent_as is not None and self.world > 1 and full.is_floating_point():
            return self._gather_quantised(full, bounds, channel, sent_as, keeps_own=keeps_own)
        low, high = bounds[self.rank : self.rank + 2]
        count(gather=(high - low) * full.element_size() * (self.world - 1))
        return self._link.transport(full.device).gather(full, bounds, channel)

    def _gather_quantised(
        self, full: Tensor, bounds: Sequence[int], channel: int, sent_as: Int8, *, keeps_own: bool
    ) -> Handle:
        counts, rank = [high - low for low, high in pairwise(bounds)], self.rank
        starts = [0, *accumulate(sent_as.lengths(counts))]
        wire = full.new_empty(starts[-1], dtype=torch.uint8)
        wire[starts[rank] : starts[rank + 1]] = sent_as.encode(full[bounds[rank] : bounds[rank + 1]], [counts[rank]])
        handle = self.gather(wire, starts, channel)
        filled = [(0, rank), (rank + 1, self.world)] if keeps_own else [(0, self.world)]

        def finish() -> None:
            handle.wait()
            for first, last in filled:
                shards = full[bounds[first] : bounds[last]]
                sent_as.decode(wire[starts[first] : starts[last]], shards, counts[first:last])

        return Handle(finish)

    def reduce(
        self,
        messages: Sequence[Message],
        *,
        times: float = 1,
        into: Tensor | None = None,
        channel: int = REDUCTION,
        sent_as: Int8 | None = None,
    ) -> Handle:
        """Collective. Sums over the ranks what each has for each owner. `wait` returns this rank's sums, flat.

        messages: flat tensors, all of one dtype, and how many elements of each go to each rank of the group, in the
        order of ranks; these numbers are the same on all ranks. The tensors must not change until `wait`, which returns
        a new tensor of the sums of what came here, one message after another; of 16-bit floats in float32. As with
        `gather`, that may be when the other ranks have called it too.

        times: what sums are multiplied by, such as 1 / world for averages: here they are still in the cache.
        into: flat, what is overwritten by the sums, and returned, instead of a new tensor; in its own dtype. It may be
            what this rank has for itself.
        channel: as of `gather`.
        sent_as: how floats of 16 or 32 bits travel, if not as they are; sums are then a new tensor of float32. One rank
            by itself sends nothing, and rounds nothing.
        """
        if sent_as is not None and self.world > 1:
            return self._reduce_quantised(messages, times, channel, sent_as)
        if self.world > 1:
            sent = ((len(message) - counts[self.rank]) * message.element_size() for message, counts in messages)
            count(reduce=sum(sent))
        return self._link.transport(messages[0][0].device).reduce(messages, times, into, channel)

    def _reduce_quantised(self, messages: Sequence[Message], times: float, channel: int, sent_as: Int8) -> Handle:
        own, device = [counts[self.rank] for _, counts in messages], messages[0][0].device
        sent = [(sent_as.encode(message, counts), sent_as.lengths(counts)) for message, counts in messages]
        count(reduce=sum(len(wire) - lengths[self.rank] for wire, lengths in sent))
        received = self._link.transport(device).all_to_all(sent, channel)

        def finish() -> Tensor:
            sums = torch.empty(sum(own), dtype=torch.float32, device=device)
            for rows, into in zip(received.wait(), sums.split(own), strict=True):
                sent_as.add(rows, into, times)
            return sums

        return Handle(finish)

    # ------------------------------------------------------------------------------------- other tensors

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Collective. Overwrites the tensors by those of rank `source` of the group."""
        if self.world == 1:
            return
        for batch in batches(tensors):
            flat = together(batch) if self.rank == source else room_for(batch)
            self._link.transport(flat.device).broadcast(flat, source)
            if self.rank == source:
                count(other=flat.nbytes * (self.world - 1))
            else:
                spread(flat, batch)

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False, channel: int = SUM) -> None:
        """Collective. Sums (or takes the maximum of) a contiguous tensor over the ranks, in place.

        channel: number of the operation, which is compared between ranks; by default that of any such sum.
        """
        if self.world > 1:
            count(other=2 * tensor.nbytes * (self.world - 1) // self.world)
            self._link.transport(tensor.device).all_reduce(tensor, channel, maximum=maximum)

    def collect(self, transfers: Sequence[tuple[int, Tensor | None]], to: int | None) -> None:
        """Collective. Brings flat tensors from their owners to rank `to` of the group, or (None) to all.

        transfers: on every rank the same, in the same order, (owner, tensor): what is sent at the owner, what is filled
        at those who receive, None elsewhere. All are on one type of device.
        """
        if self.world == 1:
            return
        own = [tensor for owner, tensor in transfers if owner == self.rank and tensor is not None]
        receivers = self.world - 1 if to is None else int(to != self.rank)
        count(other=sum(tensor.nbytes for tensor in own) * receivers)
        devices = [tensor.device for _, tensor in transfers if tensor is not None]
        self._link.transport(devices[0] if devices else torch.device("cpu")).collect(transfers, to)
