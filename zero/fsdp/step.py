"""The steps of the user's own optimizers, which know nothing of shards.

torch calls hooks around each step. Around one of an optimizer that holds parameters of an FSDP, ranks

    check     that nobody would step what is wrong on any rank
    hide      that parameters are shards: they and their gradients are plain tensors while the optimizer steps, and
              of optimizers that are not torch's, which may divide by the number of elements, gradients of which this
              rank owns nothing are None
    restore   both

The hooks are the optimizer's own: the last before a step and the first after it, whichever the user registers and when.
So a hook of the user's sees shards, and what it changes is checked. A step that raises has no hooks after it: what it
left hidden is restored when its frame ends, which holds its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from zero._torch.compiling import never_traced
from zero._torch.modules import OwnHook, parameters_of, params_of_each
from zero._torch.optimizers import HooksOfSteps, call_first, takes_state_hooks
from zero._torch.tensors import as_plain_tensors
from zero.comm import Comm
from zero.comm.together import Together
from zero.fsdp.model import Model, models
from zero.fsdp.unit import Need, Unit
from zero.measure.built import around, finding_of_built
from zero.measure.kinds import ELEMENTWISE, Finding, Kind, title
from zero.measure.param_groups import SHARD_MARK, alike_options, options, params_of
from zero.shards.cut import Cut
from zero.shards.offload import Offload
from zero.shards.partition import refuse_optimizer
from zero.shards.shard_group import ShardGroup, refuse_moved, take_back
from zero.shards.sharded_parameter import (
    GRADIENT,
    Sharded,
    mark,
    mark_states,
    plain_state,
    rest,
    unmark,
    unmark_all,
    wake,
)
from zero.state import optimizer_state as state
from zero.state import shard_mark
from zero.state.optimizer_state import Led, follow, keep_dtypes, led, share
from zero.state.shard_mark import texts_of
from zero.state.stepped import SteppedShards, of_user
from zero.tensor_parallel import table
from zero.wrap.dtensor_checks import refuse_dtensors

# ---------------------------------------------------------------------------------------------------------------- state
#
# The state of a user's optimizer that steps shards of an FSDP, as it is saved and loaded.
#
# Hooks on the optimizer mark this rank's shard, so that no other rank loads it as its own, and convert to and from full
# state.


def register(model: Model, optimizer: Optimizer) -> None:
    """Registers hooks on the optimizer's state_dict() and load_state_dict(). The second time does nothing.

    state_dict() marks this rank's shard. load_state_dict() cuts a full state, and raises ValueError for another rank's
    shard.
    """
    known = _registered.setdefault(model, WeakSet())
    if optimizer in known:
        return
    # Before any return: FSDP.unwrap refuses later steps of all of these, also with one rank.
    known.add(optimizer)
    if model.comm.world == 1 or not takes_state_hooks(optimizer):
        return
    shard_groups, comm = model.index.groups, model.comm  # not the model, which the hooks would keep alive

    taken: list[dict[str, Any]] = []
    empty = model.index.empty

    def cut(optimizer: Optimizer, given: dict[str, Any]) -> dict[str, Any] | None:
        stepped = of_user(optimizer, shard_groups, comm)
        if given.get(SHARD_MARK) == state.OWN:
            return None
        if not _marked_as_own(stepped, given["param_groups"]):
            own, groups = state.own_shard(stepped, given)
            with as_plain_tensors():
                own = {of: state.in_order_of(of, held) for of, held in own.items()}
            for held in own.values():
                held.pop(state.MASTER, None)  # weights are loaded by the model
            given = state.numbered(optimizer, own, groups)
        taken[:] = [given]
        return given

    def keep(optimizer: Optimizer) -> None:
        if taken:
            keep_dtypes(optimizer, taken.pop())
        share(optimizer, empty)
        mark_states(optimizer)

    optimizer.register_state_dict_post_hook(_Marks(shard_groups, comm))
    optimizer.register_load_state_dict_pre_hook(cut)
    optimizer.register_load_state_dict_post_hook(keep)


def cut_full(model: Model, optimizer: Optimizer) -> None:
    """Cuts the state that an optimizer had before its parameters were cut, the same on every rank. Raises ValueError
    where it does not fit them."""
    groups, held = model.index.groups, optimizer.state
    with as_plain_tensors():
        is_full = any(
            isinstance(value, Tensor) and value.dim() and value.shape == full != own.shape
            for group in groups
            for param, own, full in zip(group.params, group.shard_views, group.shapes.full, strict=True)
            for value in held.get(param, {}).values()
        )
    if is_full:
        state.refuse_ownerless(optimizer)
        states = {number: held[param] for number, param in enumerate(params_of(optimizer)) if held.get(param)}
        own_states = state.cut(_shards(model, optimizer), state.leaves_of(states))
        held.clear()
        for param, of_shard in own_states.items():
            held[param] = of_shard
        share(optimizer, model.index.empty)
        mark_states(optimizer)


class _Marks(OwnHook):
    """Marks the state as this rank's shard."""

    def __init__(self, shard_groups: list[ShardGroup], comm: Comm) -> None:
        self._shard_groups, self._comm = shard_groups, comm

    def __call__(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        state_dict["state"] = {number: plain_state(of_one) for number, of_one in state_dict["state"].items()}
        shard_mark.mark(state_dict, state.fingerprint(of_user(optimizer, self._shard_groups, self._comm)))


# By model: the optimizers that have hooks, all that have stepped its parameters.
_registered: WeakKeyDictionary[Model, WeakSet[Optimizer]] = WeakKeyDictionary()


def registered(model: Model) -> list[Optimizer]:
    """The optimizers that have stepped parameters of the model."""
    return [*_registered.get(model, ())]


def _shards(model: Model, optimizer: Optimizer) -> SteppedShards:
    return of_user(optimizer, model.index.groups, model.comm)


def _marked_as_own(stepped: SteppedShards, groups: list[dict[str, Any]]) -> bool:
    """Whether the groups have marks of this rank's shard. Raises ValueError for marks of another shard."""
    marks = {text for group in groups for text in texts_of(group.get(SHARD_MARK))}
    remedy = "Save state that loads anywhere: zero.full_optimizer_state_dict, or zero.checkpoint."
    state.refuse_other_shard(stepped, marks, remedy)
    return bool(marks)


# ---------------------------------------------------------------------------------------------------------------- steps


class Steps:
    """What is checked before, and done around, steps of the parameters of one model, as long as this object exists. OSS
    has its own in zero/oss/optimizer.py."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._index = model.index
        self.together = Together(model.comms, "the step of an optimizer of FSDP")
        self._module_params = {*parameters_of(model.module)}
        # By optimizer: how many groups it had when it was measured, and the parameters that must not be cut, with the
        # name of the optimizer that needs them so, and why.
        self._needs_whole: WeakKeyDictionary[Optimizer, tuple[int, dict[nn.Parameter, tuple[str, Finding]]]]
        self._needs_whole = WeakKeyDictionary()
        # What an optimizer steps now: its gradient, where this rank owns nothing of it, is hidden here.
        self._stepping: dict[nn.Parameter, Tensor | None] = {}
        self._led: Led = {}
        self._offloads = any(group.offload.active for group in model.index.groups)
        _watch()
        _all[:] = [steps for steps in _all if steps() is not None]
        _all.append(ref(self))

    def params_in(self, optimizer: Optimizer) -> list[nn.Parameter]:
        return [param for param in params_of(optimizer) if param in self._index]

    # --------------------------------------------------------------------------------------------------- check

    def check(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        """Collective. Raises RuntimeError on every rank if a step would be wrong on any; ValueError if the optimizer
        has other parameters or options on another rank, or if there is no room for its state."""
        with self.together, as_plain_tensors():
            if self._stepping:  # an optimizer around this one steps, too
                self.take_back(optimizer, [param for param in params if param in self._stepping])
            known, number = self._needs_whole.get(optimizer), len(optimizer.param_groups)
            found = known if known is not None and known[0] == number else (number, self._measured(optimizer))
            units = [unit for unit in self._index.units if Need.SUMMONED not in unit.needed_by]
            refuse_moved(group for unit in units for group in unit.groups)
            self._refuse_new_parameters()
            if any(SHARD_MARK in group for group in optimizer.param_groups):
                try:
                    _marked_as_own(_shards(self.model, optimizer), optimizer.param_groups)
                except ValueError as error:
                    told = f"{type(optimizer).__name__} has loaded what does not belong to it: {error}"
                    raise RuntimeError(told) from None
            self._refuse_gradients(optimizer, params, found[1])
            for unit in self._units_of(params):  # here, where what it raises is raised on every rank
                unit.reshard()
            for offload, own in self._by_offload(params):
                offload.make_room(optimizer, own)
            self.together.agree()
            if found is not known:  # not before: what a rank raises where others are in a comparison reaches none
                self._compare(optimizer)
                self._needs_whole[optimizer] = found
        for group in optimizer.param_groups:
            group.pop(SHARD_MARK, None)  # load_state_dict() leaves the mark of this rank's shard here

    def _compare(self, optimizer: Optimizer) -> None:
        """Collective. Raises ValueError if the groups have other parameters or options on another rank."""
        names, lines = {param: name for name, param in self.model.module.named_parameters()}, list[str]()
        for group in optimizer.param_groups:
            lines += [
                alike_options(options(group)),
                *(names.get(param, "of another model") for param in group["params"]),
            ]
        for comm in self.model.comms:
            comm.compare(f"the parameters of the {type(optimizer).__name__} that steps an FSDP", lines)

    def _measured(self, optimizer: Optimizer) -> dict[nn.Parameter, tuple[str, Finding]]:
        """Measures the optimizer, and optimizers around it that step by it (SAM). Returns the parameters that must not
        be cut. Group by group: an optimizer may treat some as Muon does, and others as AdamW."""
        found: dict[nn.Parameter, tuple[str, Finding]] = {}
        for one in (*around(optimizer), optimizer) if self.model.comm.world > 1 else ():
            name, finding = title(type(one)), finding_of_built(one)
            if finding.kind is not Kind.TENSORWISE:  # that is refused only if a parameter with a gradient is cut
                try:
                    refuse_optimizer(name, finding, self.model.partition, of="FSDP")
                except ValueError as error:
                    raise RuntimeError(str(error)) from None
                continue
            for group in one.param_groups:
                finding = finding_of_built(one, group)
                if finding.kind is Kind.TENSORWISE:
                    found.update(dict.fromkeys(group["params"], (name, finding)))
        return found

    def _refuse_new_parameters(self) -> None:
        module, known = self.model.module, self._module_params
        new = {param for param in params_of_each(module) if param not in known and param.grad is not None}
        for name, param in module.named_parameters() if new else ():
            if param in new:
                if any(param is ignored for module in self.model.ignored for ignored in parameters_of(module)):
                    continue
                raise RuntimeError(
                    f"{name!r} is in no unit of FSDP: it was replaced (by load_state_dict with assign=True, say) or "
                    "added since the model was wrapped, and FSDP does not average its gradient. Change the model "
                    "first, then wrap it; or list its module in ignored_modules, and average its gradient yourself."
                )

    def _refuse_gradients(
        self,
        optimizer: Optimizer,
        params: Sequence[nn.Parameter],
        tensorwise: dict[nn.Parameter, tuple[str, Finding]],
    ) -> None:
        stepped = [param for param in params if GRADIENT.__get__(param) is not None]
        kind, held = type(optimizer).__name__, {*stepped}
        for unit in self._index.units_of(stepped):
            if Need.SUMMONED in unit.needed_by or Need.BACKWARD in unit.needed_by:
                name = next(self._index[param].name for param in stepped if param in unit.params)
                raise RuntimeError(
                    f"{name!r} is unsharded, not this rank's shard, while {kind}.step() is called: backward is not "
                    "complete, or this is inside summon_full_params(). Step after backward, outside it."
                )
            for bucket in unit.buckets:
                bucket.refuse_lost()
            for name in filter(None, [bucket.name_of_unreduced(held) for bucket in unit.buckets]):
                raise RuntimeError(
                    f"{name!r} has a gradient that was not reduced: the last backward ran under no_sync(). Run the "
                    "last backward before step() outside it."
                )
        for param in stepped:
            group, index = self._index[param]
            name, own, full_shape = group.names[index], group.shard_views[index], group.shapes.full[index]
            needs_whole = tensorwise.get(param)
            if needs_whole is not None and group.layout.numels[index] != own.numel() != 0:
                raise RuntimeError(
                    f"{needs_whole[0]} needs each parameter whole, but {name!r} is cut between ranks: "
                    f"{needs_whole[1].reason}. Wrap the model with FSDP(partition='whole')."
                )
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, Tensor) and value.dim() and value.shape == full_shape != own.shape:
                    raise RuntimeError(
                        f"the state {key!r} of {name!r} has the shape of the full parameter, {list(full_shape)}, but "
                        f"this rank steps a shard of shape {list(own.shape)}. It was made before wrapping, or loaded "
                        "full: wrap before the first step, and load full state by "
                        "zero.load_full_optimizer_state_dict(model, optimizer, state)."
                    )

    # ---------------------------------------------------------------------------------------- hide and restore

    def hide(self, optimizer: Optimizer, params: Sequence[nn.Parameter], *, closure: bool) -> list[nn.Parameter]:
        """Local, after `check`. Reshards what a forward has left unsharded, or computes with now.

        Returns the parameters that this hides: not those of an optimizer whose step has called this one (Lookahead)."""
        hidden = [param for param in params if param not in self._stepping] if self._stepping else [*params]
        for unit in self._units_of(hidden):
            unit.synchronize()  # transfers that an interrupted backward has launched may still read the shards
        wake(hidden)
        for param in hidden:
            gradient = param.grad
            if gradient is not None:
                unmark(gradient)
            # Also without a hidden gradient: the key says that the parameter is being stepped.
            self._stepping[param] = None
        leading = led(optimizer, self._index.empty)
        for param in hidden:
            if param in self._index.empty and param not in leading:
                self._stepping[param], param.grad = param.grad, None
        self._led = {**self._led, **leading}
        for offload, own in self._by_offload(params):
            groups = [*dict.fromkeys(self._index[param].group for param in own)]
            offload.before_step(optimizer, own, groups, closure=closure)
        return hidden

    def restore(
        self, optimizer: Optimizer, params: Sequence[nn.Parameter], hidden: Sequence[nn.Parameter], *, unshard: bool
    ) -> None:
        """Collective with `unshard` where a forward is running, which gets its parameters back."""
        for offload, own in self._by_offload(params):
            offload.after_step(optimizer, own)
        follow(optimizer, self._led)
        self._led = {}
        for param in hidden:
            gradient, now = self._stepping.pop(param), param.grad
            if now is None:
                now = param.grad = gradient
            group, position = self._index[param]
            if now is not None and group.marks_shards:
                mark(now, group.cuts[position])
        self.rest(hidden)
        if unshard and any(unit.needed_by for unit in self._index.units):
            for unit in self._units_of(hidden):
                if unit.needed_by:
                    unit.unshard()

    def take_back(self, optimizer: Optimizer, hidden: Sequence[nn.Parameter]) -> None:
        """Has parameters that a step has given other data lie where they were again, with that data."""
        places = [self._index[param] for param in hidden]
        with torch.no_grad():
            take_back(hidden, [place.group.views[place.position] for place in places], [vars(optimizer)])

    def rest(self, params: Sequence[nn.Parameter]) -> None:
        """Makes parameters that are not stepped now say that they are shards; gradients may be full, under no_sync."""
        awake = {group for group in self._index.groups if not group.at_rest}
        if awake or self._stepping:
            params = [
                param for param in params if param not in self._stepping and self._index[param].group not in awake
            ]
        rest(params)

    def _units_of(self, params: Sequence[nn.Parameter]) -> list[Unit]:
        """Those that are not summoned."""
        return [unit for unit in self._index.units_of(params) if Need.SUMMONED not in unit.needed_by]

    def _by_offload(self, params: Sequence[nn.Parameter]) -> list[tuple[Offload, Sequence[nn.Parameter]]]:
        if not self._offloads:
            return []
        found: dict[Offload, list[nn.Parameter]] = {}
        for param in params:
            found.setdefault(self._index[param].group.offload, []).append(param)
        return [*found.items()]


class EndOfStep(dict[str, Any]):
    """The `finally` of a step: torch calls no hook after one that raises. It stands in the place of the step's keyword
    arguments, which live as long as the frame of the step, and so at most as long as the traceback."""

    def __init__(self, given: dict[str, Any], end: Callable[[], None]) -> None:
        super().__init__(given)
        self._end = end

    def __del__(self) -> None:
        self._end()


class StepHook:
    """The hooks of one optimizer, which takes them away when it ends."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.hooks = HooksOfSteps(optimizer, self._before, self._after, _tell)
        # What is hidden, until it is restored.
        self._held: list[tuple[Steps, list[nn.Parameter], list[nn.Parameter]]] = []
        self._shards: list[tuple[Tensor, Cut]] = []
        self._begun = 0

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Checks and hides; with a closure after that was called. args: those of torch, the optimizer itself first."""
        if table.made:
            refuse_dtensors(optimizer)  # before the collectives below; its own hook may come after this one
        held = [(steps, params) for steps in _alive() if (params := steps.params_in(optimizer))]
        self.restore(optimizer)  # of a step that calls its class's own
        for steps, _ in held:
            register(steps.model, optimizer)
        self._begun += 1
        # In the place of the arguments, which die with the step's frame: of a step that raises torch calls no hook.
        kwargs = EndOfStep(kwargs, partial(self._end, ref(optimizer), self._begun))
        positional = len(args) > 1
        closure = args[1] if positional else kwargs.get("closure")
        if closure is None:
            self._hide(optimizer, held, closure=False)
            return args, kwargs

        def call_and_check() -> Any:
            self.restore(optimizer)  # what the closure's last call has hidden
            with ExitStack() as together:  # what it raises on one rank the others raise in their check
                for steps, params in held:
                    steps.rest(params)
                    together.enter_context(steps.together)
                loss = closure()
            self._hide(optimizer, held, closure=True)
            return loss

        for _, params in held:  # what the optimizer does before it calls the closure is plain, too
            wake(params)
        if positional:
            return (args[0], call_and_check, *args[2:]), kwargs
        kwargs["closure"] = call_and_check
        return args, kwargs

    def _hide(self, optimizer: Optimizer, held: list[tuple[Steps, list[nn.Parameter]]], *, closure: bool) -> None:
        for steps, params in held:
            steps.check(optimizer, params)
        shards = unmark_all(vars(optimizer).values())  # its state, and what else it has made between steps
        for steps, params in held:
            steps.model.unfinished_steps.append((self.restore, ref(optimizer)))
            self._held.append((steps, params, steps.hide(optimizer, params, closure=closure)))
        self._shards = shards if any(hidden for *_, hidden in self._held) else []

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        # Graphs that saved a parameter before the step are refused in backward, on every rank at the same place: a rank
        # that owns nothing of a parameter has an empty gradient where others have theirs.
        # Counted here, too, so that the end of the step's arguments does not restore once more.
        stepped, self._begun = [param for _, params, _ in self._held for param in params], self._begun + 1
        self.restore(optimizer)
        with as_plain_tensors():
            increment_version([param for param in stepped if GRADIENT.__get__(param) is not None])

    def _end(self, optimizer: ReferenceType[Optimizer], begun: int) -> None:
        """Local. Restores what a step has hidden that has raised, also before it called its closure."""
        stepped = optimizer()
        if stepped is not None and begun == self._begun:
            self.restore(stepped, unshard=False)
            for steps in _alive():
                steps.rest(steps.params_in(stepped))

    def restore(self, optimizer: Optimizer, *, unshard: bool = True) -> None:
        held, self._held = self._held, []
        for steps, params, hidden in held:
            # Equal to the entry, not the same objects: methods of one object are equal, and so are references to one.
            steps.model.unfinished_steps.remove((self.restore, ref(optimizer)))
            if type(optimizer) not in ELEMENTWISE:  # torch's own write in place
                steps.take_back(optimizer, hidden)
            steps.restore(optimizer, params, hidden, unshard=unshard)
        shards, self._shards = self._shards, []
        for shard, cut in shards:
            mark(shard, cut)
        if held:
            mark_states(optimizer)


# By optimizer: of those that have stepped parameters of any FSDP.
_hooks: WeakKeyDictionary[Optimizer, StepHook] = WeakKeyDictionary()

# Those of all models that exist, in the order of their construction, which is the same on all ranks.
_all: list[ReferenceType[Steps]] = []


def _alive() -> list[Steps]:
    """Without those of models that were unwrapped, which each rank's garbage collector drops when it runs."""
    exist = models()
    return [steps for reference in _all if (steps := reference()) is not None and steps.model in exist]


def _tell(optimizer: Optimizer, error: Exception) -> None:
    """Collective. The other ranks are in their step, or in what they do next."""
    for steps in _alive():
        if steps.params_in(optimizer):
            steps.together.tell(error)


def _find(optimizer: Optimizer, *_: Any) -> None:
    """The hook before the steps of any optimizer, before its own."""
    hook, alive, others = _hooks.get(optimizer), _alive(), params_of(optimizer)
    for steps in alive:
        others = [param for param in others if param not in steps.model.index]
    for param in others:
        # Of an FSDP that does not exist any more, so that nobody hides for a step that it is a shard: it is plain.
        if isinstance(param, Sharded):
            wake([param])
            if param.grad is not None:
                unmark(param.grad)
    if hook is None and any(steps.params_in(optimizer) for steps in alive):
        hook = _hooks[optimizer] = StepHook(optimizer)
    if hook is not None:
        hook.hooks.take_their_places(optimizer)


@cache
def _watch() -> None:
    """Has torch call `_find` before each step of any optimizer, from the first FSDP on."""
    never_traced(StepHook, "_before", "_after")
    call_first(torch.compiler.disable(_find))
