"""Messages between ranks inside zero.join, the errors that they show, and the calls of users that they name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero.comm import Comm
from zero.measure.param_groups import options

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


# --------------------------------------------------------------------------------------------- methods and arguments

METHODS = {
    "step": True,
    "unscale_": True,
    "clip_grad_norm": True,
    "clip_grad_norm_": True,
    "grad_norm": True,
    "reduce": True,
    "sync_buffers": True,
    "update": False,
    "zero_grad": False,
}
"""The methods that ranks without data call too, and whether they may send something; schedulers' never do."""


def replace(one: Any, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Replaces the method `name` by the function, whose first argument is the method. Returns what undoes this."""
    original, before = getattr(one, name), vars(one).get(name)

    @wraps(original)  # with the marks that schedulers set on a step
    def method(_: Any, *args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    vars(one)[name] = replaced = MethodType(method, one)

    def restore() -> None:
        if vars(one).get(name) is replaced:  # a scheduler may have wrapped it since
            del vars(one)[name]
            vars(one).update({} if before is None else {name: before})

    return restore


def as_plain(value: Any, known: Sequence[object]) -> Any:
    """An argument as JSON; an object in `known` by its place there. Raises TypeError for others."""
    for place, one in enumerate(known):
        if value is one:
            return {"place": place}
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"a {type(value).__name__}, which cannot be sent to ranks without data. Inside zero.join call step() without a "
        "closure, after backward, and give other methods numbers."
    )


def from_plain(value: Any, known: Sequence[object]) -> Any:
    return known[value["place"]] if isinstance(value, dict) else value


def plain_options(optimizers: Sequence[Optimizer]) -> list[list[dict[str, Any]]]:
    """The options of each optimizer's groups that JSON can hold."""
    found: list[list[dict[str, Any]]] = []
    for optimizer in optimizers:
        found.append([])
        for group in optimizer.param_groups:
            values = {key: value.item() if _is_number(value) else value for key, value in options(group).items()}
            found[-1].append({key: value for key, value in values.items() if _is_plain(value)})
    return found


def take_options(group: dict[str, Any], given: dict[str, Any]) -> None:
    """Sets the options of the group to those of another rank, from `plain_options`."""
    for key, value in given.items():
        if _is_number(group.get(key)):
            group[key].fill_(value)
        else:
            group[key] = tuple(value) if isinstance(value, list) else value


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _is_plain(value: object) -> bool:
    several = isinstance(value, tuple) and all(map(_is_plain, value))
    return several or value is None or isinstance(value, (bool, int, float, str))
