"""Orders the unsharding of units in a forward: unshard, compute, reshard. The root, and units that backward reaches
first or that reshard_after_forward=False keeps, stay unsharded for backward (backward.py).

`Prefetch` says how far all-gathers run ahead, and how many units are in flight. Each rank prefetches in the order in
which its units ran last. Ranks whose orders differ raise when an all-gather arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zero._torch import in_a_backward
from zero.comm import Comm
from zero.fsdp.backward import Backward
from zero.fsdp.beside import Beside
from zero.fsdp.casts import Casts
from zero.fsdp.compiled import BETWEEN_UNITS, compiled_modules
from zero.fsdp.edges import apart_from_parameters, watch_inputs, watch_inside, watch_outputs
from zero.fsdp.foreign_reads import ForeignReads
from zero.fsdp.index import Index
from zero.fsdp.prefetch import Prefetch
from zero.fsdp.unit import Call, TrainingState, Unit


class Schedule:
    """Unshards and reshards the units of one model in forward and backward, by hooks on their modules.

    A unit is unsharded while its module runs, or a module inside it that holds parameters of the unit. So methods of
    the model other than forward find parameters unsharded, too, if they call modules.

    backward: orders the backward of the same units.
    `uncompiled`: whether the running forward runs uncompiled although modules are compiled.
    """

    def __init__(self, index: Index, comms: Sequence[Comm], prefetch: Prefetch, backward: Backward) -> None:
        self.uncompiled = False
        units = index.units
        self._index, self._units, self._comms, self._prefetch, self._backward = index, units, comms, prefetch, backward
        self._root = units[0]
        self._casts, self._beside = Casts(units), Beside(units)
        self._exchanges = [group.exchange for group in index.groups]
        self._running: list[Unit] = []
        """Units whose forward is running, from the outside in."""
        self._forwards_begun = 0
        """How many forwards of units have begun."""
        self._last_entered = self._root
        """The unit whose forward began last."""
        self._searched_modes: set[bool] = set()
        """The modes (`module.training`) in which a forward has searched for reads of other units."""
        self._read_search = ExitStack()
        self._hooks: dict[nn.Module, list[RemovableHandle]] = {}
        for unit in reversed(units):  # so that a unit around another is entered first
            for module in (unit.module, *_holders(unit)):
                # Not traced: torch.compile would make different code of the module for each unit.
                before = torch.compiler.disable(self._pre_forward(unit), reason=BETWEEN_UNITS)
                after = torch.compiler.disable(self._post_forward(unit), reason=BETWEEN_UNITS)
                if unit is self._root and module is not unit.module:
                    before, after = _unless_traced_in(unit, before), _unless_traced_in(unit, after)
                self._hooks.setdefault(module, []).extend(
                    [
                        # Before the user's own, such as weight_norm's, which read parameters.
                        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
                        module.register_forward_hook(after, always_call=True),
                    ]
                )

    def remove(self, modules: Iterable[nn.Module] | None = None) -> None:
        """Removes the hooks from `modules`, or from all."""
        for module in [*self._hooks] if modules is None else modules:
            for hook in self._hooks.pop(module, []):
                hook.remove()

    def _reshard_unused(self, unit: Unit) -> None:
        if unit.depth == 0 and unit.running_readers == 0 and unit.state is TrainingState.IDLE:
            unit.reshard()

    # --------------------------------------------------------------------------------------------- forward

    def _pre_forward(self, unit: Unit) -> Callable[..., Any]:
        def pre_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._backward.active and not in_a_backward():
                self._abandon()
            if unit.state is TrainingState.BACKWARD:
                return None  # activation checkpointing computes the forward again, and backward has unsharded the unit
            if unit.summoned:
                _refuse_to_train_summoned(unit)
                return None
            if module is not unit.module:
                if unit.depth:
                    return None
                unit.entry_module = module
            if unit.depth == 0:
                self._enter(unit)
            self._forwards_begun += 1
            call = Call(self._forwards_begun, shares_casts=self._casts.shared)
            unit.running.append(call)
            args, kwargs = unit.precision.cast_inputs(module, (args, kwargs), root=unit is self._root)
            self._expect_backward(unit, call, args, kwargs)
            return args, kwargs

        return pre_forward

    def _enter(self, unit: Unit) -> None:
        if not self._running:
            self._casts.before_forward()
            if not self._backward.active:
                self._beside.begin()
                for comm in self._comms:
                    comm.begin_schedule(together=comm is self._comms[0])  # among the first all forwards gather
                if not self._backward.accumulates:
                    for exchange in self._exchanges:
                        exchange.expect_steps()
        self._beside.expect(unit)
        for other in (unit, *unit.reads):
            self._backward.end_reads(other)
            other.unshard(for_backward=self._backward.active)
        for other in unit.reads:
            other.running_readers += 1
        self._running.append(unit)
        if self._backward.active:
            return
        if unit is self._root and unit.entry_module is None:
            self._search_reads()
        if unit is not self._root and unit is not self._last_entered:
            self._last_entered.after, unit.before = unit, self._last_entered
        self._last_entered = unit
        if unit.after is not None and self._prefetch.before_forward:
            unit.after.unshard_ahead()

    def before_forward(self) -> None:
        """Forgets a forward that KeyboardInterrupt has ended, which calls no hooks. Called before each forward."""
        if self._running and not self._backward.active:
            self._read_search.close()
            self._running.clear()
            for unit in self._units:
                unit.forget_forward()
                unit.reshard()

    def _expect_backward(self, unit: Unit, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Expects a backward of the call, and registers hooks on its inputs for the end of that backward."""
        if unit is self._root or not torch.is_grad_enabled():
            return
        if not (self._backward.active and unit.calls):  # else a checkpoint computes one of the expected calls again
            unit.expect(call)
        call.has_exit_hook = watch_inputs(unit, args, kwargs, partial(self._backward.post_backward, unit, call))

    def _post_forward(self, unit: Unit) -> Callable[..., Any]:
        def post_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if unit.state is TrainingState.BACKWARD or unit.summoned or not unit.depth:
                return None
            trains = torch.is_grad_enabled()
            if module is not unit.module:
                if unit.entry_module is not module:
                    if trains:
                        watch_inside(output, self._pre_backward(unit, unit.running[-1], inside=True))
                    return None
                unit.entry_module = None
            call = unit.running.pop()
            call.ended = self._forwards_begun
            output = apart_from_parameters(unit, output)
            needs_backward = trains and watch_outputs(unit, output, self._pre_backward(unit, call))
            self._backward.awaited |= needs_backward
            if unit.depth == 0:
                stays = unit is self._root or unit.stays or self._first_in_backward(unit)
                self._leave(unit, stays=needs_backward and stays)
            return output

        return post_forward

    def _first_in_backward(self, unit: Unit) -> bool:
        """Returns whether backward will reach the unit first, as it did last time, and would gather it ahead."""
        return unit is self._root.before and self._prefetch.before_backward

    def _leave(self, unit: Unit, *, stays: bool) -> None:
        unit.inputs.clear()
        if unit in self._running:
            self._running.remove(unit)
        for other in unit.reads:
            other.running_readers -= 1
        if unit is self._root:
            self._read_search.close()
            unit.before = None if self._last_entered is unit else self._last_entered
            for other in self._units:
                if other.gathering:
                    self._reshard_unused(other)  # gathered ahead, but it did not run this time
        if not stays:
            for other in (unit, *unit.reads):
                self._reshard_unused(other)
        if not self._running:
            self._beside.settle()  # the user may write into shards from here on

    def _search_reads(self) -> None:
        """Searches the first forward in training and the first in evaluation for reads of other units' parameters, and
        for writes into parameters.

        Models that run compiled are not searched for reads. Their compiled modules lose the hooks of modules inside,
        which are called through them alone: these hooks would break graphs.
        """
        training = self._root.module.training
        if training in self._searched_modes:
            return
        self._searched_modes.add(training)
        for unit in self._units:
            unit.look_for_writes()
        compiled = set() if self.uncompiled else compiled_modules(self._root.module)
        if compiled:
            self.remove_inner_hooks(compiled)
        else:
            self._read_search.enter_context(ForeignReads(self._index, self._add_read))

    @property
    def searches_next(self) -> bool:
        due = self._root.module.training not in self._searched_modes
        return due and bool(self._hooks) and not self._root.summoned

    def remove_inner_hooks(self, modules: Iterable[nn.Module] | None = None) -> None:
        """Removes the hooks from modules inside units, or from those of `modules`: units then call them.

        Modules of the root that are in no other unit keep their hooks, unless the root is the only unit.
        """
        units = {unit.module for unit in self._units}
        inner = {module for unit in self._units[1:] or self._units for module in unit.module.modules()}
        chosen = inner if modules is None else inner.intersection(modules)
        self.remove(chosen - units)

    def _add_read(self, other: Unit) -> None:
        """Notes that the innermost running unit reads parameters of `other`, which is unsharded with it from now on."""
        if other in self._running:
            return  # its forward is ending, and returns its output
        reader = self._running[-1] if self._running else self._root
        self._backward.end_reads(other)
        other.unshard()
        if other not in reader.reads:
            reader.reads.append(other)
            other.running_readers += 1
            other.read_by_others = True

    def expect_reads(self) -> None:
        if not self._running:
            self._backward.expect_reads()

    # -------------------------------------------------------------------------------------------- backward

    def _pre_backward(self, unit: Unit, call: Call, *, inside: bool = False) -> Callable[[Any], None]:
        def pre_backward(_: Any) -> None:
            if unit.state is TrainingState.BACKWARD and unit.expects(call):
                return
            if inside and unit.running:
                return  # its forward takes a gradient, such as forces from an energy; its parameters are unsharded
            self._backward.pre_backward(unit, call)

        return pre_backward

    def _abandon(self) -> None:
        """Forgets a forward or backward that an exception has ended, so that the model can be used again."""
        self._read_search.close()
        self._running.clear()
        self._backward.abandon()


def _unless_traced_in(unit: Unit, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the hook, hidden from torch.compile while the unit runs."""

    def unless_traced(*args: Any) -> Any:
        if torch.compiler.is_compiling() and unit.depth and unit.entry_module is None:
            return None
        return hook(*args)

    return unless_traced


def _holders(unit: Unit) -> Iterator[nn.Module]:
    """Yields the modules inside the unit's module that hold parameters of the unit."""
    for module in unit.module.modules():
        if module is not unit.module and any(param in unit.params for param in module.parameters(recurse=False)):
            yield module


def _refuse_to_train_summoned(unit: Unit) -> None:
    if torch.is_grad_enabled() and any(param.requires_grad for group in unit.groups for param in group.params):
        raise RuntimeError(
            f"{unit.title} ran forward inside summon_full_params() with gradients, which FSDP would not average. Train "
            "outside of it, or run this forward under torch.no_grad()."
        )
