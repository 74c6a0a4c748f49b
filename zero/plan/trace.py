"""The tasks of a rehearsed step, in the order in which the host launches them. timeline.py gives them times.

host      Python, which launches everything else, and compares ranks
compute   the operators
gather    gathers, and what prepares them: a shard copied into its full buffer
reduce    reductions, and what prepares them: gradients copied into one buffer

A stream runs one task after another. A gather waits for the tasks that last read or wrote its buffers, and for those
that last read the full buffers released before its launch, because it takes their memory; not for other computing. What
is computed after a `wait` waits for the transfer. Values that the host reads are not recorded: a settled step reads
none from the device, and the step counts that torch's optimizers read are on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from zero._torch import CPU_ATTENTION, CPU_ATTENTION_BACKWARD
from zero.plan.hardware import Group
from zero.plan.meter import tensors_among
from zero.plan.transport import Kind

HOST, COMPUTE, GATHER, REDUCE = QUEUES = ("host", "compute", "gather", "reduce")

_FREE = ("empty", "view", "detach", "set_", "resize_", "alias", "_local_scalar_dense", "prim::device", "lift_fresh")
"""Operators with these in their names compute nothing."""

_OVERWRITING = ("copy_", "fill_", "zero_")
"""Operators whose names end so write into their first argument, which they do not read."""

_PICKING = ("embedding", "gather", "index", "index_select")
"""Operators that read only as many bytes of their first argument as they return."""

_INTENSIVE = ("gelu", "softmax", "exp", "log", "tanh", "erf", "sigmoid", "silu", "pow", "norm", "sqrt", "div")
"""Operators with these in their names compute more than sums and products of each element."""

_OF_HOSTS = 1 << 10
"""The most bytes of an all-reduce of numbers on the CPU, by which ranks agree before a step."""

Storage = ref[torch.UntypedStorage]


@dataclass(slots=True)
class Task:
    """nbytes: the bytes that an operator reads and writes, or those of a transfer. after: tasks that must have ended,
    besides those before it in its queue. kind, group: of a transfer, otherwise None. joined: launched with the task
    before it."""

    name: str
    queue: str
    nbytes: int = 0
    flops: int = 0
    dtype: torch.dtype = torch.float32
    elements: int = 0
    after: tuple[int, ...] = ()
    kind: Kind | None = None
    group: Group | None = None
    joined: bool = False

    @property
    def launches(self) -> int:
        """The number of launches by the host; none for a wait of one stream for another."""
        return int(self.nbytes > 0 and self.queue != HOST and not self.joined)


class Trace:
    """Records tasks while it is `on`. wanted: otherwise it is never on."""

    def __init__(self, wanted: bool = True) -> None:
        self.wanted, self.on = wanted, False
        self.tasks: list[Task] = []
        self._written: list[set[Storage]] = []
        """The storages that each task wrote."""
        self._touched: dict[Storage, int] = {}
        """The last task that read or wrote each storage."""
        self._gathered: list[Storage] = []
        """Full buffers that have not been released, as far as known."""
        self._released = -1
        """The last task that used a released one."""

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Records in this context."""
        self.on = self.wanted
        try:
            yield
        finally:
            self.on = False

    def _add(self, task: Task, written: set[Storage]) -> int:
        self.tasks.append(task)
        self._written.append(written)
        return len(self.tasks) - 1

    def operator(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Records an operator that has run."""
        if not self.on or (name := _name(func)) is None:
            return
        read = [*tensors_among(args), *tensors_among(kwargs.values())]
        written = [*tensors_among((kwargs.get("out", args[0]) if result is None else result,))]
        moved = returned = sum(map(_nbytes, written))
        if name in _PICKING:
            moved += returned
        else:
            unread = written if name.endswith(_OVERWRITING) else [*tensors_among((kwargs.get("out"),))]
            moved += sum(_nbytes(tensor) for tensor in read if not any(tensor is other for other in unread))
        task = Task(name, COMPUTE, moved)
        if (flops := _FLOPS.get(func.overloadpacket)) is not None:
            task.flops, task.dtype = flops(*args, **kwargs, out_val=result), read[0].dtype
        elif any(word in name for word in _INTENSIVE):
            task.elements = sum(tensor.numel() for tensor in written)
        self._use(task, _storages((*read, *written)), _storages(written))

    def multiply(
        self, tokens: int, nbytes: int, dtype: torch.dtype, storages: Sequence[torch.UntypedStorage], times: int
    ) -> None:
        """Records `times` multiplications of a parameter with so many tokens, for which no operator runs."""
        if self.on:
            task = Task("multiply", COMPUTE, times * nbytes, 2 * times * tokens * nbytes // dtype.itemsize, dtype)
            self._use(task, {ref(storage) for storage in storages}, set())

    def _use(self, task: Task, storages: set[Storage], written: set[Storage]) -> int:
        """Adds a task that also waits for those that used its storages last."""
        last = {self._touched[storage] for storage in storages if storage in self._touched}
        task.after = (*last, *task.after)
        place = self._add(task, written)
        self._touched.update(dict.fromkeys(storages, place))
        return place

    def launch(self, kind: Kind, buffers: Sequence[Tensor], nbytes: int, group: Group) -> Callable[[], None]:
        """Records a transfer. Returns the function that records the wait for it."""
        if not self.on:
            return lambda: None
        if kind == "exchange" or (kind == "all-reduce" and nbytes <= _OF_HOSTS):
            self._add(Task("ranks are compared", HOST, nbytes, kind="exchange", group=group), set())
            return lambda: None
        own = _storages(buffers)
        queue = GATHER if kind in ("gather", "broadcast") else REDUCE
        free: tuple[int, ...] = ()
        if queue is GATHER:
            free = self._free_memory()
            self._gathered += [storage for storage in own if storage not in self._gathered]
        self._prepare(queue, own, free)
        place = self._use(Task(kind, queue, nbytes, after=free, kind=kind, group=group), own, own)
        return partial(self._wait, place)

    def _prepare(self, queue: str, own: set[Storage], free: tuple[int, ...]) -> None:
        """Moves the latest tasks that write only into these buffers to the transfer's stream.

        Of copies one after another the first launches all: on tensors with values zero calls one operator for them.
        """
        place, later = len(self.tasks), None
        while place and self.tasks[place - 1].queue == COMPUTE and self._written[place - 1]:
            if not self._written[place - 1] <= own:
                break
            place -= 1
            task = self.tasks[place]
            task.queue, task.after = queue, (*task.after, *free)
            if later is not None and later.name == task.name == "copy_":
                later.joined = True
            later = task

    def _free_memory(self) -> tuple[int, ...]:
        gone = {one for one in self._gathered if (storage := one()) is None or not storage.nbytes()}
        self._gathered = [one for one in self._gathered if one not in gone]
        self._released = max(self._released, *(self._touched[one] for one in gone), -1)
        return () if self._released < 0 else (self._released,)

    def _wait(self, transfer: int) -> None:
        if self.on:
            self._add(Task(f"wait for {self.tasks[transfer].name}", COMPUTE, after=(transfer,)), set())


def _attention(q: Tensor, k: Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of scores and of weighted values; torch counts masked ones too."""
    return 4 * q.numel() * k.shape[-2]


def _attention_backward(_: Tensor, q: Tensor, k: Tensor, *__: Any, **___: Any) -> int:
    """FLOPs; scores are computed again."""
    return 10 * q.numel() * k.shape[-2]


_FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    CPU_ATTENTION: _attention,
    CPU_ATTENTION_BACKWARD: _attention_backward,
}
"""Formulas by operator: torch's, and those of the CPU's attention, which torch does not have."""


@cache
def _name(func: Any) -> str | None:
    """The operator's name; None if it computes nothing."""
    if func.is_view or any(word in func.name() for word in _FREE):
        return None
    return str(func.name()).partition("::")[2].partition(".")[0]


def _storages(tensors: Iterable[Tensor]) -> set[Storage]:
    return {ref(tensor.untyped_storage()) for tensor in tensors}


def _nbytes(tensor: Tensor) -> int:
    """Bytes of its memory; an expanded tensor has fewer than its elements would take."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
