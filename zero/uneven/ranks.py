"""What ranks tell one another inside zero.join, and what keeps them from going on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from zero.comm import Comm


class Ranks:
    """Those of a model, by number: of one group, or of the two of a hybrid strategy, which is sharded within the first
    and replicated across the second."""

    def __init__(self, comms: Sequence[Comm]) -> None:
        name = "zero.join, where ranks tell what they do next, and those without data wait for it"
        self._comms = [(comm, comm.channel(name)) for comm in comms]
        self.rank, self.world = 0, 1
        for comm in comms:
            self.rank += comm.rank * self.world
            self.world *= comm.world

    def compare(self, lines: Sequence[str], problem: str | None) -> None:
        """Collective. Raises ValueError on every rank where lines differ or one has a problem."""
        for comm, _ in self._comms:
            comm.compare("what zero.join was given", lines, problem)

    def agree(self, *, flag: bool) -> bool:
        """Collective. Whether any rank has the flag."""
        for comm, channel in self._comms:
            flag = comm.agree(channel, flag=flag)
        return flag

    def gather(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Collective. The messages of all ranks."""
        told = [message]
        for comm, _ in self._comms:
            texts = comm.all_gather_text(json.dumps(told))
            told = [one for text in texts for one in json.loads(text)]
        return told

    def broadcast(self, tensors: Sequence[Tensor], source: int) -> None:
        """Collective."""
        for comm, _ in self._comms:
            comm.broadcast(tensors, source % comm.world)
            source //= comm.world


def problem_in(messages: Sequence[dict[str, Any]], active: Sequence[int], *, throw: bool) -> str | None:
    """Why ranks cannot go on, in words for the user; None if they can."""
    for rank, message in enumerate(messages):
        if message.get("problem"):
            return f"rank {rank}: {message['problem']}"
    ended = [rank for rank in range(len(messages)) if rank not in active]
    if not active:
        return None
    if ended and throw:
        return f"rank {ended[0]} exhausted all inputs, and zero.join has throw_on_early_termination=True."
    empty = [rank for rank in ended if not messages[rank]["batches"]]
    if empty:
        return (
            f"rank {empty[0]} has had no batch inside zero.join, so it has none to repeat while others train. Give "
            "each rank one batch at least."
        )
    first = messages[active[0]]["act"]
    for rank in active:
        if messages[rank]["act"] != first:
            return (
                f"ranks with data are out of step inside zero.join: rank {active[0]} does {first}, but rank {rank} "
                f"does {messages[rank]['act']}. They must do the same until their data ends; evaluate outside of it."
            )
    return None
