"""A process group that is made of a store, apart from torch.distributed's own groups: its members may be in different
jobs, each with a default group of its own. When a member is gone, the group is dropped and another one is made.

Tensors are sent through the memory of the host, by Gloo.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_CONNECTS = 10.0
"""Seconds in which all members must have come, at most."""


class StoreGroup:
    """Collective over `world` members, each with another `rank`. Transfers that fail raise RuntimeError; `close` must
    follow, so that the members that wait for this one raise as well.

    host, port: of a TCPStore. name: another one for each group. timeout: seconds that members wait for one another in
        transfers; all must come to the constructor within a few seconds.
    """

    def __init__(self, host: str, port: int, name: str, rank: int, world: int, timeout: float) -> None:
        soon = timedelta(seconds=min(timeout, _CONNECTS))
        store = dist.PrefixStore(name, dist.TCPStore(host, port, is_master=False, timeout=soon))
        self.world = world
        self._group: Any = dist.ProcessGroupGloo(store, rank, world, soon)
        self._group.set_timeout(timedelta(seconds=timeout))

    def close(self) -> None:
        """Closes the connections to the other members."""
        del self._group

    def average(self, flat: Tensor) -> Tensor:
        """Collective. Returns the mean over the members, summed in the order of their ranks. Keeps `flat`, which has
        one dimension, as it is."""
        padded = torch.zeros(-(-len(flat) // self.world) * self.world, dtype=flat.dtype, device="cpu")
        padded[: len(flat)] = flat
        parts = torch.empty_like(padded)
        self._group.alltoall_base(parts, padded, [], []).wait()
        first, *others = parts.chunk(self.world)
        total = first.to(torch.promote_types(flat.dtype, torch.float32))
        for part in others:
            total += part
        mean = total.mul_(1 / self.world).to(flat.dtype)
        self._group.allgather([[*padded.chunk(self.world)]], [mean]).wait()
        return padded[: len(flat)]

    def maximum(self, values: Tensor) -> Tensor:
        """Collective. Returns the maximum over the members, of a tensor in the memory of the CPU."""
        found = values.clone()
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._group.allreduce([found], options).wait()
        return found

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Collective. Returns the tensor of the first member, in the memory of the CPU."""
        sent = tensor.detach().to("cpu", copy=True).contiguous()
        if sent.numel():
            self._group.broadcast([_bytes(sent)], dist.BroadcastOptions()).wait()
        return sent

    def send(self, tensor: Tensor, to: int) -> None:
        """Sends a tensor to a member, who knows its shape and dtype."""
        if tensor.numel():
            self._group.send([_bytes(tensor.detach().cpu().contiguous())], to, 0).wait()

    def receive(self, like: Tensor, source: int) -> Tensor:
        """Returns the tensor that a member sends, in the memory of the CPU. like: has its shape and dtype."""
        received = torch.empty(like.shape, dtype=like.dtype, device="cpu")
        if received.numel():
            self._group.recv([_bytes(received)], source, 0).wait()
        return received


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
