"""Stage 1: OSS, an optimizer of which every rank keeps and steps a shard. Its step, on every rank:

collect    this rank's slices of each param.grad, as views; with ShardedDDP the shards have gradients already
step       the inner optimizer steps this rank's shards (zero/shards/owned_shards.py)
gather     every rank's shards reach all ranks in the flat buffers of the parameters
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast, overload
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from zero._torch.autograd import in_a_backward
from zero._torch.compiling import never_traced
from zero._torch.optimizers import (
    move_hooks,
    takes_state_hooks,
    with_load_hooks,
    with_state_hooks,
    without_optimizer_hooks,
)
from zero._torch.telling import warn_user
from zero._torch.tensors import as_plain_tensors
from zero.comm import AGREEMENT, Comm, fail_together
from zero.comm.together import Together
from zero.measure.kinds import ELEMENTWISE, SINGLE
from zero.measure.param_groups import NO_OPTIONS, called, params_of
from zero.oss.from_optimizer import from_optimizer, refuse_use
from zero.oss.options import Arguments, build_inner
from zero.shards import masters
from zero.shards.announce import announce
from zero.shards.owned_shards import OwnedShards
from zero.shards.partition import Partition, Shares
from zero.shards.shard_group import MOVED, ShardGroup
from zero.shards.sharded_parameter import mark_held, plain_state, unmark_all
from zero.state.gathered import consolidate, gathered
from zero.state.optimizer_state import (
    Led,
    cut,
    fingerprint,
    follow,
    hand_over,
    led,
    load,
    numbered_groups,
    shard_of,
)
from zero.state.shard_mark import mark
from zero.state.stepped import SteppedShards
from zero.tensor_parallel.parts import others_of
from zero.tensor_parallel.parts import ranks as ranks_of_parts
from zero.wrap import ddp
from zero.wrap.bucket import FullBucket
from zero.wrap.dtensor_checks import DTensorCheck, checked_by_itself
from zero.wrap.gradients import OWN_ONLY, OwnedGradient, WideAverage, refuse_sparse

if TYPE_CHECKING:
    from zero.wrap.precision import GivenPrecision

# ------------------------------------------------------------------------------------------------------------ gradients
#
# The gradients that one OSS steps: what stands in `param.grad` (zero/wrap/gradients.py), or this rank's slices.


class OwnedGradients:
    """`are_sharded`: whether ShardedDDP brings them, each to its owner. `filled_by`: by module what brings averages of
    full gradients into `param.grad`."""

    def __init__(self, shards: OwnedShards) -> None:
        self.are_sharded, self._shards = False, shards
        self.filled_by: WeakKeyDictionary[nn.Module, Sequence[FullBucket]] = WeakKeyDictionary()
        # Gradients of shards that were shown between steps, by parameter: others were assigned.
        self._shown: dict[nn.Parameter, Tensor | None] = {}

    def cleared(self) -> None:
        """The user has cleared all gradients."""
        self.drop_of_shards()
        for buckets in self.filled_by.values():
            for bucket in buckets:
                bucket.accumulated.clear()

    def wait_for_copies(self) -> None:
        """Makes the host wait for gradients that are on their way to it."""
        for group in self._shards.shard_groups:
            if group.copies:
                group.wait_for_copies()

    def refuse(self) -> None:
        """Raises RuntimeError for a gradient that cannot be stepped: that was not reduced, was assigned, or is another
        parameter's. The other ranks find the same, or wait for this one in vain."""
        filling = [bucket for buckets in self.filled_by.values() for bucket in buckets]
        for bucket in filling:
            for index in bucket.accumulated:
                if bucket.params[index].grad is not None:
                    raise RuntimeError(
                        f"{bucket.names[index]} has a gradient that was not averaged over the ranks: the "
                        "last backward ran under no_sync(), or failed. Run the last backward before step() outside "
                        "no_sync(), or call reduce(). To average gradients by hand build zero.OSS without zero.setup."
                    )
        every = self._shards.shard_groups
        if filling and sum(len(one.own) for one in filling) < sum(len(group.params) for group in every):
            averaged = {bucket.params[index] for bucket in filling for index in bucket.own}
            for group in every if every[0].comm.world > 1 else ():
                for name, param in zip(group.names, group.params, strict=True):
                    if param not in averaged and param.grad is not None:
                        raise RuntimeError(
                            f"{name} has a gradient that is not averaged over the ranks: this parameter is in no model "
                            "that was wrapped. Make its module, such as a loss with weights, a part of the model, or "
                            "wrap (prepare) it, too."
                        )
        groups = self._shards.shard_groups if self.are_sharded else ()
        for group, index in [(one, index) for one in groups for index in range(len(one.params))]:
            name, param = group.names[index], group.params[index]
            held, of_shard = param.grad, self._shards[param].grad
            if isinstance(held, OwnedGradient):
                held.refuse_of_others(group, index)
            if of_shard is not None and of_shard is not self._shown.get(param):
                raise RuntimeError(f"the shard of {name} was given a gradient that no backward has brought. {_BY_HAND}")
            if held is not None and (not isinstance(held, OwnedGradient) or held.unreduced is not None):
                raise RuntimeError(
                    f"{name} has a gradient that was not reduced: the last backward ran under no_sync(), or went "
                    "around ShardedDDP, or the gradient was assigned. Run the last backward before step() outside "
                    f"no_sync(), or call reduce(). {OWN_ONLY} {_BY_HAND}"
                )

    def of_shard(self, param: nn.Parameter) -> Tensor | None:
        """What ShardedDDP has brought of a parameter's gradient to this rank."""
        return param.grad.shard if isinstance(param.grad, OwnedGradient) else None

    def show(self, param: nn.Parameter) -> None:
        """Gives the shard of a parameter its gradient, for whoever reads it between steps."""
        shard = self._shards[param]
        if self.are_sharded and shard.grad is self._shown.get(param):
            self._shown[param] = shard.grad = self.of_shard(param)

    def drop_of_shards(self) -> None:
        """Leaves shards without gradients: views would keep those of full parameters past model.zero_grad()."""
        self._shown.clear()
        for shard in self._shards.values():
            shard.grad = None

    def collect(self) -> bool:
        """Puts gradients where the inner optimizer finds them: this rank's slices of those of full parameters, views
        where their order in memory allows, with averages in place of what was rounded. Returns whether there are any
        (True if ShardedDDP brings them). Raises RuntimeError as `refuse`, and for a sparse one, whichever rank owns
        it, on all alike."""
        self.refuse()
        shards = self._shards
        for param, shard in shards.items():
            shard.grad = self.of_shard(param) if self.are_sharded else None
            if shard.requires_grad is not param.requires_grad:  # unfrozen since: optimizers may ask the shard
                shard.requires_grad_(param.requires_grad)
            if not self.are_sharded and param.grad is not None and shard in shards.empty:
                shard.grad = shard.data
        if self.are_sharded:
            return True
        for group in shards.shard_groups:
            for name, param in zip(group.names, group.params, strict=True):
                if param.grad is not None and param.grad.is_sparse:
                    refuse_sparse(name)
        for group in shards.shard_groups:
            for index in group.shapes.spans:
                param = group.params[index]
                full: Any = param.grad
                if full is not None:
                    with as_plain_tensors():
                        is_own = isinstance(full, WideAverage) and full.cut == group.cuts[index]
                        own = full.settled() if is_own else group.own_slice(index, full)
                    shards[param].grad = group.to_main(own)
        return any(param.grad is not None for param in shards)


_BY_HAND = "Gradients that no backward computes, as in evolution strategies, are for stage 1: OSS without ShardedDDP."


# ---------------------------------------------------------------------------------------------------------------- state
#
# What `optimizer.state` is: the inner optimizer's state, by the user's parameters.


State = dict[str, Any]


class StateView(MutableMapping[nn.Parameter, State]):
    """Reads and writes the state of the inner optimizer, which has that of this rank's shards.

    Once any of it was read, tensors of a shard's shape answer as full ones (sharded_parameter.py) until the next step.
    As with torch's optimizers, reading the entry of a parameter that has none makes an empty one. Raises KeyError for
    what is no parameter of the optimizer.
    """

    def __init__(self, inner: Optimizer, shards: OwnedShards) -> None:
        self._inner, self._shards, self._answers = inner, shards, False

    def show(self) -> None:
        """Has it answer as full state."""
        if not self._answers:
            self._answers, state, shards = True, self._inner.state, self._shards
            several = [group for group in shards.shard_groups if group.layout.world > 1]
            cuts = [pair for group in several for pair in zip(group.params, group.cuts, strict=True)]
            held = [(shards[param], cut, state[shards[param]]) for param, cut in cuts if shards[param] in state]
            mark_held(held, type(self._inner))

    def hide(self) -> None:
        """Has it be plain again, as the inner optimizer needs it. What was assigned in full is cut."""
        if self._answers:
            self._answers, state = False, self._inner.state
            unmark_all(state.values())
            for param, shard in self._shards.items():
                entry, cut = state.get(shard, {}), partial(self._shards.cut_to_shard, param)
                entry.update({key: cut(value) for key, value in entry.items() if key not in SINGLE})

    def __getitem__(self, param: nn.Parameter) -> State:
        self._shards.place(param)  # raises
        self.show()
        entry: State = self._inner.state.setdefault(self._shards[param], {})
        return entry

    def __setitem__(self, param: nn.Parameter, state: State) -> None:
        """state: tensors have the shape of the shard, or of the full parameter, which are cut."""
        own = {name: self._shards.cut_to_shard(param, value) for name, value in state.items()}
        self.hide()
        unmark_all([own])
        self._inner.state[self._shards[param]] = own

    def __delitem__(self, param: nn.Parameter) -> None:
        del self._inner.state[self._shards[param]]

    def __contains__(self, param: object) -> bool:
        return isinstance(param, nn.Parameter) and self._shards.get(param) in self._inner.state

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (param for param in self._shards if param in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))


# ----------------------------------------------------------------------------------------------------------- optimizer


class OSS(Optimizer):
    """Shards the state of an optimizer over the ranks of a process group (ZeRO stage 1; Rajbhandari et al.,
    "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section 5.1).

        model = DistributedDataParallel(model)
        optimizer = OSS(model.parameters(), optim=torch.optim.Adam, lr=1e-3)

    Use it like the optimizer it wraps. The parameters move into flat buffers, and stay the same objects. Gradients must
    be the same on all ranks at each step; DistributedDataParallel or ShardedDDP averages them.

    OSS holds the parameters, not the module. A step refuses parameters that were moved or cast. If the module replaced
    all parameters (`load_state_dict(assign=True)`), none has a gradient: the step raises RuntimeError, or, without
    DistributedDataParallel, warns the second time. If it replaced some, ShardedDDP refuses the backward;
    DistributedDataParallel refuses the next forward, unless it looks for unused parameters.

    params: parameters, (name, parameter) pairs, or dicts of groups with options of their own. The optimizer gets names
        as `param_names` of its groups.
    optim: class of the optimizer to shard; `defaults` are its arguments.
    process_group: by default all ranks; without torch.distributed, this process alone. group: FairScale's name for it.
    partition: "even" cuts inside parameters into shards of equal size, for optimizers that treat each element by
        itself. "whole" gives each parameter to one rank, for optimizers that need matrices or norms of parameters.
        "auto" chooses for the optimizer: torch's are known, others are measured in a few steps on small tensors.
        A function of (name, parameter) that returns "even" or "whole" chooses for each: see zero/shards/partition.py.
    precision: "bf16", "fp16", a dtype or a MixedPrecision: parameters are stored in these 16 bits, also those that are
        so already, and owners keep float32 master weights of their shards (2Ψ + 2Ψ + 12Ψ/W bytes with Adam; section 3.1
        of the paper). zero.setup also casts inputs, and keeps batch normalisation in float32.
    shares: what other optimizers of the model have given each rank (`optimizer.shards.shares` of the last one), so that
        all of them together give each rank as much memory. zero.setup passes it.
    rounded: the parameters that OSS rounds, with the dtypes to which it does, in place of all. zero.setup passes them.
    defaults: also offload, where shards and optimizer state are stored (zero.CPUOffload, zero.DiskOffload); see
        zero.offload.

    If data ends earlier on some ranks than on others, take batches from zero.join.

    Collective: the constructor, `add_param_group`, `step`, `clip_grad_norm`, `consolidate_state_dict`.
    Raises ValueError on every rank for parameters that cannot be sharded, for arguments that differ between ranks, and
    for optimizers whose step of one parameter depends on other parameters.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optim: Callable[..., Optimizer] = torch.optim.SGD,
        process_group: torch.distributed.ProcessGroup | None = None,
        *,
        group: torch.distributed.ProcessGroup | None = None,
        partition: Partition = "auto",
        precision: GivenPrecision = None,
        rounded: Mapping[nn.Parameter, torch.dtype] | None = None,
        shares: Shares | None = None,
        **defaults: Any,
    ) -> None:
        never_traced(OSS, "step")
        self.comm = Comm(process_group if group is None else group)
        how = self._arguments = Arguments(
            self.comm,
            params,
            optim,
            defaults,
            partition=partition,
            precision=precision,
            rounded=rounded,
            shares=shares,
        )
        self.finding = how.finding
        # Before torch's constructor, which adds the groups and sets an empty state: both ask for it.
        self._built = False
        self.full_state: dict[str, Any] | None = None  # if it was consolidated here since the last step
        # Without defaults: only the inner optimizer knows them all, and `share_options` brings them into the groups.
        super().__init__(how.groups, {})
        self.shards = how.lay_out(self.param_groups)
        if others := others_of(params_of(self)):
            fail_together([self.comm, *others], next(iter(self.shards.shard_groups)).full.device)
        self.gradients = OwnedGradients(self.shards)
        self.optim = build_inner(self.comm, self.shards, self.param_groups, optim, defaults)
        self.defaults = dict(self.optim.defaults)
        self.state_view = StateView(self.optim, self.shards)
        self._writes_frozen = how.writes_frozen
        self._gathered: list[str] = []  # the groups of the last step
        self._led: Led = {}
        self._steps_without = 0
        self._dtensors = DTensorCheck()
        self.together = Together([self.comm], "the step of OSS")
        share_options(self.optim.param_groups, self.param_groups)
        checked_by_itself(self)
        for name in ("train", "eval"):  # by which optimizers such as Schedule-Free switch between two sets of weights
            if callable(getattr(self.optim, name, None)):
                # A weak reference: the OSS keeps its inner optimizer, and a circle would keep both until a collection.
                vars(self.optim)[name] = partial(_switch, ref(self), name)
        if takes_state_hooks(self.optim):
            self.optim.register_state_dict_post_hook(partial(_mark_shard, ref(self)))
        self._built = True
        _alive[:] = [one for one in _alive if one() is not None]
        _alive.append(ref(self))
        announce(f"OSS({called(optim)})", self.comm, self.shards.shard_groups, stage=1)

    # -------------------------------------------------------------------------------------- construction

    @classmethod
    def from_optimizer(
        cls, optimizer: Optimizer, process_group: torch.distributed.ProcessGroup | None = None, **options: Any
    ) -> OSS:
        """Collective. Builds an OSS from an existing optimizer of full parameters; see zero.oss.from_optimizer."""
        built: OSS = from_optimizer(cls, optimizer, process_group, **options)
        # Before `refuse_use`, whose hooks would move along and refuse each step of the OSS.
        move_hooks(optimizer, built)
        refuse_use(optimizer)
        return built

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Collective. Shards the parameters of another group, balanced with the shards that each rank owns."""
        if not self._built:
            super().add_param_group(param_group)
            return
        super().add_param_group(self._arguments.added(param_group, self.shards))
        added = self.param_groups[-1]
        self.shards.add([added])
        self._arguments.refuse_full()
        given = self.shards.group(added)
        if "param_names" not in self.optim.param_groups[0]:
            given.pop("param_names", None)  # torch refuses groups of which only some have names
        self.optim.add_param_group(given)
        # Only of this group: a scheduler may have written into the others since the last step.
        share_options(self.optim.param_groups[-1:], [added])
        self.full_state = None

    def __getattr__(self, name: str) -> Any:
        """Values of the inner optimizer that this one lacks, and its `train` and `eval`, which are collective."""
        inner = self.__dict__.get("optim")
        value = None if inner is None or name.startswith("_") else getattr(inner, name, None)
        if value is None or (callable(value) and name not in ("train", "eval")):
            problem = f"'{type(self).__name__}' object has no attribute '{name}'."
            if value is not None:
                problem += (
                    f" {type(inner).__name__}'s would see this rank's shards, which have gradients in a step alone. "
                    f"Pass OSS a subclass whose step(closure=None, *, own=False) returns self.{name}() for own=True, "
                    "and call optimizer.step(own=True)."
                )
            raise AttributeError(problem, name=name, obj=self)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """What the inner optimizer has, and this one lacks, is set there, where its steps read it."""
        inner = self.__dict__.get("optim")
        if inner is None or name in self.__dict__ or hasattr(type(self), name) or not hasattr(inner, name):
            super().__setattr__(name, value)
        else:
            setattr(inner, name, value)

    # ---------------------------------------------------------------------------------------------- shards

    def part(self, param: nn.Parameter) -> nn.Parameter:
        """This rank's shard of a parameter, which the inner optimizer steps.

        A view of the parameter's memory, or of the master weights. Empty if this rank owns nothing of the parameter.
        Its `.grad` is the shard's gradient: with ShardedDDP as of this call, otherwise only within the step. Raises
        KeyError for what is no parameter of this optimizer.
        """
        self.shards.place(param).group.synchronize()
        self.gradients.show(param)
        return self.shards[param]

    # ------------------------------------------------------------------------------------------ gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the parameters and of this rank's shards."""
        super().zero_grad(set_to_none)
        self.gradients.cleared()

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Collective with ShardedDDP. torch.nn.utils.clip_grad_norm_ of all parameters: FairScale's name for it."""
        norm: Tensor = clip_grad_norm_(params_of(self), max_norm, norm_type)
        return norm

    # ---------------------------------------------------------------------------------------------- steps

    @overload
    def step(self, closure: None = None, **options: Any) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], **options: Any) -> float: ...

    def step(self, closure: Callable[[], float] | None = None, **options: Any) -> float | None:
        """Collective. Steps this rank's shards and gathers all ranks' shards. Returns the closure's loss.

        The closure is called before the step of torch's own optimizers. Other optimizers get it; each time that they
        call it, parameters are gathered first. options: further arguments of the inner optimizer's step.

        Raises RuntimeError on every rank if, on any, parameters were moved or replaced, no_sync left gradients
        unreduced, param_groups were edited, the optimizer raised, or if ranks do different things.
        """
        with self.together:  # also around the hooks of steps, which are the user's
            try:
                return cast("float | None", self._step(closure, **options))
            finally:
                self.gradients.drop_of_shards()

    step.hooked = True  # type: ignore[attr-defined]  # else torch's constructor has hooks called around it

    @Optimizer.profile_hook_step
    @torch.no_grad()
    def _step(self, closure: Callable[[], float] | None, **options: Any) -> Any:
        inner, loss = self.optim, None
        if in_a_backward():
            raise RuntimeError(
                "step() was called within a backward, from a hook: other gradients are not there yet, and none is "
                "averaged. Call it once backward() has returned."
            )
        if closure is not None and type(inner) not in ELEMENTWISE:
            self.refuse_changes()
            share_options(self.param_groups, inner.param_groups)
            with without_optimizer_hooks():
                loss = inner.step(closure=self._for_inner(closure), **options)
            by_group, groups = False, self._agreed_groups()
        else:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self.refuse_changes()
            self._collect()
            self.shards.offload.make_room(inner, self.shards.values())
            groups = self._agreed_groups()  # before any rank steps: what was raised on one so far, all raise
            share_options(self.param_groups, inner.param_groups)
            # So that gradients and stepped parameters of other groups are on their way while one is stepped.
            by_group = self.shards.offload.active and type(inner) in ELEMENTWISE and not options
            if not by_group:
                returned = self.shards.step(inner, **options)
                loss = returned if closure is None else loss
        share_options(inner.param_groups, self.param_groups)  # some optimizers write some
        if type(inner) not in ELEMENTWISE:  # torch's own write in place
            self.shards.take_back(inner)
        self.full_state = None
        try:
            self._gather(groups, by_group=by_group)
            # Graphs that saved a parameter before the step cannot be used any more, as if it was stepped itself.
            stepped = [param for group in groups for param in group.params if param.grad is not None]
            increment_version(stepped)
            if type(inner) not in ELEMENTWISE:  # others are not given gradients of empty shards
                for param in stepped:
                    inner.state.setdefault(self.shards[param], {})
        finally:
            self.shards.after_step(inner)
        follow(inner, self._led)
        return loss

    def _for_inner(self, closure: Callable[[], float]) -> Callable[[], float]:
        """Wraps the closure for an optimizer that calls it within its step, once or more."""
        called = False

        def evaluate() -> float:
            nonlocal called
            if called:  # the optimizer may have changed its shards since
                name = self.shards.given_other_data()
                if name is not None:  # what it keeps of the data before would be overwritten
                    raise RuntimeError(MOVED.format(name))
                self._gather(self._agreed_groups())
            called = True
            with torch.enable_grad():
                loss = closure()
            self.together.agree()
            self.refuse_changes()
            self._collect()
            self.gradients.wait_for_copies()
            return loss

        return evaluate

    def refuse_changes(self) -> None:
        """Raises RuntimeError if the optimizer or its parameters were changed. Call it in `together`."""
        shards = self.shards
        for group in shards.shard_groups:
            if (name := group.moved()) is None:
                continue
            if (taken := shards.taken_by_another()) is not None:
                raise RuntimeError(
                    f"{taken} was given to another OSS since, which shards and steps it now. Give each parameter to "
                    "one OSS, drop the one that you do not step, and wrap again what zero.unwrap(model) returns."
                )
            raise RuntimeError(
                f"{name} was moved, cast or given other data after OSS was built, and would no longer be trained. "
                "Move and cast the model first, then build OSS; load weights with load_state_dict (assign=False); "
                "write others in place, `p.data.copy_(...)`."
            )
        found, expected = [group["params"] for group in self.param_groups], [len(params) for params in shards.given]
        counts = [len(params) for params in found]
        # Not `params == own`, which compares the elements of tensors that are not the same object.
        pairs = zip(found, shards.given, strict=True) if counts == expected else ()
        if counts != expected or not all(all(map(operator.is_, *pair)) for pair in pairs):
            kept = {param for params in found for param in params}
            gone = next((place.name for param, place in shards.places.items() if param not in kept), None)
            raise RuntimeError(
                f"param_groups were edited: OSS was given groups of {expected} parameters, and finds groups of "
                f"{counts}, {f'without {gone}' if gone else 'not the same ones in the same order'}. Add a group by "
                "add_param_group; to step fewer parameters, freeze them by requires_grad_(False), or build OSS again."
            )
        self._dtensors.refuse(shards.places, self.optim, self.finding)
        ddp.refuse_joined(shards)

    def _collect(self) -> None:
        """Collective where it fails. Puts gradients and parameters where the inner optimizer steps them."""
        found = self.gradients.collect()
        frozen = not any(param.requires_grad for param in self.shards)  # as in a warm-up of other parameters
        self._steps_without = 0 if found or frozen else self._steps_without + 1
        if self._steps_without == 2:  # one is normal: a first step for a scheduler, a skipped batch
            warn_user(f"In two steps one after another {ddp.NO_GRADIENT}")
        if not found:
            ddp.refuse_replaced(self.shards)
        elif not self.gradients.are_sharded and self.comm.world > 1:
            ddp.refuse_unfrozen(self.shards)
        self.shards.refresh()
        self.state_view.hide()
        self._led = led(self.optim, self.shards.empty)
        for shard in self.shards.empty.difference(self._led):
            shard.grad = None

    def _agreed_groups(self, written: AbstractSet[nn.Parameter] | None = None) -> Sequence[ShardGroup]:
        """Collective. The groups that a step may change, in the order in which gradients arrive. written: those that
        have these parameters, in place of them.

        Raises ValueError on every rank if ranks have other groups: one alone has frozen or unfrozen parameters, or
        given gradients to some."""
        groups = self.shards.shard_groups if self._writes_frozen else self.shards.trained_groups()
        if written is not None:
            groups = [one for one in self.shards.shard_groups if not written.isdisjoint(one.params)]
        labels = [group.label for group in groups]
        if self.together.agree(int(labels != self._gathered)):  # on any rank
            self.comm.compare("the parameters that a step changes", labels)
            self._gathered = labels
        return groups

    def _gather(self, groups: Sequence[ShardGroup], *, by_group: bool = False) -> None:
        """Collective. Gathers every rank's shards of these groups on every rank. by_group: steps each before, which is
        offloaded."""
        for group in groups:
            apart = group.main is not group.shard
            if by_group:
                write = partial(masters.write_part, group) if apart else None
                self.shards.step_group(self.optim, group, then=write)
                if apart:
                    masters.written(group)
            elif apart:
                masters.write(group)
            group.launch_unshard()
        for group in groups:
            group.finish_unshard()
        self.shards.note_versions()

    def gather_written(self, params: AbstractSet[nn.Parameter]) -> None:
        """Collective. Gathers the groups that hold these parameters, into whose shards was written between steps."""
        with self.together:
            groups = self._agreed_groups(params)
            self._gather(groups)
            increment_version([param for group in groups for param in group.params])

    # ---------------------------------------------------------------------------------------------- state

    @property  # type: ignore[override]
    def state(self) -> MutableMapping[nn.Parameter, dict[str, Any]]:
        """The inner optimizer's state, by the user's parameters, in shards that answer as the full tensors.

        What is written into it counts. Of a parameter of which this rank owns nothing it has the same entries with
        torch's element-wise optimizers, and none with others.
        """
        return self.state_view if self._built else {}

    @state.setter  # type: ignore[override]
    def state(self, state: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """state: of shards, or of full parameters, which is cut."""
        if self._built:  # else the base class's constructor sets an empty one
            entries = {**state}
            self.state_view.clear()
            for param, values in entries.items():
                self.state_view[param] = {**values}

    @property
    def stepped_shards(self) -> SteppedShards:
        """What the inner optimizer steps now."""

        def loaded() -> None:
            self.shards.note_versions()
            self.full_state = None

        return SteppedShards(
            self.optim,
            self.shards.shard_groups,
            self.comm,
            param_groups=self.param_groups,
            part=self.part,
            keeps_masters=bool(self.shards.masters),
            loaded=loaded,
        )

    def consolidate_state_dict(self, to: int | None = 0, *, recipient_rank: int | None = None) -> None:
        """Collective. Gathers the full state on rank `to` of the group (None: on all), for `state_dict` to return.

        recipient_rank: FairScale's name for `to`.
        """
        with Together([self.comm], AGREEMENT) as together:
            self.full_state = consolidate(self.stepped_shards, to if recipient_rank is None else recipient_rank)
            together.agree()

    def state_dict(self) -> dict[str, Any]:
        """The full state in the plain optimizer's format if `consolidate_state_dict` gathered it here since the last
        step, or if there is one rank; otherwise this rank's shard, which warns when it is pickled. Options are current.

        Does not communicate and does not raise. torch.distributed.checkpoint.state_dict refuses a shard.
        """
        stepped, full = self.stepped_shards, self.full_state
        # One rank's shard is all, and current; what was consolidated is a copy without later writes into the state.
        if full is None or (self.comm.world == 1 and ranks_of_parts(params_of(self)) is None):
            return with_state_hooks(self, partial(shard_of, stepped))
        return with_state_hooks(self, lambda: {"state": dict(full["state"]), "param_groups": numbered_groups(stepped)})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a full state (of OSS at any world size, or of the plain optimizer) or this rank's own shard.

        Does not change the dictionary. Raises ValueError if it does not fit.
        """
        with_load_hooks(self, state_dict, partial(load, self.stepped_shards))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As torch's own, which takes over the attributes in `state`."""
        # Without `state`: torch writes into the object's dictionary, which the property of this name hides.
        super().__setstate__({name: value for name, value in state.items() if name != "state"})
        if "state" in state:
            self.state = state["state"]

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "an OSS cannot be copied or pickled: its state is spread over the ranks. Save state_dict() after "
            "consolidate_state_dict(), and build another OSS to load it into."
        )


# All that exist, in the order of their construction, which is the same on all ranks.
_alive: list[ReferenceType[OSS]] = []


def optimizers() -> list[OSS]:
    """Returns all OSS that exist and may step, in the same order on every rank."""
    return [one for reference in _alive if (one := reference()) is not None]


def retire(unwrapped: Sequence[OSS]) -> None:
    """Notes that these step no parameters any more, whoever still holds them."""
    _alive[:] = [one for one in _alive if one() not in unwrapped]


def _switch(of: ReferenceType[OSS], name: str, *args: Any, **kwargs: Any) -> Any:
    """Collective. Calls a method of the inner optimizer, in whose place this is, that writes into shards; and gathers
    these."""
    oss = of()
    assert oss is not None, f"the OSS does not exist any more whose inner optimizer's {name}() is called"
    with oss.together:
        oss.refuse_changes()
        oss.shards.refresh()
        oss.state_view.hide()
        # From the class: the instance has this function under the same name, which would call itself.
        result = getattr(type(oss.optim), name)(oss.optim, *args, **kwargs)
        share_options(oss.optim.param_groups, oss.param_groups)
        oss._gather(oss._agreed_groups({*oss.shards}))
        return result


def _mark_shard(of: ReferenceType[OSS], _: Optimizer, state_dict: dict[str, Any]) -> None:
    """The hook on the state_dict() of the inner optimizer: has it say which shard it is, which no other rank must
    load."""
    oss = of()
    if oss is not None and oss.comm.world > 1:
        state_dict["state"] = {number: plain_state(of_one) for number, of_one in state_dict["state"].items()}
        mark(state_dict, fingerprint(oss.stepped_shards))


def share_options(source: Sequence[dict[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Copies options between outer groups, which schedulers write, and inner ones, which some optimizers write."""
    for of, to in zip(source, target, strict=True):
        to.update((key, value) for key, value in of.items() if key not in NO_OPTIONS)


def set_bucket_size(optimizer: OSS, numel: int) -> None:
    """Collective. Lays the parameters out again, in shard groups of at most `numel` elements, or of one parameter.

    Keeps the optimizer state, and clears gradients. Raises RuntimeError if param_groups were edited.
    """
    with optimizer.together:
        optimizer.refuse_changes()
    # Some ranks may own no shard that has state; before the first step no rank does.
    some_state = optimizer.optim.state or any(map(masters.differs, optimizer.shards.masters))
    somewhere = any(optimizer.comm.all_gather_text("some" if some_state else ""))
    # A copy of the table: laying out replaces its entries, and the state belongs to the shards of before.
    before = replace(optimizer.stepped_shards, part=dict(optimizer.shards).__getitem__)
    for param in params_of(optimizer):  # a gradient of the shards of before
        param.grad = param.grad if type(param.grad) is Tensor else None
    optimizer.shards.lay_out_again(optimizer.param_groups, numel)
    optimizer._arguments.refuse_full()
    taken: dict[nn.Parameter, dict[str, Any]] = {}
    if somewhere:  # each rank cuts its new shards from what it receives, group by group, of the state of the old ones
        leaves = (leaf for batch in gathered(before, None, "cpu", settle=False) for leaf in batch)
        taken = cut(optimizer.stepped_shards, leaves)
    optimizer.optim.state.clear()
    for inner, outer in zip(optimizer.optim.param_groups, optimizer.param_groups, strict=True):
        inner["params"] = optimizer.shards.group(outer)["params"]
    if somewhere:
        hand_over(optimizer.stepped_shards, taken, numbered_groups(before))
