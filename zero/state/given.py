"""What was given to load: to every rank, or to the first alone, such as what it reads from a file. Then it is sent
tensor by tensor: each rank receives one and keeps its shard."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zero.comm import Comm
from zero.state import leaves
from zero.tensor_parallel import parts

Label = Sequence[Any]
"""What is given (WEIGHT, STATE or OPTION), the number of the parameter or of the group, and the key of its state or
option."""

WEIGHT, STATE, OPTION = "weight", "state", "option"

_ALONE = "rank 0, which alone was given what is to be loaded"


def first_alone(comms: Sequence[Comm], what: str, given: object, params: Iterable[Tensor]) -> bool:
    """Collective. Returns whether the first of several ranks alone was given something.

    comms: the groups of ranks, one after another, as Placement.all_groups. given: None, or an empty dictionary, if
    nothing. Raises ValueError on every rank if it is neither the first nor all, and if it is the first, but ranks have
    other parts of the parameters.
    """
    flags = "0" if given is None or given == {} else "1"
    for comm in comms:
        flags = "".join(comm.all_gather_text(flags))
    having = [rank for rank, flag in enumerate(flags) if flag == "1"]
    if having not in ([0], [*range(len(flags))]):
        who = f"only {', '.join(f'rank {rank}' for rank in having)} of {len(flags)}" if having else "no rank"
        raise ValueError(f"{what}: {who} was given any. Pass them on every rank, or on rank 0 and None elsewhere.")
    alone = having == [0] and len(flags) > 1
    if alone and parts.ranks(params) is not None:
        raise ValueError(
            f"{what}: rank 0 alone was given them, but the model is tensor parallel. Pass them on every rank."
        )
    return alone


class FromFirst:
    """Sends what the first rank alone was given: it calls `send`, and `end` or `fail`, and the others `received`.

    device: where tensors are sent.
    """

    def __init__(self, comms: Sequence[Comm], device: torch.device) -> None:
        self._comms, self._device = comms, device
        self.is_first = all(comm.rank == 0 for comm in comms)

    def send(self, label: Label, leaf: Any) -> None:
        """Collective with `received`. leaf: a tensor, or a value of an optimizer's state."""
        what, number, key = label
        of = f"{'group' if what == OPTION else 'parameter'} {number}"
        self._tell({"label": label, "leaf": leaves.all_described({key: leaf}, of, what)[key]})
        if isinstance(leaf, Tensor) and leaf.dim():
            self._broadcast(leaf.detach().to(self._device).contiguous())

    def end(self, result: Any = None) -> None:
        """Collective with `received`. result: what JSON can say, for `result` on the other ranks."""
        self._tell({"result": result})

    def fail(self, error: Exception) -> None:
        """Collective with `received`, which raises ValueError."""
        self._tell({"problem": f"{type(error).__name__}: {error}"})

    def received(self) -> Iterator[tuple[Label, Any]]:
        """Collective. Yields what the first rank sends. `result` is its result afterwards."""
        while True:
            told = self._tell({})
            if "problem" in told:
                raise ValueError(f"{_ALONE}: {told['problem']}")
            if "label" not in told:
                self.result = told["result"]
                return
            described = told["leaf"]
            if "shape" not in described:
                yield told["label"], leaves.value_of(described)
                continue
            into = torch.empty(described["shape"], dtype=leaves.dtype_of(described), device=self._device)
            self._broadcast(into)
            yield told["label"], into

    def ending(self, make: Callable[[], Any]) -> Any:
        """Collective with `received`, after which others have the `result`: of a call on the first rank that sends.
        Raises ValueError on every rank if the call raises."""
        try:
            result = make()
        except Exception as error:  # from the user's modules or values: every rank must raise it
            self.fail(error)
            raise ValueError(f"{_ALONE}: {type(error).__name__}: {error}") from error
        self.end([*result] if isinstance(result, tuple) else result)
        return result

    def passed_on(self, items: Iterable[tuple[Label, Any]] | None) -> Iterator[tuple[Label, Any]]:
        """Collective. Yields the items of the first rank on every rank. items: None on the others."""
        if not self.is_first:
            yield from self.received()
            return
        remaining = iter(items or ())
        while (item := self._next(remaining)) is not None:
            yield item
        self.end()

    def _next(self, remaining: Iterator[tuple[Label, Any]]) -> tuple[Label, Any] | None:
        """Sends the next item. Raises ValueError on every rank if there is none because the user's iterator raises."""
        try:
            item = next(remaining, None)
            if item is not None:
                self.send(*item)
        except Exception as error:
            self.fail(error)
            raise ValueError(f"{_ALONE}: {error}") from error
        return item

    def _tell(self, told: dict[str, Any]) -> dict[str, Any]:
        """Returns what the first rank tells."""
        text = json.dumps(told)
        for comm in self._comms:
            text = comm.all_gather_text(text if comm.rank == 0 else "")[0]
        heard: dict[str, Any] = json.loads(text)
        return heard

    def _broadcast(self, tensor: Tensor) -> None:
        for comm in self._comms:
            comm.broadcast([tensor])
