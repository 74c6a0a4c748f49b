"""Messages between ranks inside zero.join, the errors that they show, and the calls of users that they name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero.measure.param_groups import options
from zero.shards.placement import Placement

Message = dict[str, Any]
"""From a rank with data: what it does next, `act`, and details of it. From other ranks there is no `act`."""

_NOTHING = -(1 << 62)


class Ranks:
    """The ranks of a model, by number: those of its shard group and, in hybrid strategies, of its replicate group."""

    def __init__(self, placement: Placement) -> None:
        name = "zero.join, where ranks announce what they do next and those without data wait for it"
        self._comms = [(comm, comm.channel(name)) for comm in placement.all_groups()]
        self.rank, self.world = 0, 1
        for comm, _ in self._comms:
            self.rank += comm.rank * self.world
            self.world *= comm.world

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
        most, least, flagged = largest.tolist()
        return bool(most == -least and not flagged)

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


METHODS = (
    *("step", "unscale_", "clip_grad_norm", "clip_grad_norm_", "grad_norm"),
    *("reduce", "sync_buffers", "update", "zero_grad"),
)
"""The methods that ranks without data call, too."""


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


def as_plain(value: Any, known: Sequence[object] = ()) -> Any:
    """An argument or option as JSON; an object in `known` by its place there. Raises TypeError for others."""
    for place, one in enumerate(known):
        if value is one:
            return {"place": place}
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple) and not any(isinstance(item, Tensor) for item in value):
        return [as_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"a {type(value).__name__}, which cannot be sent to ranks without data. Inside zero.join call step() without a "
        "closure, after backward, and give other methods numbers."
    )


def from_plain(value: Any, known: Sequence[object] = ()) -> Any:
    if isinstance(value, dict):
        return known[value["place"]]
    return tuple(map(from_plain, value)) if isinstance(value, list) else value


def plain_options(optimizers: Sequence[Optimizer]) -> list[list[dict[str, Any]]]:
    """The options of each optimizer's groups that JSON can hold."""
    return [[_plain_of(options(group)) for group in optimizer.param_groups] for optimizer in optimizers]


def _plain_of(given: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in given.items():
        with suppress(TypeError):
            found[key] = as_plain(value)
    return found


def take_options(optimizers: Sequence[Optimizer], given: list[list[dict[str, Any]]]) -> None:
    """Sets the options of the groups to those of another rank, from `plain_options`."""
    for optimizer, groups in zip(optimizers, given, strict=True):
        for group, plain in zip(optimizer.param_groups, groups, strict=True):
            for key, value in plain.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = from_plain(value)
