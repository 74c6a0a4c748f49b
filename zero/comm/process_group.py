"""What is sent through torch.distributed. No other file of this package calls it to send.

Two operations carry the three stages. They map to collectives so:

- gather: a broadcast a segment; where segments are equal and the backend is not Gloo, the single-tensor all-gather.
- reduce: all-to-all, from where the gradients were written; the owner adds up.

CPU ms of a rank on two cores over Gloo, 4M float32 at 2 and 4 ranks: a broadcast a segment 3.8, 4.2, all-gather 6.3,
6.4; all-to-all and sum 4.2, 5.6, a reduce a segment 8.7, 7.3, reduce-scatter 12.9, 12.0. Plain messages from each rank
to each other took 3.4, 4.1 and 4.6, 4.1, but small ones stalled for a scheduler's tick (4 ms, half of it spinning)
whenever cores were scarce: Gloo's event loop spins while the sending thread is preempted with its lock held.

Tensors on a GPU go by NCCL, on a stream of its own that is ordered by events with the stream that computes: neither
launching nor waiting keeps the host. What ranks tell each other to compare is on the CPU and goes by Gloo.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from zero._torch import all_gather_of_one_tensor, timeout_of
from zero.oss.traffic import count


class Collectives:
    """Those of one process group, seen from one of its ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._host_group = group, _host_group(group)
        self._backends = {**_backends(group), "cpu": _backends(self._host_group)["cpu"]}
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)

    def _carrier(self, device: torch.device) -> dist.ProcessGroup:
        return self._host_group if device.type == "cpu" else self._group

    def backend(self, device: torch.device) -> str:
        return self._backends.get(device.type, "")

    @property
    def timeout(self) -> timedelta:
        """How long tensors on the CPU are waited for."""
        return timeout_of(self._host_group, torch.device("cpu"))

    # -------------------------------------------------------------------------------------- small messages

    def exchange(self, tensor: Tensor) -> list[Tensor]:
        """What every rank gives, of one shape and on the CPU, by rank."""
        received = [torch.empty_like(tensor) for _ in range(self._world)]
        dist.all_gather(received, tensor, group=self._host_group)
        return received

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
        work = all_gather_of_one_tensor()(heard, tensor, group=self._host_group, async_op=True)
        return work, heard.view(self._world, -1)

    # -------------------------------------------------------------------------------------- whole tensors

    def broadcast(self, tensor: Tensor, source: int) -> None:
        dist.broadcast(tensor, group=self._carrier(tensor.device), group_src=source)

    def all_reduce(self, tensor: Tensor, *, maximum: bool) -> None:
        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        dist.all_reduce(tensor, op=op, group=self._carrier(tensor.device))

    def collect(self, owner: int, tensor: Tensor, to: int | None) -> None:
        """Brings a flat tensor from its owner to rank `to`, or (None) to all."""
        group = self._carrier(tensor.device)
        if to is None:
            dist.broadcast(tensor, group=group, group_src=owner)
        elif self._rank == owner != to:
            dist.send(tensor, group=group, group_dst=to)
        elif self._rank == to != owner:
            dist.recv(tensor, group=group, group_src=owner)
        if self._rank == owner:
            count(other=tensor.nbytes * (self._world - 1 if to is None else int(owner != to)))

    # -------------------------------------------------------------------------------------- the segments

    def launch_gather(self, full: Tensor | None, segments: Sequence[Tensor]) -> list[dist.Work]:
        """Every rank's segment to every rank. `full` is what the segments make up, if they make up one tensor."""
        equal = len({segment.numel() for segment in segments}) == 1
        device = segments[0].device
        group = self._carrier(device)
        if full is not None and equal and self.backend(device) != "gloo":
            return [all_gather_of_one_tensor()(full, segments[self._rank], group=group, async_op=True)]
        return [
            dist.broadcast(segment, group=group, group_src=owner, async_op=True)
            for owner, segment in enumerate(segments)
            if segment.numel()
        ]

    def launch_reduce(self, messages: Sequence[tuple[Tensor, Sequence[int]]]) -> tuple[list[dist.Work], list[Tensor]]:
        """Every rank's share of each message to that rank; of each message, what comes here is a row a rank."""
        received, works = [], []
        group = self._carrier(messages[0][0].device)
        for message, counts in messages:
            own = counts[self._rank]
            buffer = message.new_empty(own * self._world)
            received.append(buffer.view(self._world, own))
            works.append(
                dist.all_to_all_single(buffer, message, [own] * self._world, list(counts), group=group, async_op=True)
            )
        return works, received


_host_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def _host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group itself if it sends what is on the CPU; otherwise (as with NCCL alone) the same ranks over Gloo.

    Collective over the ranks of the group, the first time.
    """
    backends = _backends(group)
    if "cpu" in backends:
        return group
    if group not in _host_groups:
        _host_groups[group] = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=timeout_of(group, torch.device(next(iter(backends)))),
            backend="gloo",
            use_local_synchronization=True,
        )
    return _host_groups[group]


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend that sends what is on a device, by type of device."""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).lower().split(","))
