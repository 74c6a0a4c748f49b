"""When units are gathered and released in a forward: gather, compute, release (the root and units that are to be kept:
stay). backward.py says what happens in backward.

How far gathers run ahead, and how many units are in flight at once, says `Prefetch`. Each rank goes by the order in
which its units ran the last time; ranks whose orders differ raise when a gather arrives.
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
    """Drives the units of one model through forward and backward by hooks on their modules.

    A unit runs while its module does, or one of those inside it that hold its parameters: so other methods of the model
    than forward find parameters unsharded, too, as far as they call modules.

    backward: of the same units.
    `uncompiled`: whether forward runs uncompiled now, whatever is compiled otherwise.
    """

    def __init__(self, index: Index, comms: Sequence[Comm], prefetch: Prefetch, backward: Backward) -> None:
        self.uncompiled = False
        units = index.units
        self._index, self._units, self._comms, self._prefetch, self._backward = index, units, comms, prefetch, backward
        self._root = units[0]
        self._casts, self._beside = Casts(units), Beside(units)
        self._exchanges = [group.exchange for group in index.groups]
        self._running: list[Unit] = []
        """Units whose forward runs, from the outside in."""
        self._begun = 0
        """How many forwards of units have begun."""
        self._last = self._root
        """The unit whose forward began last."""
        self._looked: set[bool] = set()
        self._looking = ExitStack()
        self._hooks: dict[nn.Module, list[RemovableHandle]] = {}
        for unit in reversed(units):  # so that a unit around another is entered first
            for module in (unit.module, *_holders(unit)):
                # Outside of what torch.compile makes of the module, which would be another for each unit.
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
        """Takes its hooks off these modules, or off all."""
        for module in [*self._hooks] if modules is None else modules:
            for hook in self._hooks.pop(module, []):
                hook.remove()

    def _rest(self, unit: Unit) -> None:
        if unit.depth == 0 and unit.readers == 0 and unit.state is TrainingState.IDLE:
            unit.reshard()

    # --------------------------------------------------------------------------------------------- forward

    def _pre_forward(self, unit: Unit) -> Callable[..., Any]:
        def pre_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._backward.active and not in_a_backward():
                self._abandon()
            if unit.state is TrainingState.BACKWARD:
                return None  # activation checkpointing computes the forward again, and backward has gathered the unit
            if unit.summoned:
                _refuse_to_train_summoned(unit)
                return None
            if module is not unit.module:
                if unit.depth:
                    return None
                unit.entrance = module
            if unit.depth == 0:
                self._enter(unit)
            self._begun += 1
            call = Call(self._begun, shares_casts=self._casts.shared)
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
                    comm.begin_schedule()
                if not self._backward.accumulates:
                    for exchange in self._exchanges:
                        exchange.expect_steps()
        self._beside.expect(unit)
        for other in (unit, *unit.reads):
            self._backward.end_reads(other)
            other.unshard()
        for other in unit.reads:
            other.readers += 1
        self._running.append(unit)
        if self._backward.active:
            return
        if unit is self._root and unit.entrance is None:
            self._look_for_reads()
        if unit is not self._root and unit is not self._last:
            self._last.after, unit.before = unit, self._last
        self._last = unit
        if unit.after is not None and self._prefetch.before_forward:
            unit.after.unshard_ahead()

    def before_forward(self) -> None:
        """Of the whole model. Forgets one that an interrupt has ended (KeyboardInterrupt): no hook is called then."""
        if self._running and not self._backward.active:
            self._looking.close()
            self._running.clear()
            for unit in self._units:
                unit.leave_forward()
                unit.reshard()

    def _expect_backward(self, unit: Unit, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Expects the backward of the call, and watches for where it leaves the unit."""
        if unit is self._root or not torch.is_grad_enabled():
            return
        if not (self._backward.active and unit.calls):  # or a checkpoint computes one of these again
            unit.expect(call)
        call.seen_off = watch_inputs(unit, args, kwargs, partial(self._backward.leaves, unit, call))

    def _post_forward(self, unit: Unit) -> Callable[..., Any]:
        def post_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if unit.state is TrainingState.BACKWARD or unit.summoned or not unit.depth:
                return None
            trains = torch.is_grad_enabled()
            if module is not unit.module:
                if unit.entrance is not module:
                    if trains:
                        watch_inside(output, self._pre_backward(unit, unit.running[-1], inside=True))
                    return None
                unit.entrance = None
            call = unit.running.pop()
            call.ended = self._begun
            output = apart_from_parameters(unit, output)
            needs_backward = trains and watch_outputs(unit, output, self._pre_backward(unit, call))
            self._backward.awaited |= needs_backward
            if unit.depth == 0:
                self._leave(unit, kept=needs_backward and (unit is self._root or unit.stays or self._comes_first(unit)))
            return output

        return post_forward

    def _comes_first(self, unit: Unit) -> bool:
        """Whether backward comes to the unit first, as the last time, and would gather it ahead."""
        return unit is self._root.before and self._prefetch.before_backward

    def _leave(self, unit: Unit, *, kept: bool) -> None:
        unit.inputs.clear()
        if unit in self._running:
            self._running.remove(unit)
        for other in unit.reads:
            other.readers -= 1
        if unit is self._root:
            self._looking.close()
            unit.before = None if self._last is unit else self._last
            for other in self._units:
                if other.gathering:
                    self._rest(other)  # what came next the last time did not this time
        if not kept:
            for other in (unit, *unit.reads):
                self._rest(other)
        if not self._running:
            self._beside.settle()  # the user may write into shards from here on

    def _look_for_reads(self) -> None:
        """In the first forward in training and the first in evaluation: finds what modules read of other units, and
        whether they write into parameters.

        What they read is not looked for in models that run compiled. Of these what lies inside a compiled module is
        called through it alone: hooks in there would only break what is compiled into pieces.
        """
        training = self._root.module.training
        if training in self._looked:
            return
        self._looked.add(training)
        for unit in self._units:
            unit.look_for_writes()
        compiled = set() if self.uncompiled else compiled_modules(self._root.module)
        if compiled:
            self.enter_by_units(compiled)
        else:
            self._looking.enter_context(ForeignReads(self._index, self._found))

    @property
    def looks_next(self) -> bool:
        """Whether the next forward of the root is to find what modules read of other units."""
        due = self._root.module.training not in self._looked
        return due and bool(self._hooks) and not self._root.summoned

    def enter_by_units(self, modules: Iterable[nn.Module] | None = None) -> None:
        """From now on modules inside units are called by their units alone, all or those of `modules`.

        What lies in no unit but the root can still be called by itself, unless the root is the only one.
        """
        units = {unit.module for unit in self._units}
        inside = {module for unit in self._units[1:] or self._units for module in unit.module.modules()}
        of_these = inside if modules is None else inside.intersection(modules)
        self.remove(of_these - units)

    def _found(self, other: Unit) -> None:
        """The innermost unit that runs reads parameters of another, which is gathered with it from here on."""
        if other in self._running:
            return  # at the end of its forward, when it hands on what it returns
        reader = self._running[-1] if self._running else self._root
        self._backward.end_reads(other)
        other.unshard()
        if other not in reader.reads:
            reader.reads.append(other)
            other.readers += 1
            other.is_read = True

    def expect_reads(self) -> None:
        """Parameters are given to the user."""
        if not self._running:
            self._backward.expect_reads()

    # -------------------------------------------------------------------------------------------- backward

    def _pre_backward(self, unit: Unit, call: Call, *, inside: bool = False) -> Callable[[Any], None]:
        def pre_backward(_: Any) -> None:
            if unit.state is TrainingState.BACKWARD and unit.expects(call):
                return
            if inside and unit.running:
                return  # its forward takes a gradient, as of an energy for forces: all that it needs is unsharded
            self._backward.comes_to(unit, call)

        return pre_backward

    def _abandon(self) -> None:
        """Forgets what an exception ended before its end; the model can go on."""
        self._looking.close()
        self._running.clear()
        self._backward.abandon()


def _unless_traced_in(unit: Unit, hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, of which torch.compile sees nothing while the unit runs."""

    def unless_traced(*args: Any) -> Any:
        if torch.compiler.is_compiling() and unit.depth and unit.entrance is None:
            return None
        return hook(*args)

    return unless_traced


def _holders(unit: Unit) -> Iterator[nn.Module]:
    """The modules inside the unit's own that hold parameters of it."""
    for module in unit.module.modules():
        if module is not unit.module and any(param in unit.params for param in module.parameters(recurse=False)):
            yield module


def _refuse_to_train_summoned(unit: Unit) -> None:
    if torch.is_grad_enabled() and any(param.requires_grad for group in unit.groups for param in group.params):
        raise RuntimeError(
            f"{unit.title} ran forward inside summon_full_params() with gradients, which nobody would average. Train "
            "outside of it, or run this forward under torch.no_grad()."
        )
