"""The transport over Gloo, for tensors on the CPU between hosts.

CPU ms of a rank on two cores over Gloo, 4M float32 at 2 and 4 ranks: a broadcast a shard 3.8, 4.2, all-gather 6.3, 6.4
(as much as one of 1 KiB to 128 KiB); all-to-all and sum 4.2, 5.6, a reduce a shard 8.7, 7.3, reduce-scatter 12.9, 12.0.
Point-to-point messages between all ranks took 3.4, 4.1 and 4.6, 4.1, but small ones stalled for a scheduler's tick (4
ms, half of it spinning) whenever cores were scarce: Gloo's event loop spins while the sending thread is preempted with
its lock held. With all-gathers of small messages a step of 64 small units takes 0.89 to 0.98 of the time, but Gloo ends
the process where one meets a comparison, an all-gather of another length, of a rank that is out of step.

A lane is a group of its own, with its own connections. Gloo sends a message once the receiver has said that it is
ready, and what says so waits behind all that the receiver itself sends on the same connection: two ranks that send one
another large messages take turns. Where each connection carries them one way they do not. Over links of 1 Gbit/s, at 2,
4 and 8 ranks of 109 MB together, of which the links take 438, 657, 766 ms: a gather on one lane 912, 1,580, 2,615, on a
lane an owner 458, 700, 811; one all-to-all 889, 870, 838, two 463, 690, 808. A gather of 8 KiB a rank, CPU ms at 2 and
4 ranks: 0.24, 0.90 on one lane, 0.21, 0.53 on one an owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zero.comm.oplog import Log
from zero.comm.packing import real
from zero.comm.process_group import ALL_TO_ALL, ProcessGroupTransport, never_drop
from zero.comm.transport import Message
from zero.comm.work import Work

LANES = 8
"""Most lanes of a group."""
# Bytes from which an all-to-all goes to higher and to lower ranks on lanes of their own. The second one takes 0.05 ms
# of CPU time; to take turns takes as long as half of this many bytes are on the wire, 1 ms at 1 Gbit/s.
_LARGE = 1 << 18


class Gloo(ProcessGroupTransport):
    """lanes: makes groups of the same ranks, such as ProcessGroupGloo, each collectively. All but the first are made
    when shards or large messages are first sent: ranks that only compare operations need none."""

    name, overlaps = "gloo", False

    def __init__(self, log: Log, lanes: Iterator[Any], rank: int, world: int) -> None:
        self._made = made = [next(lanes)]
        super().__init__(log, made[0], rank, world, blocks=True)
        self._others = islice(lanes, min(world, LANES) - 1)
        # The list: it also has the lanes that are made later. Not `self`, which the log would keep.
        log.failure.at_failure.append(lambda _: never_drop(made))

    @property
    def _lanes(self) -> Sequence[Any]:
        """Collective the first time, after ranks have compared what they do."""
        self._made += self._others  # of which then none are left
        return self._made

    def _lane(self, owner: int) -> Any:
        lanes = self._lanes
        return lanes[owner % len(lanes)]

    def gather(self, full: Tensor, bounds: Sequence[int], channel: int) -> Work:
        self.log.append(channel, full.nbytes, self.compare)
        return self._launch(channel, full, self._broadcast_shards, full, bounds)

    def _exchange(self, messages: Sequence[Message], received: Sequence[Tensor]) -> list[dist.Work | None]:
        # The size first: to ask for `_lanes` connects them all, which small messages alone do not need.
        if sum(message.nbytes for message, _ in messages) < _LARGE or len(lanes := self._lanes) == 1:
            return super()._exchange(messages, received)
        rank, works = self._rank, []
        for rows, (message, counts) in zip(received, messages, strict=True):
            into, sent, from_each = real(rows.view(-1)), real(message), [counts[rank]] * self._world
            end, start = (rank + 1) * counts[rank], sum(counts[:rank])
            upwards = into[:end], sent[start:], _below(rank + 1, from_each), _from(rank, counts)
            downwards = into[end:], sent[:start], _from(rank + 1, from_each), _below(rank, counts)
            for lane, given in ((lanes[0], upwards), (lanes[-1], downwards)):
                works.append(getattr(lane, self._to_reduce.all_to_all)(*given, ALL_TO_ALL))
        return works


def _below(rank: int, counts: Sequence[int]) -> list[int]:
    """Returns the counts of lower ranks, and zeros for the others."""
    return [*counts[:rank], *[0] * (len(counts) - rank)]


def _from(rank: int, counts: Sequence[int]) -> list[int]:
    """Returns the counts from this rank on, and zeros for those below."""
    return [*[0] * rank, *counts[rank:]]
