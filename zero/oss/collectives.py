"""What is sent through torch.distributed. No other file of this package calls it to send.

Two operations carry the three stages. They map to collectives so:

- gather: a broadcast a segment; where segments are equal and the backend is not Gloo, the single-tensor all-gather.
- reduce: all-to-all, from where the gradients were written; the owner adds up.

CPU ms of a rank on two cores over Gloo, 4M float32 at 2 and 4 ranks: a broadcast a segment 3.8, 4.2, all-gather 6.3,
6.4; all-to-all and sum 4.2, 5.6, a reduce a segment 8.7, 7.3, reduce-scatter 12.9, 12.0. Plain messages from each rank
to each other took 3.4, 4.1 and 4.6, 4.1, but small ones stalled for a scheduler's tick (4 ms, half of it spinning)
whenever cores were scarce: Gloo's event loop spins while the sending thread is preempted with its lock held.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from zero.oss.traffic import count

_BATCH = 1 << 24
"""Bytes of a message that is put together from several tensors."""


class Collectives:
    """Those of one process group, seen from one of its ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)

    def backend(self, device: torch.device) -> str:
        return str(self._group._get_backend(device).name()).lower()

    def control_device(self) -> torch.device:
        """Where small tensors must lie to be sent in this group."""
        kinds = {device.type for device in self._group._device_types}
        return torch.device("cpu") if "cpu" in kinds else torch.device(kinds.pop())

    @property
    def timeout(self) -> timedelta:
        """How long tensors on the CPU are waited for."""
        timeout: timedelta = self._group._get_backend(torch.device("cpu")).options._timeout
        return timeout

    # -------------------------------------------------------------------------------------- small messages

    def exchange(self, tensor: Tensor) -> list[Tensor]:
        """What every rank gives, of one shape, by rank, on the CPU."""
        sent = tensor.to(self.control_device())
        received = [torch.empty_like(sent) for _ in range(self._world)]
        dist.all_gather(received, sent, group=self._group)
        return [one.cpu() for one in received]

    def exchange_bytes(self, data: bytes, limit: int = 512) -> list[bytes]:
        """The same of at most so many bytes, whatever the length on each rank."""
        assert len(data) + 4 <= limit
        framed = len(data).to_bytes(4, "little") + data
        padded = torch.frombuffer(bytearray(framed.ljust(limit, b"\0")), dtype=torch.uint8)
        received = [one.numpy().tobytes() for one in self.exchange(padded)]
        return [one[4 : 4 + int.from_bytes(one[:4], "little")] for one in received]

    def launch_exchange(self, tensor: Tensor) -> tuple[dist.Work, Tensor]:
        """The same of one flat tensor on the CPU; what comes is a row a rank."""
        heard = tensor.new_empty(self._world * len(tensor))
        work = dist.all_gather_single(heard, tensor, group=self._group, async_op=True)
        return work, heard.view(self._world, -1)

    # -------------------------------------------------------------------------------------- whole tensors

    def broadcast(self, tensors: Sequence[Tensor], source: int) -> None:
        """Overwrites the tensors by those of rank `source`, few large messages at a time."""
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel():
                kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for same in kinds.values():
            for batch in _batches(same, _BATCH):
                flat = torch.cat([tensor.detach().reshape(-1) for tensor in batch])
                dist.broadcast(flat, group=self._group, group_src=source)
                count(other=flat.nbytes * (self._world - 1) if self._rank == source else 0)
                for tensor, values in zip(batch, flat.split([t.numel() for t in batch]), strict=True):
                    tensor.detach().copy_(values.view(tensor.shape))

    def all_reduce(self, tensor: Tensor, *, maximum: bool) -> None:
        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        dist.all_reduce(tensor, op=op, group=self._group)
        count(other=2 * tensor.nbytes * (self._world - 1) // self._world)

    def collect(self, owner: int, tensor: Tensor, to: int | None) -> None:
        """Brings a flat tensor from its owner to rank `to`, or (None) to all."""
        if to is None:
            dist.broadcast(tensor, group=self._group, group_src=owner)
        elif self._rank == owner != to:
            dist.send(tensor, group=self._group, group_dst=to)
        elif self._rank == to != owner:
            dist.recv(tensor, group=self._group, group_src=owner)
        if self._rank == owner:
            count(other=tensor.nbytes * (self._world - 1 if to is None else int(owner != to)))

    # -------------------------------------------------------------------------------------- the segments

    def launch_gather(self, full: Tensor | None, segments: Sequence[Tensor]) -> list[dist.Work]:
        """Every rank's segment to every rank. `full` is what the segments make up, if they make up one tensor."""
        equal = len({segment.numel() for segment in segments}) == 1
        if full is not None and equal and self.backend(full.device) != "gloo":
            return [dist.all_gather_single(full, segments[self._rank], group=self._group, async_op=True)]
        return [
            dist.broadcast(segment, group=self._group, group_src=owner, async_op=True)
            for owner, segment in enumerate(segments)
            if segment.numel()
        ]

    def launch_reduce(self, messages: Sequence[tuple[Tensor, Sequence[int]]]) -> tuple[list[dist.Work], list[Tensor]]:
        """Every rank's share of each message to that rank; of each message, what comes here is a row a rank."""
        received, works = [], []
        for message, counts in messages:
            own = counts[self._rank]
            buffer = message.new_empty(own * self._world)
            received.append(buffer.view(self._world, own))
            works.append(
                dist.all_to_all_single(
                    buffer, message, [own] * self._world, list(counts), group=self._group, async_op=True
                )
            )
        return works, received


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
