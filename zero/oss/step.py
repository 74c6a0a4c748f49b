"""The step of OSS, on every rank:

collect    this rank's slices of each param.grad, as views; with ShardedDDP the shards have gradients already
step       the inner optimizer steps this rank's shards
gather     every rank's shards reach all ranks in the flat buffers of the parameters
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.autograd.graph import increment_version

from zero.measure.kinds import ELEMENTWISE
from zero.measure.param_groups import options
from zero.oss.checks import StepCheck
from zero.shards import masters
from zero.shards.shard_group import ShardGroup

if TYPE_CHECKING:
    from zero.oss.optimizer import OSS

_COMPRESSED_AT_ONCE = 2
"""Shard groups whose compressed copies exist at a time."""


class Step:
    """The steps of one OSS. checks: what is checked around them.

    writes_frozen: whether the optimizer may write into parameters without gradients.
    """

    def __init__(self, optimizer: OSS, checks: Sequence[StepCheck], *, writes_frozen: bool) -> None:
        self.checks = checks
        self._oss, self._comm, self._writes_frozen = optimizer, optimizer.comm, writes_frozen
        self._channel = self._comm.channel("the step of OSS")
        self._refusal = self._comm.channel("a step of OSS that it refuses")
        self._failure = self._comm.channel("a step of OSS in which its optimizer raised an error")
        self._numbers = self._comm.channel("the numbers that ranks compare after a step of OSS")

    def run(self, closure: Callable[[], float] | None, given: dict[str, Any]) -> Any:
        """Collective. One step. given: further arguments of the inner optimizer's step. Returns the closure's loss."""
        inner, loss = self._oss.optim, None
        if closure is not None and type(inner) not in ELEMENTWISE:
            self.refuse_changes()
            self._hand_options()
            loss = inner.step(closure=self._for_inner(closure), **given)
        else:
            if closure is not None:
                loss = self._evaluate(closure)
            self.refuse_changes()
            self.collect()
            self._hand_options()
            if self._oss.shards.steps_by_group(inner, given):
                self.end(by_group=True)
                return loss
            with self._comm.telling(self._failure):
                self._oss.shards.step(inner, **given)
        self.end()
        return loss

    def collect(self) -> None:
        """Collective where it fails. Puts gradients and parameters where the inner optimizer steps them."""
        found, problem = self._oss.gradients.collect()
        if problem is not None:
            self._raise(problem)
        for check in self.checks:
            problem = check.gradients(found)
            if problem is not None:
                self._raise(problem)
        self._oss.shards.refresh()

    def end(self, *, by_group: bool = False) -> None:
        """Collective. Copies the options back, and gathers the shards that the step may have changed. by_group: steps
        each group before its gather."""
        oss = self._oss
        self._compare_numbers()
        self.share_options(oss.optim.param_groups, oss.param_groups)
        oss.saved.forget()
        try:
            # In the order in which forward reads them.
            groups = oss.shards.shard_groups[::-1] if self._writes_frozen else oss.shards.trained_groups()
            self.gather(groups, by_group=by_group)
            # Graphs that saved a parameter before the step cannot be used any more, as if it was stepped itself.
            stepped = [param for group in groups for param in group.params if param.grad is not None]
            increment_version(stepped)
            oss.by_param.note_stepped(stepped)
        finally:
            oss.shards.stepped(oss.optim)
        if not oss.gradients.arrive_sharded:  # views would keep full gradients alive past model.zero_grad()
            oss.shards.drop_gradients()

    def gather(self, groups: Sequence[ShardGroup], *, by_group: bool = False) -> None:
        """Collective. Gathers every rank's shards of these groups on every rank. by_group: steps each before."""
        self._comm.agree(self._channel)
        sent_as, in_flight = self._oss.sent_as, list[ShardGroup]()
        for group in groups:
            if by_group:
                with self._comm.telling(self._failure):
                    write = partial(masters.write_part, group)
                    self._oss.shards.step_group(self._oss.optim, group, then=write)
                masters.written(group)
            else:
                masters.write(group)
            if sent_as is not None and len(in_flight) == _COMPRESSED_AT_ONCE:
                in_flight.pop(0).finish_unshard()
            group.launch_unshard(sent_as=sent_as)
            in_flight.append(group)
        for group in in_flight:
            group.finish_unshard()
        self._oss.shards.note_versions()

    # --------------------------------------------------------------------------------------------------- checks

    def refuse_changes(self) -> None:
        """Raises RuntimeError on every rank if the optimizer or its parameters were changed on any."""
        problem = next((problem for check in self.checks if (problem := check.changed()) is not None), None)
        if problem is not None:
            self._raise(problem)

    def _raise(self, problem: str) -> NoReturn:
        with suppress(RuntimeError):  # the other ranks raise in the operation in which they wait for this one
            self._comm.agree(self._refusal)
        raise RuntimeError(problem)

    @contextmanager
    def around_hook(self) -> Iterator[None]:
        """Collective. A context in which a hook of the user's may change gradients of shards."""
        with ExitStack() as stack:
            for check in self.checks:
                stack.enter_context(check.around_hook())
            yield

    def _compare_numbers(self) -> None:
        found = [(check, numbers) for check in self.checks if (numbers := check.numbers()) is not None]
        if not found:
            return
        together = torch.cat([numbers for _, numbers in found])
        self._comm.all_reduce(together, maximum=True, channel=self._numbers)
        lengths = [len(numbers) for _, numbers in found]
        for (check, _), maxima in zip(found, together.split(lengths), strict=True):
            problem = check.judge(maxima)
            if problem is not None:
                raise RuntimeError(problem)

    # ------------------------------------------------------------------------------------------- options

    def _hand_options(self) -> None:
        """Copies the options to the inner optimizer, which may write numbers into its groups from here on."""
        self.share_options(self._oss.param_groups, self._oss.optim.param_groups)
        for check in self.checks:
            check.begins()

    def share_options(self, source: Sequence[dict[str, Any]], target: Sequence[dict[str, Any]]) -> None:
        """Copies options between outer groups, which schedulers write, and inner ones, which some optimizers write."""
        for of, to in zip(source, target, strict=True):
            to.update(options(of))

    # --------------------------------------------------------------------------------------------------- closures

    def _evaluate(self, closure: Callable[[], float]) -> float:
        with torch.enable_grad():
            try:
                return closure()
            except RuntimeError as error:
                for check in self.checks:
                    check.closure_failed(error)
                raise

    def _for_inner(self, closure: Callable[[], float]) -> Callable[[], float]:
        """Wraps the closure for an optimizer that calls it within its step, once or more."""
        oss, called = self._oss, False

        def evaluate() -> float:
            nonlocal called
            if called:  # the optimizer may have changed its shards since
                self.gather(oss.shards.shard_groups[::-1] if self._writes_frozen else oss.shards.trained_groups())
            called = True
            loss = self._evaluate(closure)
            self.refuse_changes()
            self.collect()
            oss.gradients.arrive()
            return loss

        return evaluate
