"""The collectives of one process group, as the three stages use them.

All stages send by two operations: `gather` (all-gather: every shard reaches every rank from its owner) and `reduce`
(reduce-scatter: every shard, summed over the ranks, reaches its owner). The transport is chosen once for each process
group and type of device (link.py). It does not change the results: over every transport on the CPU, the owner adds in
rank order, and 16-bit floats are added in float32.

All ranks must call the same operations in the same order. Otherwise each of them raises, and no result that the ranks
disagree on is applied (oplog.py).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero.comm.link import Link, link_of
from zero.comm.oplog import (
    BROADCAST,
    COLLECTION,
    COMPARISON,
    GATHER,
    REDUCTION,
    SCATTER,
    SUM,
    described,
    dumped,
    loaded,
    mark_told,
    rebuilt,
    text_of,
)
from zero.comm.transport import BATCH, Message, Work, as_flat, batches, copy_into, empty_flat, flatten, lengths

# -------------------------------------------------------------------------------------------------------------- traffic
#
# Counts the bytes that this process has sent.


@dataclass(frozen=True)
class Traffic:
    """Bytes of payload that this rank sent. A tensor that goes to W - 1 other ranks counts W - 1 times.

    Bytes that other ranks of the host read from this rank's memory count as sent. Not counted are the rendezvous of a
    process group's ranks, the comparison of their operations, and the headers and the padding of messages.
    """

    gather: int = 0
    reduce: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        return self.gather + self.reduce + self.other

    def __add__(self, more: Traffic) -> Traffic:
        return Traffic(self.gather + more.gather, self.reduce + more.reduce, self.other + more.other)

    def __sub__(self, less: Traffic) -> Traffic:
        return Traffic(self.gather - less.gather, self.reduce - less.reduce, self.other - less.other)


sent: Counter[str] = Counter()
"""Bytes that this process has sent, by the fields of Traffic. Transports' callers add to it."""


def traffic() -> Traffic:
    """Returns the bytes that this process has sent through `zero` so far; subtract two results for those in between.

    Transfers of other libraries, such as the all-reduce of `DistributedDataParallel`, are not counted.
    """
    return Traffic(**sent)


# ----------------------------------------------------------------------------------------------------- the communicator


class Comm:
    """One process group, seen from this rank. `rank` and `world` count the ranks of the group, not of the job.
    `log`: of its operations.

    group: None means the default group, or this process alone if torch.distributed is not initialised. A Comm means the
        same ranks as that Comm, and a Link those of that link: plans pass these where users pass a process group.
    Raises ValueError if this rank is not in the group, and RuntimeError for None if a launcher has started other ranks
    but torch.distributed is not initialised.
    """

    def __init__(self, group: dist.ProcessGroup | Comm | Link | None = None) -> None:
        self.group: dist.ProcessGroup | None = None
        self.link: Link
        if isinstance(group, Comm):
            self.group, self.link = group.group, group.link
        elif isinstance(group, Link):
            self.link = group
        else:
            if group is None and dist.is_available() and dist.is_initialized():
                group = dist.group.WORLD
            if group is None:
                refuse_launched()
            elif dist.get_rank(group) < 0:
                raise ValueError(
                    f"rank {dist.get_rank()} of the job is not in the process group that it was given. Build the model "
                    "and its optimizer only on the ranks of the group, or pass on each rank a group that contains it."
                )
            self.group, self.link = group, Link(None) if group is None else link_of(group)
        self.log, self._transports = self.link.log, self.link.transports
        self.rank, self.world = self.link.rank, self.link.world

    @classmethod
    def default(cls) -> Comm:
        """Returns the default group, or this process alone if torch.distributed is not initialised (any more).

        For what trains nothing; `Comm(None)` refuses a launcher's process that is in no group.
        """
        return cls(None) if dist.is_available() and dist.is_initialized() else cls.alone()

    @classmethod
    def alone(cls) -> Comm:
        """Returns a group of this process alone, even if torch.distributed is initialised."""
        return cls(Link(None))

    def __deepcopy__(self, memo: dict[int, Any]) -> Comm:
        return self  # a process group cannot be copied, and a copied module belongs to the same one

    # ---------------------------------------------------------------------------------------- the transport

    def transport_name(self, device: torch.device) -> str:
        """Returns the name of the transport for tensors on the device. Collective the first time."""
        return self._transports[device.type].name

    def reads_memory(self, device: torch.device) -> bool:
        """Returns whether ranks read tensors on the device from one another's memory. Collective the first time."""
        return self.world > 1 and self._transports[device.type].reads_memory

    def overlaps(self, tensor: Tensor) -> bool:
        """Returns whether transfers of tensors on this device overlap with computing. Collective the first time."""
        return self.world > 1 and self._transports[tensor.device.type].overlaps

    def refuse_devices(self, devices: Sequence[torch.device]) -> None:
        """Raises ValueError, in words for the user, if this group cannot send tensors on these devices."""
        missing = None if self.group is None else self.link.without_backend(devices)
        if missing is None:
            return
        if not any(missing in types for types in dist.Backend.backend_capability.values()):
            raise ValueError(
                f'torch.distributed has no backend for {missing}: move the model to the CPU by model.to("cpu") first.'
            )
        raise ValueError(
            f"parameters are on {missing}, but the process group has no backend for that device (its backend is "
            f"{dist.get_backend(self.group)}). Call torch.cuda.set_device(local_rank) and move the model with "
            "model.to(device) first, or initialise the group with a backend for both devices: "
            'init_process_group("cpu:gloo,cuda:nccl").'
        )

    # ---------------------------------------------------------------------------------- comparing the ranks

    def channel(self, name: str, remedy: str = "") -> int:
        """Returns a new number for a kind of operation, `name` in errors. All ranks must call it in the same order.

        remedy: a sentence for the user, if ranks are out of step in operations that all have this remedy.
        """
        return self.log.channels.add(name, remedy)

    def agree(self, channel: int, *, flags: int = 0) -> int:
        """Collective. Raises RuntimeError on every rank unless all ranks call it with the same channel after the same
        operations. Returns the flags, up to two bits, that any rank has."""
        if self.world > 1:
            flags = self._transports["cpu"].compare(channel, flags=flags)
            self.log.end_schedule()
        return flags

    def connect(self) -> None:
        """Collective the first time. Has the ranks reach one another, so that they have a name for what they tell."""
        _ = self._transports["cpu"]

    def compare(self, what: str, lines: Sequence[str], own: Exception | None = None, channel: int = COMPARISON) -> None:
        """Collective. Raises an error of one class on every rank if any rank has an error of its `own`, and ValueError
        if the signature `lines` differs between ranks. Otherwise it costs one exchange of 32 bytes."""
        texts = [json.dumps({"problem": own and described(own, text_of(own)), "lines": list(lines)})]
        if self.world > 1:
            # First: Gloo ends the process where an all-gather of 32 bytes meets another operation.
            self.agree(channel)
            digests = self._exchange(hashlib.sha256(texts[0].encode()).digest())
            if own is not None or len(set(digests)) > 1:
                texts = self.all_gather_text(texts[0])
            else:
                return
        error = _difference(what, texts, self.log.ranks)
        if error is not None:
            mark_told(error, [self.log])
            try:
                raise error
            finally:
                del error  # else this frame, which its traceback keeps, would keep it, and so the user's model

    def all_gather_text(self, text: str) -> list[str]:
        """Collective. Returns the text of every rank, by rank."""
        if self.world == 1:
            return [text]
        self.agree(COMPARISON)
        data = text.encode(errors="backslashreplace")  # lines have names of the user's
        lengths = [int.from_bytes(length, "little") for length in self._exchange(len(data).to_bytes(8, "little"))]
        padded = data.ljust(max(lengths), b"\0")
        # Where all texts are empty: torch.frombuffer refuses a buffer of no bytes.
        texts = self._exchange(padded) if padded else [b""] * self.world
        return [text[:length].decode() for text, length in zip(texts, lengths, strict=True)]

    def _raise_together(self, error: Exception | None, channel: int) -> None:
        """Collective. Raises on every rank what any has to raise."""
        if not self._transports["cpu"].compare(channel, flags=int(error is not None)):
            return
        told = self.all_gather_text("" if error is None else dumped(error, self.log.own))
        if error is None:
            self.log.failure.learn()
        try:
            error = error or loaded(next(filter(None, told)))
            mark_told(error, [self.log])
            raise error
        finally:
            del error  # else this frame, which its traceback keeps, would keep it, and so the user's model

    def _exchange(self, data: bytes) -> list[bytes]:
        """Returns the data of every rank, by rank. All ranks pass the same number of bytes, at least one."""
        sent["other"] += len(data) * (self.world - 1)
        return self._transports["cpu"].all_gather_bytes(data)

    # ---------------------------------------------------------------------------------------------- shards

    def gather(self, full: Tensor, bounds: Sequence[int], channel: int = GATHER) -> Work:
        """Collective. Fills the flat `full`. Rank r sends shard [bounds[r], bounds[r + 1]), which its own `full` holds.

        channel: number of the operation. If ranks are out of step, this call or `wait` raises RuntimeError on every
            rank.

        `full` must not change until `wait` has returned. `wait` may block until the other ranks have called `wait`.
        """
        low, high = bounds[self.rank : self.rank + 2]
        sent["gather"] += (high - low) * full.element_size() * (self.world - 1)
        return self._transports[full.device.type].gather(full, bounds, channel)

    def reduce(self, messages: Sequence[Message], *, times: float = 1, channel: int = REDUCTION) -> Work:
        """Collective. Sums the messages over the ranks and sends each owner its sums. `wait` returns this rank's sums.

        messages: flat tensors of one dtype, and the number of elements of each that go to each rank of the group, in
            rank order; these numbers are the same on all ranks. The tensors must not change until `wait` has returned.
        times: factor for the sums, such as 1 / world for averages: it is applied while they are still in the cache.
        channel: as for `gather`.

        The sums are flat, one message after another; those of 16-bit floats are float32. Between hosts, by what
        overlaps with computing, one message of 16 bits is rounded to these on its way, at each rank. `wait` may block
        until the other ranks have called `wait`.
        """
        sent["reduce"] += sum((flat.numel() - counts[self.rank]) * flat.element_size() for flat, counts in messages)
        return self._transports[messages[0][0].device.type].reduce(messages, times, channel)

    # ------------------------------------------------------------------------------------- other tensors

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Collective. Overwrites the tensors with those of rank `source` of the group."""
        if self.world == 1:
            return
        for batch in batches(tensors):
            flat = alone = as_flat(batch[0]) if len(batch) == 1 else None
            if flat is None:
                flat = flatten(batch) if self.rank == source else empty_flat(batch)
            bounds = [0] * (source + 1) + [len(flat)] * (self.world - source)
            self._transports[flat.device.type].gather(flat, bounds, BROADCAST).wait()
            if self.rank == source:
                sent["other"] += flat.nbytes * (self.world - 1)
            elif alone is None:
                copy_into(batch, flat)

    def scatter(self, read: Callable[[int, Tensor], None], bounds: Sequence[int], into: Tensor) -> None:
        """Collective. Overwrites the flat `into` of each rank r by elements [bounds[r], bounds[r + 1]) of the first
        rank, a few MiB at a time: it takes no memory for those of others.

        read: called on the first rank with a position and a flat tensor, which it overwrites by elements from there on.
        """
        if self.world == 1:
            read(0, into)
            return
        transport, longest = self._transports[into.device.type], max(lengths(bounds))
        step = max(1, min(longest, BATCH // (self.world * into.element_size())))
        number = 2 if step < longest else 1  # one of them is filled while the other is sent
        by_ring = transport.overlaps  # as of `collect`
        buffers = into.new_empty(number, (self.world - 1) * step if self.rank == 0 or by_ring else 0)
        before = Work()
        for turn, start in enumerate(range(0, longest, step)):
            shares = [(min(low + start, high), min(low + start + step, high)) for low, high in pairwise(bounds)]
            counts = [high - low for low, high in shares]
            own, nothing = into[start : start + step], [0] * self.world
            part = buffers[turn % number][: sum(counts[1:]) if self.rank == 0 or by_ring else 0]
            try:
                if self.rank == 0:
                    for (low, _), piece in zip(shares, [own, *part.split(counts[1:])], strict=True):
                        read(low, piece)
            except Exception as error:
                self._raise_together(error, SCATTER)
            else:
                self._raise_together(None, SCATTER)  # before this rank waits for the part
            if by_ring:
                sent["other"] += part.nbytes * (self.world - 1) * (self.rank == 0)
                transport.gather(part, [0, *[len(part)] * self.world], SCATTER).wait()
                if self.rank:
                    own.copy_(part.split(counts[1:])[self.rank - 1])
                continue
            sent["other"] += part.nbytes
            given = (
                (own[:0], (part, [0, *counts[1:]]), nothing)
                if self.rank == 0
                else (own, (part, nothing), [len(own), *nothing[1:]])
            )
            work = transport.exchange(*given, SCATTER)
            before.wait()
            before = work
        before.wait()

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False, times: float = 1, channel: int = SUM) -> None:
        """Collective. Overwrites a contiguous tensor with `times` its sum, or with its maximum, over the ranks: NaN
        where any rank has NaN. channel: number of the operation, which ranks compare; by default all such sums share
        one number."""
        if self.world == 1:
            return
        message, holes = tensor, maximum and tensor.is_floating_point()
        if holes:  # Gloo's and NCCL's maxima drop NaN
            numbers = tensor.nan_to_num(-math.inf, math.inf, -math.inf)
            message = torch.stack([numbers, tensor.isnan().to(tensor.dtype)])
        # What a ring sends, by a reduce-scatter and an all-gather, whichever way the transport takes.
        sent["other"] += 2 * message.nbytes * (self.world - 1) // self.world
        self._transports[tensor.device.type].all_reduce(message, channel, times, maximum=maximum).wait()
        if holes:
            tensor.copy_(message[0].masked_fill_(message[1] > 0, math.nan))

    def launch_all_reduce(self, flat: Tensor, *, channel: int) -> Work:
        """Collective. Launches a sum of gradients, which must not change until `wait` has returned."""
        sent["reduce"] += 2 * flat.nbytes * (self.world - 1) // self.world
        return self._transports[flat.device.type].all_reduce(flat, channel, 1, maximum=False)

    def collect(
        self, transfers: Sequence[tuple[int, int, Tensor | None]], to: int | None, device: torch.device
    ) -> None:
        """Collective. Sends flat tensors from their owners to rank `to` of the group, or (None) to all ranks.

        transfers: (owner, bytes, tensor), for the same tensors in the same order on every rank. The owner passes the
        tensor to send, a receiver the tensor to fill, other ranks None. device: of all tensors, on this rank.
        """
        if self.world == 1:
            return
        transport, works, room = self._transports[device.type], list[Work](), torch.empty(0, device=device)
        transport.compare(COLLECTION)
        for owner, nbytes, tensor in transfers:
            flat = None if tensor is None else tensor.view(torch.uint8)
            if to is None or transport.overlaps:
                # By a ring, of which every rank gets all: between two ranks alone NCCL would make a connection, which
                # takes memory beside torch's. What is for another rank goes through a buffer.
                for start in range(0, nbytes if owner != to else 0, BATCH):
                    size = min(BATCH, nbytes - start)
                    if flat is None and len(room) < size:
                        room = torch.empty(size, dtype=torch.uint8, device=device)
                    part = room[:size] if flat is None else flat[start : start + size]
                    works.append(transport.gather(part, [0] * (owner + 1) + [size] * (self.world - owner), COLLECTION))
                sent["other"] += nbytes * (self.world - 1) * (owner == self.rank != to)
            elif owner != to:  # all ranks take part, most of which send and receive nothing
                flat, sends = (
                    torch.empty(0, dtype=torch.uint8, device=device) if flat is None else flat,
                    owner == self.rank,
                )
                counts_in = [nbytes * (to == self.rank and rank == owner) for rank in range(self.world)]
                counts_out = [nbytes * (sends and rank == to) for rank in range(self.world)]
                message = flat[: sum(counts_out)], counts_out
                works.append(transport.exchange(flat[: sum(counts_in)], message, counts_in, COLLECTION))
                sent["other"] += nbytes * sends
        for work in works:
            work.wait()


def fail_together(comms: Sequence[Comm], device: torch.device) -> None:
    """Collective. Has a failure in one of the groups be one of all: the device may wait for ranks of another one."""
    for one in comms:
        one.transport_name(device)  # chosen now, as it is what aborts
        for other in comms:
            one.log.failure.couple(other.log.failure)


def _difference(what: str, texts: Sequence[str], ranks: Sequence[int]) -> Exception | None:
    """The error, if any rank has a problem, or if signatures differ. texts: of `ranks` of the job, or of this one."""
    each = dict(zip(ranks, map(json.loads, texts), strict=False))
    problems = {rank: given["problem"] for rank, given in each.items() if given["problem"] is not None}
    if problems:
        first = next(iter(problems.values()))
        where = f" (on rank {', '.join(map(str, problems))})" if len(texts) > 1 else ""
        return rebuilt({**first, "text": first["text"] + where})
    expected = each[ranks[0]]["lines"]
    for rank, given in each.items():
        for position, (first, other) in enumerate(zip_longest(expected, given["lines"], fillvalue="nothing")):
            if first != other:
                return ValueError(
                    f"{what} differ between ranks: at position {position}, rank {ranks[0]} has {first}, "
                    f"rank {rank} has {other}. Build the same on every rank, in the same order."
                )
    return None


# Where launchers write the number of ranks and the own one into the environment: torchrun and others, from which
# init_process_group reads them; Slurm's srun (a job has SLURM_NTASKS also where it runs one process, a step is what
# srun has started); Open MPI; MPICH, Intel MPI and others by Hydra; MVAPICH 2 and 3; jsrun.
_LAUNCHED = {
    "WORLD_SIZE": None,
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK",
    "MVP_COMM_WORLD_SIZE": "MVP_COMM_WORLD_RANK",
    "JSM_NAMESPACE_SIZE": "JSM_NAMESPACE_RANK",
}


def launched_ranks() -> int:
    """Returns the number of ranks that a launcher says it has started; 1 without a launcher."""
    return max(_launched().values(), default=1)


def _launched() -> dict[str, int]:
    return {name: int(os.environ[name]) for name in _LAUNCHED if os.environ.get(name, "").isdecimal()}


def refuse_launched() -> None:
    """Raises RuntimeError if a launcher has started other ranks. Called where torch.distributed is not initialised."""
    ranks = launched_ranks()
    if ranks > 1:
        name = next(name for name, number in _launched().items() if number == ranks)
        own, how = _LAUNCHED[name], ""
        if own is not None:
            how = (
                f', init_method="tcp://HOST:29500", rank=int(os.environ["{own}"]), '
                f'world_size=int(os.environ["{name}"])), where HOST is the host of rank 0'
            )
        raise RuntimeError(
            f"{name}={ranks} in the environment: a launcher has started {ranks} ranks, but torch.distributed is not "
            "initialised, so each would train a model of its own. Before you build the model call "
            f'torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo"{how or ")"}. For a '
            f"process that is to train alone, remove {name} from its environment, or call "
            'torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1).'
        )
