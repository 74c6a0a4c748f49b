"""Messages between ranks inside zero.join, and the errors that they show."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zero.comm import Comm

Message = dict[str, Any]
"""From a rank with data: what it does next, `act`, and details of it. From other ranks there is no `act`."""

_NOTHING = -(1 << 62)


class Ranks:
    """The ranks of a model, by number: those of its shard group and, in hybrid strategies, of its replicate group."""

    def __init__(self, comms: Sequence[Comm]) -> None:
        name = "zero.join, where ranks announce what they do next and those without data wait for it"
        self._comms = [(comm, comm.channel(name)) for comm in comms]
        self.rank, self.world = 0, 1
        for comm in comms:
            self.rank += comm.rank * self.world
            self.world *= comm.world

    def compare(self, lines: Sequence[str], problem: str | None) -> None:
        """Collective. Raises ValueError on every rank where lines differ or one has a problem."""
        for comm, _ in self._comms:
            comm.compare("the arguments of zero.join", lines, problem)

    def agree(self, act: Message | None, *, flag: bool = False) -> bool:
        """Collective. Whether all ranks do the same next, and none has the flag. act: None if data has ended."""
        signature = [_NOTHING, _NOTHING, 1]
        if act is not None:
            digest = int.from_bytes(hashlib.sha256(json.dumps(act).encode()).digest()[:7], "little")
            signature = [digest, -digest, int(flag)]
        largest = torch.tensor(signature, device="cpu")
        for comm, channel in self._comms:
            comm.all_reduce(largest, maximum=True, channel=channel)
            comm.begin_schedule()
        return largest.tolist() == [largest[0], -largest[0], 0]

    def gather(self, message: Message) -> list[Message]:
        """Collective. The messages of all ranks."""
        messages = [message]
        for comm, _ in self._comms:
            texts = comm.all_gather_text(json.dumps(messages))
            messages = [one for text in texts for one in json.loads(text)]
        return messages

    def broadcast(self, tensors: Sequence[Tensor], source: int) -> None:
        """Collective. Overwrites the tensors with those of rank `source`."""
        for comm, _ in self._comms:
            comm.broadcast(tensors, source % comm.world)
            source //= comm.world


def problem_in(messages: Sequence[Message], active: Sequence[int], *, throw: bool) -> str | None:
    """Why ranks cannot go on, as an error message for the user; None if they can. active: the ranks that have data."""
    for rank, message in enumerate(messages):
        if message.get("problem"):
            return f"rank {rank}: {message['problem']}"
    if not active:
        return None
    ended = [rank for rank in range(len(messages)) if rank not in active]
    if ended and throw:
        return f"the data of rank {ended[0]} has ended, and zero.join was given throw_on_early_termination=True."
    empty = [rank for rank in ended if not messages[rank]["forwards"]]
    if empty:
        return (
            f"rank {empty[0]} has had no batch inside zero.join, so it has none to repeat while others train. Give "
            "each rank one batch at least."
        )
    first = messages[active[0]]["act"]
    for rank in ended:
        if min(first.get("of", ()), default=messages[rank]["forwards"] + 1) <= messages[rank]["forwards"]:
            return (
                f"the data of rank {rank} ended between a forward and its backward, which it cannot repeat. End loops "
                "after a backward."
            )
    for rank in active:
        if messages[rank]["act"] != first:
            return (
                f"ranks with data are out of step inside zero.join: rank {active[0]} does {first}, but rank {rank} "
                f"does {messages[rank]['act']}. They must do the same until their data ends; evaluate outside of it."
            )
    return None
