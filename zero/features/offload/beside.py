"""Steps of shards in a thread beside the training, which goes on: in backward, and until the next forward. Before them
it widens gradients that left the device in 16 bits.

A step reads the gradients, options and state that its parameters had when it began. Whoever reads what it writes waits:
ShardGroup.finish_step for the shard, AwaitedState for the optimizer's state. torch's kernels release the interpreter's
lock.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from zero._torch import has_values, pinned_for, while_nothing_compiles, writes_so_far
from zero.comm import Handle
from zero.features.offload import norms
from zero.features.offload.pieces import GroupStep, Unwidened, in_the_cache
from zero.measure.kinds import ELEMENTWISE
from zero.shards.home import Home, part_of
from zero.shards.shard_group import ShardGroup


@dataclass(eq=False)
class Task:
    """One step, or another job. arrived: whether its gradients have. `ended` has no result."""

    step: Callable[[], None]
    arrived: Callable[[], bool]
    ended: Future[None] = field(default_factory=Future)


class Tasks:
    """Tasks that have not begun."""

    def __init__(self) -> None:
        self._by_urgency: deque[Task] = deque()
        self._by_arrival: dict[Task, None] = {}
        self._lock = Lock()

    def __bool__(self) -> bool:
        return bool(self._by_urgency)

    def add(self, task: Task, *, urgent: bool) -> None:
        with self._lock:
            (self._by_urgency.appendleft if urgent else self._by_urgency.append)(task)
            self._by_arrival[task] = None

    def take(self) -> Task:
        """The most urgent one of which the gradients have arrived, else the one whose gradients will arrive first."""
        with self._lock:
            task = next((task for task in self._by_urgency if task.arrived()), None) or next(iter(self._by_arrival))
            self._by_urgency.remove(task)
            del self._by_arrival[task]
            return task


class Worker:
    """The thread, which runs tasks one after another."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._tasks = Tasks()
        self._unfinished: dict[str, set[Future[None]]] = defaultdict(set)

    def start(self, task: Task, *, urgent: bool, at_most: int | None, kind: str = "steps") -> Handle:
        """Returns a handle whose `wait` waits for the task, and raises its error.

        urgent: it is needed before those that wait. at_most: how many of its kind may wait or run; waits until there
        are fewer.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="zero-steps")
        unfinished = {one for one in self._unfinished[kind] if not one.done()}
        while at_most is not None and len(unfinished) >= at_most:
            unfinished = wait(unfinished, return_when="FIRST_COMPLETED").not_done
        self._unfinished[kind] = {*unfinished, task.ended}
        self._tasks.add(task, urgent=urgent)
        self._thread.submit(self._run_next)
        return Handle(task.ended.result)

    def _run_next(self) -> None:
        task = self._tasks.take()
        try:
            without_gradients(task.step)
        except BaseException as error:
            task.ended.set_exception(error)
        else:
            task.ended.set_result(None)


def without_gradients(step: Callable[[], None]) -> None:
    with torch.no_grad():
        step()


WORKER = Worker()


class AwaitedState(MutableMapping[Tensor, Any]):
    """An optimizer's state. Waits for the steps of `groups` before anyone reads or writes it."""

    def __init__(self, state: MutableMapping[Tensor, Any]) -> None:
        self.without_waiting = state
        self.groups: set[ShardGroup] = set()

    @property
    def _state(self) -> MutableMapping[Tensor, Any]:
        while self.groups:
            self.groups.pop().finish_step()
        return self.without_waiting

    def __getitem__(self, param: Tensor) -> Any:
        return self._state[param]

    def __setitem__(self, param: Tensor, state: Any) -> None:
        self._state[param] = state

    def __delitem__(self, param: Tensor) -> None:
        del self._state[param]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def __contains__(self, param: object) -> bool:  # the base class's would make an entry in a defaultdict
        return param in self._state

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict, {**self._state})


def step_beside(
    group: ShardGroup,
    optimizer: Optimizer,
    params: Sequence[nn.Parameter],
    step: Callable[[GroupStep], None],
    rounded: Tensor | None,
    *,
    urgent: bool,
    at_most: int | None,
) -> None:
    """Steps these parameters, the shards of one group, in the thread.

    step: takes a step. rounded: gets the stepped shard, in its own dtype. urgent, at_most: as of Worker.start.

    Raises RuntimeError, when the step is waited for, if gradients were written before it ended.
    """
    stepped, awaited = group.stepped, _awaited_state(optimizer)

    def round_part(part: slice) -> None:
        if rounded is not None:
            rounded[part].copy_(stepped[part])

    one = GroupStep(group, _as_now(optimizer, awaited.without_waiting, params), round_part)
    awaited.groups.add(group)
    gradients = one.gradients
    written = writes_so_far(gradients)

    def run() -> None:
        one.arrive()
        with while_nothing_compiles():
            step(one)
        if writes_so_far(gradients) != written:
            raise RuntimeError(
                f"gradients of {group.label} were written while a step beside the training (CPUOffload(overlap=True)) "
                "read them, so that what it stepped is undefined. Clear gradients by zero_grad(), which sets them to "
                "None, not to zeros, and change them before `step`, or offload without overlap. Load a checkpoint."
            )

    increment_version([*params])  # so that autograd refuses tensors that it saved of them
    group.step_beside(WORKER.start(Task(run, one.arrived), urgent=urgent, at_most=at_most), rounded)


class Widening:
    """The event after which a gradient that left the device in 16 bits has its values, in the dtype of its shard."""

    def __init__(self, narrow: Tensor, departure: Any, gradient: Tensor) -> None:
        """departure: the event after which `narrow` has its values."""
        left = [narrow]  # memory is used again as soon as it is read

        def widen() -> None:
            departure.synchronize()
            gradient.data.copy_(left.pop())  # torch is to count the writes of others

        self._task = Task(widen, departure.query)
        self._handle: Handle | None = WORKER.start(self._task, urgent=True, at_most=_WIDENED, kind="gradients")

    def query(self) -> bool:
        return self._task.ended.done()

    def synchronize(self) -> None:
        """Waits, and raises the first time what was raised in the thread. The thread calls it after it has widened."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()


_WIDENED = 4
"""Gradients that may be on their way to be widened in backward. No more than these lie on the host twice."""


def _awaited_state(optimizer: Optimizer) -> AwaitedState:
    state: Any = optimizer.state
    awaited = state if isinstance(state, AwaitedState) else AwaitedState(state)
    optimizer.state = awaited  # type: ignore[assignment]
    return awaited


def _as_now(optimizer: Optimizer, state: MutableMapping[Tensor, Any], params: Sequence[nn.Parameter]) -> Optimizer:
    """Returns an optimizer of those parameters that have gradients, with the values, gradients, state and options that
    they have now, whatever becomes of the parameters."""
    trained = [param for param in params if param.grad is not None]
    part = part_of(optimizer, trained)
    stepped: dict[nn.Parameter, nn.Parameter] = {}
    for param in trained:
        now = stepped[param] = nn.Parameter(param.data)
        now.grad = param.grad
    part.state = defaultdict(dict, {now: state[param] for param, now in stepped.items()})
    for held in (vars(part), *part.param_groups):  # a scaler's numbers and a tensor `lr` are written in place
        held.update({name: value.clone() for name, value in held.items() if isinstance(value, Tensor)})
    for held in part.param_groups:
        held["params"] = [stepped[param] for param in held["params"]]
    return part


def steps_beside(optimizer: Optimizer) -> bool:
    """Whether someone has yet to wait for steps of the optimizer."""
    state: Any = optimizer.state
    return isinstance(state, AwaitedState) and any(group.pending_step is not None for group in state.groups)


class OnHost(Home):
    """Where the thread steps shards, if the optimizer treats each element by itself.

    `overlap`: whether steps outlive the optimizer's `step`.
    `by_group`: whether groups are stepped one after another also where they do not overlap.
    """

    apart, overlap, by_group = True, False, False

    @property
    def overlaps(self) -> bool:  # type: ignore[override]
        return self.overlap

    def converted(self, brought: Tensor, departure: Any, stepped: Tensor, *, for_step: bool) -> tuple[Tensor, Any]:
        if brought.dtype == stepped.dtype or not has_values(brought):
            return super().converted(brought, departure, stepped, for_step=for_step)
        if for_step:
            arriving = Unwidened(brought, departure, stepped.dtype)
            return arriving.gradient, arriving
        if stepped.is_pinned():
            gradient = pinned_for(stepped, brought.shape, stepped.dtype)
        else:
            gradient = torch.empty_like(brought, dtype=stepped.dtype)
        return gradient, Widening(brought, departure, gradient)

    def at_once(self) -> int:
        """Returns how many elements of a group `step_part` is given at a time."""
        return in_the_cache()

    def brought(self, there: Tensor, sums: Tensor, own: Sequence[Tensor]) -> None:
        norms.note(there, sums, own)

    def rounded(self, group: ShardGroup) -> Tensor | None:
        """Returns memory for what is sent in the place of a stepped tensor, in the dtype that computes."""
        return None

    def step_group(
        self,
        group: ShardGroup,
        optimizer: Optimizer,
        params: Sequence[nn.Parameter],
        *,
        beside: bool,
        urgent: bool = False,
        then: Callable[[slice], None] | None = None,
    ) -> None:
        if not has_values(group.stepped):
            super().step_group(group, optimizer, params, beside=False, then=then)
        elif beside:
            at_most = None if self.overlap else _WAITING
            rounded = self.rounded(group) if self.overlap else None
            step_beside(group, optimizer, params, self._take, rounded, urgent=urgent, at_most=at_most)
        else:
            one = GroupStep(group, part_of(optimizer, params), then)
            one.arrive()
            self._take(one)

    def _take(self, step: GroupStep) -> None:
        step.take(self.step_part, self.at_once())

    def before_step(
        self, optimizer: Optimizer, params: Sequence[nn.Parameter], groups: Sequence[ShardGroup], *, closure: bool
    ) -> None:
        if closure or type(optimizer) not in ELEMENTWISE or not (self.overlap or self.by_group):
            for group in groups:
                group.reveal()
            return
        held = {*params}
        for group in groups:
            own = [param for param in group.params if param in held]
            if self.overlap or any(param.grad is not None for param in own):
                # Also of a group of which only others own shards: what is gathered ahead depends on pending steps.
                self.step_group(group, optimizer, own, beside=self.overlap)
        taken = {param: param.grad for param in params if param.grad is not None}
        for param in taken:  # the optimizer's own step is to leave these
            param.grad = None
        _taken.setdefault(optimizer, {}).update(taken)

    def stepped(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        for param, gradient in _taken.pop(optimizer, {}).items():
            param.grad = gradient


_WAITING = 2
"""Steps that may wait or run at a time in backward, which waits with the next one: their gradients are kept."""

_taken: WeakKeyDictionary[Optimizer, dict[nn.Parameter, Tensor]] = WeakKeyDictionary()
"""Gradients of what was stepped by group, until the optimizer's own step has returned."""
