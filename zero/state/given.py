"""What was given to load: to every rank, or to the first alone, such as what it reads from a file. Then it is sent
tensor by tensor, as all ranks use it: each receives one and keeps its shard."""

from __future__ import annotations

import io
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero._torch.compiling import versions_in, with_versions
from zero._torch.tensors import WithoutMemory, tree_map
from zero.comm import Comm
from zero.state import leaves
from zero.tensor_parallel import parts

Label = Sequence[Any]
"""What is given (WEIGHT, STATE or OPTION), the number of the parameter or of the group, and the name or the key."""

WEIGHT, STATE, OPTION = "weight", "state", "option"

_IN_LINE = Tensor, np.generic, int, float, complex, str, type(None)
"""Weights, and what extra state of modules is told with its name; any other is sent as torch saves it."""

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


class Later(WithoutMemory):
    """A tensor without memory, whose values are received once it is used."""

    receive: Callable[[], Tensor]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.receive().clone()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(lambda one: one.receive() if isinstance(one, Later) else one, (args, kwargs or {}))
        return func(*args, **kwargs)


class FromFirst:
    """Sends what the first rank alone was given.

    device: where tensors are sent. failed: what was raised where a tensor of a mapping was used: torch's own
    load_state_dict takes it for an error of that tensor, and goes on with the next, which is not sent any more.
    """

    def __init__(self, comms: Sequence[Comm], device: torch.device) -> None:
        self._comms, self._device = comms, device
        self.is_first = all(comm.rank == 0 for comm in comms)
        self.failed: Exception | None = None

    def mapping(self, weights: Mapping[str, Any] | None) -> OrderedDict[str, Tensor]:
        """Collective. Returns the first rank's weights on every rank, as tensors that are sent once they are used: all
        ranks run the same code. Raises ValueError on every rank for what is no tensor."""
        contents: dict[str, Any] = {}
        try:
            weights = weights or {}
            for name, value in weights.items():
                if not isinstance(value, Tensor) or name.rpartition(".")[2] == "_extra_state":
                    raise ValueError(
                        f"{name!r} is extra state, and only tensors are sent. Pass the weights on every rank."
                    )
            entries = [(name, str(one.dtype).removeprefix("torch."), [*one.shape]) for name, one in weights.items()]
            contents = {"weights": entries, "versions": versions_in(weights)}
        except ValueError as error:
            self._tell({"problem": str(error)})
            raise ValueError(f"{_ALONE}: {error}") from error
        told = self._tell(contents)
        found: OrderedDict[str, Tensor] = OrderedDict()
        for name, dtype, shape in told["weights"]:
            like = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            found[name] = later = Later.like(like, device=torch.device("cpu"))
            later.receive = partial(self._pass_on, name, weights)
        return with_versions(found, told["versions"])

    def _pass_on(self, name: str, weights: Mapping[str, Any] | None) -> Tensor:
        """Collective. Returns one of the first rank's weights."""
        if self.failed is not None:
            raise self.failed
        try:
            items = [((WEIGHT, 0, name), weights[name])] if self.is_first and weights else []
            _, value = self._next(iter(items)) or (None, None)
        except Exception as error:
            self.failed = error
            raise
        assert isinstance(value, Tensor)
        return value

    def passed_on(self, items: Iterable[tuple[Label, Any]] | None) -> Iterator[tuple[Label, Any]]:
        """Collective. Yields the items of the first rank on every rank. items: None on the others."""
        remaining = iter(items or ())
        while (item := self._next(remaining)) is not None:
            yield item
            del item  # here and wherever it goes: no variable keeps a tensor while the next one comes

    def _next(self, remaining: Iterator[tuple[Label, Any]]) -> tuple[Label, Any] | None:
        """Collective. The first rank's next item; None if there are no more. Raises ValueError on every rank if it
        cannot be sent, or the user's iterator raises."""
        item, told, sent = None, dict[str, Any](), None
        try:
            if self.is_first and (item := next(remaining, None)) is not None:
                (what, number, key), leaf = item
                if what == WEIGHT and not isinstance(leaf, _IN_LINE):
                    torch.save(leaf, file := io.BytesIO())
                    torch.load(io.BytesIO(file.getvalue()), weights_only=True)  # raises for what others cannot read
                    told, leaf = {"saved": True}, torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
                of = f"{'group' if what == OPTION else 'parameter'} {number}"
                told |= {"label": item[0], "leaf": leaves.all_described({key: leaf}, of, what)[key]}
                if isinstance(leaf, Tensor) and leaf.dim():
                    sent = leaf.detach().to(self._device).contiguous()
        except Exception as error:
            self._tell({"problem": f"{type(error).__name__}: {error}"})
            raise ValueError(f"{_ALONE}: {error}") from error
        told = self._tell(told)
        if "label" not in told:
            return None
        if not self.is_first:
            item = told["label"], leaves.value_of(told["leaf"], self._device)
            sent = item[1] if "shape" in told["leaf"] else None
        for comm in self._comms:
            if sent is not None:
                comm.broadcast([sent])
        if "saved" in told and sent is not None and not self.is_first:
            file = io.BytesIO(sent.cpu().numpy().tobytes())
            item = told["label"], torch.load(file, map_location=self._device, weights_only=True)
        return item

    def _tell(self, told: dict[str, Any]) -> dict[str, Any]:
        """Collective. Returns what the first rank tells. Raises ValueError on the others if that is a problem."""
        text = json.dumps(told)
        for comm in self._comms:
            text = comm.all_gather_text(text if comm.rank == 0 else "")[0]
        heard: dict[str, Any] = json.loads(text)
        if "problem" in heard and not self.is_first:
            raise ValueError(f"{_ALONE}: {heard['problem']}")
        return heard
