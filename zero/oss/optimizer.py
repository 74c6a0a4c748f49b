"""Stage 1: OSS, an optimizer of which every rank keeps and steps a shard.

It holds its shards (zero/shards/owned_shards.py), its step (step.py) and the view of its state (state_view.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast, overload
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from zero._torch.optimizers import move_hooks, with_load_hooks, with_state_hooks
from zero.comm import AGREEMENT, Comm, fail_together
from zero.comm.together import Together
from zero.measure.param_groups import called, params_of
from zero.oss.from_optimizer import from_optimizer, refuse_use
from zero.oss.options import Arguments, build_inner
from zero.oss.state_view import StateView, mark_shards
from zero.oss.step import OwnedGradients, Step, share_options
from zero.shards.announce import announce
from zero.shards.masters import differs
from zero.shards.partition import Partition, Shares
from zero.state.gathered import consolidate, gathered
from zero.state.optimizer_state import cut, hand_over, load, numbered_groups, shard_of
from zero.state.stepped import SteppedShards
from zero.tensor_parallel.parts import others_of
from zero.tensor_parallel.parts import ranks as ranks_of_parts
from zero.wrap.dtensor_checks import checked_by_itself

if TYPE_CHECKING:
    from zero.wrap.precision import GivenPrecision


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
    group: process group, by default all ranks. Without torch.distributed, this process alone.
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
        group: torch.distributed.ProcessGroup | None = None,
        *,
        partition: Partition = "auto",
        precision: GivenPrecision = None,
        rounded: Mapping[nn.Parameter, torch.dtype] | None = None,
        shares: Shares | None = None,
        **defaults: Any,
    ) -> None:
        self.comm = Comm(group)
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
        self.stepper = Step(self, writes_frozen=how.writes_frozen)
        share_options(self.optim.param_groups, self.param_groups)
        checked_by_itself(self)
        for name in ("train", "eval"):  # by which optimizers such as Schedule-Free switch between two sets of weights
            if callable(getattr(self.optim, name, None)):
                # A weak reference: the OSS keeps its inner optimizer, and a circle would keep both until a collection.
                vars(self.optim)[name] = partial(_switch, ref(self), name)
        mark_shards(self.optim, ref(self))
        self._built = True
        _alive[:] = [one for one in _alive if one() is not None]
        _alive.append(ref(self))
        announce(f"OSS({called(optim)})", self.comm, self.shards.shard_groups, stage=1)

    # -------------------------------------------------------------------------------------- construction

    @classmethod
    def from_optimizer(
        cls, optimizer: Optimizer, group: torch.distributed.ProcessGroup | None = None, **options: Any
    ) -> OSS:
        """Collective. Builds an OSS from an existing optimizer of full parameters; see zero.oss.from_optimizer."""
        built: OSS = from_optimizer(cls, optimizer, group, **options)
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
        with self.stepper.together:  # also around the hooks of steps, which are the user's
            return cast("float | None", _hooked_step(self, closure, **options))

    step.hooked = True  # type: ignore[attr-defined]  # else torch's constructor has hooks called around it

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
            self.state_view.replace(state)

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


@Optimizer.profile_hook_step
@torch.no_grad()
def _hooked_step(oss: OSS, closure: Callable[[], float] | None, **options: Any) -> Any:
    return oss.stepper.run(closure, options)


def _switch(of: ReferenceType[OSS], name: str, *args: Any, **kwargs: Any) -> Any:
    """Collective. Calls a method of the inner optimizer, in whose place this is."""
    outer = of()
    assert outer is not None, f"the OSS does not exist any more whose inner optimizer's {name}() is called"
    # From the class: the instance has this function under the same name, which would call itself.
    return outer.stepper.call(partial(getattr(type(outer.optim), name), outer.optim), args, kwargs)


def set_bucket_size(optimizer: OSS, numel: int) -> None:
    """Collective. Lays the parameters out again, in shard groups of at most `numel` elements, or of one parameter.

    Keeps the optimizer state, and clears gradients. Raises RuntimeError if param_groups were edited.
    """
    with optimizer.stepper.together:
        optimizer.stepper.refuse_changes()
    # Some ranks may own no shard that has state; before the first step no rank does.
    some_state = optimizer.optim.state or any(map(differs, optimizer.shards.masters))
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
