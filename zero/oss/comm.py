"""Everything that ranks say to one another. No other file of this package calls torch.distributed to send.

Two operations carry the three stages: `gather` (every segment reaches every rank from its owner) and `reduce` (every
segment, summed over the ranks, reaches its owner). How each maps to messages is decided here, per backend:

- Gloo on CPU tensors: one message from each rank to each other. Segments travel from where they lie to where they
  belong, with no copy on either side, and messages carry a tag, so that operations need no common order. Measured on
  two cores (4M float32; CPU ms of a rank at 2 and 4 ranks): gather 2.6, 4.0 against `broadcast` 3.3, 4.8 and
  `all_gather_into_tensor` 4.5, 6.7; reduce 3.8, 5.7 against `reduce` 6.1, 8.5 and `all_to_all_single` 4.6, 5.7.
- any other backend: the single-tensor collectives where segments are equal, broadcasts and all-to-all where not.

Sums are taken in rank order at the owner, so they do not depend on timing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

_DIRECT = 1 << 18
"""Bytes from which a piece of a reduce travels alone. A message costs about as much CPU time as copying this."""

_FIRST_TAG = 1 << 24
"""Tags below are left to the user's own messages on the same process group."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of payload that this rank sent. A segment that goes to W - 1 other ranks counts W - 1 times."""

    gather: int = 0
    reduce: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        return self.gather + self.reduce + self.other

    def __add__(self, more: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) + getattr(more, f.name) for f in fields(self)))

    def __sub__(self, less: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) - getattr(less, f.name) for f in fields(self)))


_sent = Traffic()


def traffic() -> Traffic:
    """What this process has sent through `zero` so far; subtract two readings to see what lies between.

    What others send, such as the all-reduce of `DistributedDataParallel`, is not in it.
    """
    return _sent


def _count(**sent: int) -> None:
    global _sent
    _sent = _sent + Traffic(**sent)


class Handle:
    """A transfer in flight. It owns the buffers until `wait` returned what the transfer brought."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        self._finish: Callable[[], Any] | None = finish

    def wait(self) -> Any:
        """Blocks until the transfer is complete; to be called once."""
        assert self._finish is not None, "this transfer was waited for before"
        finish, self._finish = self._finish, None
        return finish()


_CHECK, _COLLECT = 0, 1
"""Channels that every process group has: to tell which operation a rank has come to, and to collect tensors."""


class _Wire:
    """What all users of one process group share: the tags given out, and what each stands for."""

    def __init__(self) -> None:
        self.names = ["the comparing of operations", "the collecting of tensors"]
        self.broken: str | None = None
        self.stranded: list[Any] = []

    def channel(self, name: str) -> int:
        self.names.append(name)
        return len(self.names) - 1

    def name(self, channel: int) -> str:
        return self.names[channel] if 0 <= channel < len(self.names) else f"operation number {channel}"


_wires: WeakKeyDictionary[dist.ProcessGroup, _Wire] = WeakKeyDictionary()


class Comm:
    """One process group, seen from this rank. `rank` and `world` are of the group, never of the whole job.

    group: None is the default group, or this process alone where torch.distributed is not initialised.
    Raises ValueError where this rank is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is not None and dist.get_rank(group) < 0:
            raise ValueError(
                f"rank {dist.get_rank()} of the job is not in the process group that it was given. "
                "Build the model and its optimizer only on the ranks of the group, or pass each rank its own group."
            )
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)
        self._wire = _Wire() if group is None else _wires.setdefault(group, _Wire())

    def __deepcopy__(self, memo: dict[int, Any]) -> Comm:
        return self  # a process group cannot be copied, and a copied module belongs to the same one

    # ------------------------------------------------------------------------------------------- agreeing

    def channel(self, name: str) -> int:
        """A number for one stream of transfers, given out in the same order on every rank; `name` is for errors."""
        return self._wire.channel(name)

    def agree(self, channel: int) -> None:
        """Collective. Raises RuntimeError on every rank unless all ranks have come to this same point."""
        self._launch_check(channel)()

    def _launch_check(self, channel: int) -> Callable[[], None]:
        """Tells the others which operation this rank has come to; the result, called, compares what they told.

        The words that tell it have a fixed length and a tag of their own, so they arrive whatever each rank is doing,
        and before any payload is waited for: ranks that are out of step get an error instead of a hang.
        """
        if self.world == 1:
            return lambda: None
        if self._wire.broken:
            raise RuntimeError(f"{self._wire.broken} Its messages are lost: start the process group anew.")
        own = torch.tensor([channel], dtype=torch.int64)
        if not self._tagged(own):
            return lambda: None
        told = torch.zeros(self.world, dtype=torch.int64)
        works = [self._recv(told[peer : peer + 1], peer, _CHECK) for peer in self._peers()]
        works += [self._send(own, peer, _CHECK) for peer in self._peers()]
        _count(other=own.nbytes * (self.world - 1))

        def compare() -> None:
            self._wait(works, channel)
            different = [peer for peer in self._peers() if told[peer] != channel]
            if different:
                peers = ", ".join(f"rank {peer} in {self._wire.name(int(told[peer]))}" for peer in different)
                self._wire.broken = (
                    f"ranks are out of step: rank {self.rank} is in {self._wire.name(channel)}, but {peers}. All ranks "
                    "must run the same modules in the same order and take the same steps."
                )
                raise RuntimeError(self._wire.broken)

        return compare

    def compare(self, what: str, lines: Sequence[str], problem: str | None = None) -> None:
        """Collective. Raises ValueError on every rank if any rank has a `problem`, or if `lines` differ between ranks.

        Costs one exchange of 32 bytes where all is well. lines: what must be the same, one thing a line.
        """
        texts = [json.dumps({"problem": problem, "lines": list(lines)})]
        if self.world > 1:
            digest = hashlib.sha256(texts[0].encode()).digest()
            digests = self._all_gather(torch.tensor(list(digest), dtype=torch.uint8))
            if problem is not None or any(not torch.equal(digests[0], other) for other in digests[1:]):
                texts = self.all_gather_text(texts[0])
            elif problem is None:
                return
        told = [json.loads(text) for text in texts]
        problems = [(rank, one["problem"]) for rank, one in enumerate(told) if one["problem"] is not None]
        if problems:
            where = f" (on rank {', '.join(str(rank) for rank, _ in problems)})" if self.world > 1 else ""
            raise ValueError(f"{problems[0][1]}{where}")
        for rank, one in enumerate(told):
            _refuse_difference(what, told[0]["lines"], one["lines"], rank)

    def all_gather_text(self, text: str) -> list[str]:
        """Collective. The text of every rank, by rank."""
        if self.world == 1:
            return [text]
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
        lengths = [int(n) for n in torch.cat(self._all_gather(torch.tensor([len(data)])))]
        padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
        padded[: len(data)] = data
        return [
            bytes(received[:length].numpy()).decode()
            for received, length in zip(self._all_gather(padded), lengths, strict=True)
        ]

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        sent = tensor.to(self._control_device())
        received = [torch.empty_like(sent) for _ in range(self.world)]
        dist.all_gather(received, sent, group=self.group)
        _count(other=sent.nbytes * (self.world - 1))
        return [one.cpu() for one in received]

    # ------------------------------------------------------------------------------------- whole tensors

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Collective. Overwrites the tensors by those of rank `source` of the group, few large messages at a time."""
        if self.world == 1:
            return
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel():
                kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for same in kinds.values():
            for batch in _batches(same, 1 << 24):
                flat = torch.cat([tensor.detach().reshape(-1) for tensor in batch])
                dist.broadcast(flat, group=self.group, group_src=source)
                _count(other=flat.nbytes * (self.world - 1) if self.rank == source else 0)
                for tensor, values in zip(batch, flat.split([t.numel() for t in batch]), strict=True):
                    tensor.detach().copy_(values.view(tensor.shape))

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> None:
        """Collective. Sums (or takes the maximum of) a small tensor over the ranks, in place."""
        if self.world > 1:
            op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
            dist.all_reduce(tensor, op=op, group=self.group)
            _count(other=2 * tensor.nbytes * (self.world - 1) // self.world)

    def collect(self, transfers: Sequence[tuple[int, Tensor | None]], to: int | None) -> None:
        """Collective. Brings flat tensors from their owners to rank `to` of the group, or (None) to all.

        transfers: on every rank the same, in the same order, (owner, tensor): what is sent at the owner, what is filled
        at those who receive, None elsewhere.
        """
        recipients = range(self.world) if to is None else [to]
        works = []
        for owner, tensor in transfers:
            if tensor is None or not tensor.numel():
                continue
            if self.rank == owner:
                others = [peer for peer in recipients if peer != owner]
                works += [self._send(tensor, peer, _COLLECT) for peer in others]
                _count(other=tensor.nbytes * len(others))
            else:
                works.append(self._recv(tensor, owner, _COLLECT))
        with self._strand_on_error(transfers):
            self._wait(works, _COLLECT)

    # -------------------------------------------------------------------------------------- the segments

    def ordered(self, tensor: Tensor) -> bool:
        """Whether operations on such tensors must be launched in the same order on every rank."""
        return self.world > 1 and not self._tagged(tensor)

    def gather(self, full: Tensor, bounds: Sequence[int], channel: int) -> Handle:
        """Collective. Fills the flat `full`: segment [bounds[r], bounds[r + 1]) comes from rank r, which has it there.

        Raises RuntimeError from `wait`, on every rank, where another rank has come to another operation.
        """
        if self.world == 1:
            return Handle(lambda: None)
        segments = [full[low:high] for low, high in zip(bounds, bounds[1:], strict=False)]
        own = segments[self.rank]
        _count(gather=own.nbytes * (self.world - 1))
        check = self._launch_check(channel)
        if self._tagged(full):
            works = [self._recv(segments[peer], peer, channel) for peer in self._peers() if segments[peer].numel()]
            if own.numel():
                works += [self._send(own, peer, channel) for peer in self._peers()]
        elif len({segment.numel() for segment in segments}) == 1:
            works = [dist.all_gather_into_tensor(full, own, group=self.group, async_op=True)]
        else:
            works = [
                dist.broadcast(segment, group=self.group, group_src=owner, async_op=True)
                for owner, segment in enumerate(segments)
                if segment.numel()
            ]

        def finish() -> None:
            with self._strand_on_error(full):
                check()
                self._wait(works, channel)

        return Handle(finish)

    def reduce(self, pieces: Sequence[Sequence[Tensor]], channel: int) -> Handle:
        """Collective. Sums over the ranks what each has for each owner. `wait` returns this rank's sums, flat.

        pieces: for each rank of the group the flat tensors, all of one dtype, that it is to get. Every rank has pieces
        of the same sizes. The result of `wait` is their sum over the ranks, one after another, in a new tensor.
        The tensors must not change until then.
        """
        own = pieces[self.rank]
        if self.world == 1:
            return Handle(lambda: _joined(own))
        sample = next(piece for parcel in pieces for piece in parcel)
        _count(reduce=sum(piece.nbytes for peer in self._peers() for piece in pieces[peer]))
        if self._tagged(sample):
            return self._reduce_by_messages(pieces, sample, channel)
        return self._reduce_by_collective(pieces)

    def _reduce_by_messages(self, pieces: Sequence[Sequence[Tensor]], sample: Tensor, channel: int) -> Handle:
        own = pieces[self.rank]
        length = sum(piece.numel() for piece in own)
        runs = _message_runs(own)
        received = {peer: sample.new_empty(length) for peer in self._peers()}
        works = [self._recv(received[peer][low:high], peer, channel) for peer in received for _, low, high in runs]
        messages = [(peer, _joined(pieces[peer][run])) for peer in received for run, _, _ in _message_runs(pieces[peer])]
        works += [self._send(message, peer, channel) for peer, message in messages]

        def finish() -> Tensor:
            with self._strand_on_error((messages, received)):
                self._wait(works, channel)
            return _sum_in_rank_order(own, runs, received, self.rank)

        return Handle(finish)

    def _reduce_by_collective(self, pieces: Sequence[Sequence[Tensor]]) -> Handle:
        lengths = [sum(piece.numel() for piece in parcel) for parcel in pieces]
        own = lengths[self.rank]
        sent = _joined([piece for parcel in pieces for piece in parcel])
        equal = len(set(lengths)) == 1
        received = sent.new_empty(own if equal else own * self.world)
        if equal:
            work = dist.reduce_scatter_tensor(received, sent, group=self.group, async_op=True)
        else:
            splits = [own] * self.world
            work = dist.all_to_all_single(received, sent, splits, lengths, group=self.group, async_op=True)

        def finish() -> Tensor:
            with self._strand_on_error((sent, received)):
                work.wait()
            if equal or not own:
                return received
            first, *others = received.split(own)
            total = first.clone()
            for other in others:
                total += other
            return total

        return Handle(finish)

    # ------------------------------------------------------------------------------------------ messages

    def _peers(self) -> list[int]:
        """The other ranks, the next one first, so that not all ranks send to the same one at once."""
        return [(self.rank + step) % self.world for step in range(1, self.world)]

    def _tagged(self, tensor: Tensor) -> bool:
        assert self.group is not None
        return tensor.device.type == "cpu" and self._backend(tensor.device) == "gloo"

    def _backend(self, device: torch.device) -> str:
        assert self.group is not None
        return str(self.group._get_backend(device).name()).lower()

    def _control_device(self) -> torch.device:
        """Where small tensors must lie to be sent in this group."""
        assert self.group is not None
        kinds = {device.type for device in self.group._device_types}
        return torch.device("cpu") if "cpu" in kinds else torch.device(kinds.pop())

    def _send(self, tensor: Tensor, peer: int, channel: int) -> dist.Work:
        assert self.group is not None
        return self.group.send([_as_real(tensor)], peer, _FIRST_TAG + channel)

    def _recv(self, tensor: Tensor, peer: int, channel: int) -> dist.Work:
        assert self.group is not None
        return self.group.recv([_as_real(tensor)], peer, _FIRST_TAG + channel)

    def _wait(self, works: Sequence[dist.Work], channel: int) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} waited in vain in {self._wire.name(channel)}: another rank of the group of "
                f"{self.world} has stopped, or never came here. Look for the first error among the ranks' own. ({error})"
            ) from error

    @contextmanager
    def _strand_on_error(self, buffers: object) -> Iterator[None]:
        """Keeps the buffers alive after an error: messages may still be written into them."""
        try:
            yield
        except BaseException:
            self._wire.stranded.append(buffers)
            raise


def _message_runs(pieces: Sequence[Tensor]) -> list[tuple[slice, int, int]]:
    """How pieces travel, as (which pieces, from element, to element): a large one alone, small neighbours together."""
    runs: list[tuple[slice, int, int]] = []
    low, joinable = 0, False
    for index, piece in enumerate(pieces):
        high = low + piece.numel()
        small = piece.nbytes < _DIRECT
        if small and joinable:
            before, start, _ = runs[-1]
            runs[-1] = (slice(before.start, index + 1), start, high)
        else:
            runs.append((slice(index, index + 1), low, high))
        joinable = small and high - runs[-1][1] < _DIRECT // piece.element_size()
        low = high
    return [run for run in runs if run[2] > run[1]]


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat([*pieces])


def _sum_in_rank_order(
    own: Sequence[Tensor], runs: Sequence[tuple[slice, int, int]], received: dict[int, Tensor], rank: int
) -> Tensor:
    """Adds into the buffer of the lowest other rank, so that the sums need no memory of their own.

    On rank 0 that turns the first addition round, which gives the same bits.
    """
    lowest = min(received)
    total = received[lowest]
    if total.dtype in (torch.float16, torch.bfloat16):
        total = total.float()
    for term in sorted([*received, rank]):
        if term == rank:
            for pieces, low, high in runs:
                total[low:high] += _joined(own[pieces])
        elif term != lowest:
            total += received[term]
    return total


def _batches(tensors: Sequence[Tensor], limit: int) -> list[list[Tensor]]:
    batches: list[list[Tensor]] = []
    size = 0
    for tensor in tensors:
        if not batches or size + tensor.nbytes > limit:
            batches.append([])
            size = 0
        batches[-1].append(tensor)
        size += tensor.nbytes
    return batches


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _refuse_difference(what: str, expected: list[str], found: list[str], rank: int) -> None:
    for position in range(max(len(expected), len(found))):
        here = expected[position] if position < len(expected) else "nothing"
        there = found[position] if position < len(found) else "nothing"
        if here != there:
            raise ValueError(
                f"{what} differ between ranks: at position {position}, rank 0 has {here}, rank {rank} has {there}. "
                "Build the same on every rank, in the same order."
            )
