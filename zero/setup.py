"""The stages by number. What was given is looked at while nothing is changed yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypedDict, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zero._torch.compiling import unwrapped_of_torchs
from zero._torch.modules import parameters_of
from zero.comm import Comm
from zero.comm.together import Together, alike
from zero.fsdp import FSDP
from zero.fsdp.choice import Policy
from zero.measure.built import finding_of_built, refuse_arguments, refuse_unbuilt
from zero.measure.kinds import Finding, finding_of, known, title
from zero.measure.param_groups import alike_options, called, nearest, options, params_of
from zero.oss import OSS
from zero.oss.from_optimizer import refuse_uncut, refuse_unfit, states_of
from zero.precision import Rounding, compute_under_autocast, refuse_precision
from zero.sdp import AveragingDDP, ShardedDDP
from zero.shards.announce import without_announcing
from zero.shards.arguments import as_groups, named_params, parts_of, refuse_two_devices
from zero.shards.arguments import describe as describe_groups
from zero.shards.cut import refuse_sharded, take_over
from zero.shards.partition import Partition, Shares, cut_for, refuse_optimizer, refuse_partition, whole_among
from zero.shards.shapes import refuse_shared, refuse_unsendable
from zero.state.shard_mark import refuse_shards
from zero.tensor_parallel import parts
from zero.wrap.gradients import refuse_left
from zero.wrap.precision import MixedPrecision, as_precision
from zero.wrap.wrapper import describe, refuse_scripted
from zero.wrappers import Wrapped

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from zero.wrap.precision import GivenPrecision

Stage = int | Literal["3 kept"]

Optim = Callable[..., Optimizer] | Optimizer | Sequence[Optimizer]
"""The class of an optimizer, an optimizer of the full parameters, or several, each of some of them."""


class SetupOptions(TypedDict, total=False):
    """Those of zero.setup, which says what they mean: a misspelt one is an error of type checkers."""

    process_group: torch.distributed.ProcessGroup | None
    device_mesh: DeviceMesh | None
    partition: Partition
    auto_wrap_policy: Policy
    offload: Any
    precision: GivenPrecision
    reshard_after_forward: bool


@overload
def setup(
    model: nn.Module, optimizer: Optimizer, stage: Literal[3, "3 kept"], **options: Unpack[SetupOptions]
) -> tuple[FSDP, Optimizer]: ...
@overload
def setup(
    model: nn.Module, optimizer: Optimizer, stage: Literal[2], **options: Unpack[SetupOptions]
) -> tuple[ShardedDDP, OSS]: ...
@overload
def setup(
    model: nn.Module, optimizer: Optimizer, stage: Literal[1], **options: Unpack[SetupOptions]
) -> tuple[nn.Module, OSS]: ...
@overload
def setup(
    model: nn.Module, optimizer: Optimizer, stage: Stage, **options: Unpack[SetupOptions]
) -> tuple[nn.Module, Optimizer]: ...
@overload
def setup(
    model: nn.Module, optimizer: Sequence[Optimizer], stage: Stage, **options: Unpack[SetupOptions]
) -> tuple[nn.Module, list[Optimizer]]: ...
@overload  # a class, with its own options among these
def setup(
    model: nn.Module, optimizer: Callable[..., Optimizer], stage: Literal[3, "3 kept"], **options: Any
) -> tuple[FSDP, Optimizer]: ...
@overload
def setup(
    model: nn.Module, optimizer: Callable[..., Optimizer], stage: Literal[2], **options: Any
) -> tuple[ShardedDDP, OSS]: ...
@overload
def setup(
    model: nn.Module, optimizer: Callable[..., Optimizer], stage: Literal[1], **options: Any
) -> tuple[nn.Module, OSS]: ...
@overload
def setup(
    model: nn.Module, optimizer: Callable[..., Optimizer], stage: Stage, **options: Any
) -> tuple[nn.Module, Optimizer]: ...
def setup(
    model: nn.Module,
    optimizer: Optim,
    stage: Stage,
    *,
    params: Iterable[Any] | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
    device_mesh: DeviceMesh | None = None,
    partition: Partition = "auto",
    auto_wrap_policy: Policy = None,
    offload: Any = None,
    precision: GivenPrecision = None,
    reshard_after_forward: bool = True,
    **defaults: Any,
) -> tuple[nn.Module, Any]:
    """Collective. The wrapped model and its optimizer at a stage. Every stage trains to the same numbers.

    stage: what is sharded: 0 nothing (DistributedDataParallel), 1 optimizer state, 2 also gradients, 3 also parameters.
    optimizer: built of model.parameters(), or its class, with its arguments as `defaults`. A built one goes on with its
        groups, hooks and state, which must be the same on every rank. Stages 0 and 3 return it; stages 1 and 2 return
        an OSS made of it, and its schedulers set the rates of that: see OSS.from_optimizer. Or several built ones, such
        as [Muon(matrices), AdamW(rest)]: a list is returned, in the same order.
    params: with a class, parameters of the model, or groups of them with options of their own; by default all.
    process_group, partition, auto_wrap_policy: as in OSS and FSDP. device_mesh: the group, as a mesh of one dimension.
    offload: at stages 1 to 3, where shards and optimizer state are stored (zero.CPUOffload, zero.DiskOffload).
    precision: "bf16", "fp16" or their dtype: a float32 model computes in these 16 bits, while master weights, sums of
        gradients and optimizer state are float32, alike at every stage; "fp32": all is float32. Inputs of the model and
        of the units of stage 3 are cast; batch normalisation and buffers stay in float32. Stage 0 computes under
        torch.autocast, which chooses dtypes by operator, so that its numbers differ. Train fp16 with
        torch.amp.GradScaler. A zero.MixedPrecision makes other choices.
    reshard_after_forward: False keeps the parameters of stage 3 from forward to backward: as stage="3 kept", which
        zero.plan has, too.

    Stage 1 averages gradients as stage 2 does, and leaves them full in `param.grad`; to use DistributedDataParallel and
    its options build that and an OSS yourself. Without torch.distributed, stages 0 and 1 return the model as it
    is; 2 and 3 wrap it as on one rank.
    Raises ValueError on every rank for stages, options, parameters and optimizers that cannot be used, and RuntimeError
    if a launcher has started several ranks, but torch.distributed is not initialised.
    """
    if stage == "3 kept":
        stage, reshard_after_forward = 3, False
    given = {} if offload is None else {"offload": offload}
    if not reshard_after_forward:
        given["reshard_after_forward"] = reshard_after_forward
    one_mesh = device_mesh is not None and device_mesh.ndim == 1
    comm = Comm(device_mesh.get_group() if one_mesh and device_mesh is not None else process_group)
    ranks = process_group, device_mesh
    asked = Arguments(model, optimizer, stage, params, partition, precision, *ranks, given, defaults)
    asked.agree(comm)
    policy = asked.policy
    wrapped: nn.Module = model
    optimizers: Sequence[Optimizer]
    try:
        if stage in (1, 2):
            if stage == 1 and comm.group is None and comm.world == 1 and policy.param_dtype is None:
                optimizers = _oss(asked, comm, asked.options)
                take_over(parameters_of(model))
            else:  # 16 bits are averaged in float32, also alone
                with nullcontext() if policy.param_dtype is None else alike([comm], "the policies given to zero.setup"):
                    rounding = Rounding(policy, model, auto_wrap_policy, comm)
                rounding.start_alike()
                how: dict[str, Any] = {**asked.options, "precision": policy, "rounded": rounding.dtypes}
                optimizers = without_announcing()(_oss)(asked, comm, how)  # the wrapper says what both do
                wrapped = rounding.wrap(AveragingDDP if stage == 1 else ShardedDDP, optimizers)
            return wrapped, optimizers[0] if asked.is_one else optimizers
        if stage:
            how = {"auto_wrap_policy": auto_wrap_policy, "precision": policy, **asked.options}
            wrapped = FSDP(model, comm, partition=asked.fsdp_partition, **how)
        elif comm.group is not None:
            wrapped = DistributedDataParallel(model, process_group=comm.group)
        try:
            with Together([comm], "the optimizers of zero.setup") as together:
                optimizers = []
                for one in asked.optims:
                    if not isinstance(one, Optimizer):
                        one = one(parts_of(asked.groups) or parameters_of(model), **defaults)
                    elif isinstance(wrapped, FSDP):
                        wrapped.register_optimizer(one)  # before the first step: the state can be saved already
                    if not stage:
                        refuse_shards(one)
                    optimizers.append(one)
                together.agree()
        except Exception:
            if isinstance(wrapped, FSDP):
                wrapped.unwrap()  # what was corrected finds the model as it was
            raise
        if wrapped is model:
            take_over(parameters_of(model))
        if not stage and policy.param_dtype is not None:
            compute_under_autocast(wrapped, policy.param_dtype)
        return wrapped, optimizers[0] if asked.is_one else optimizers
    except (ValueError, TypeError, RuntimeError) as error:  # of the constructors: begins with what the user wrote
        error.args = (f"{asked.call}: {error}",)
        raise


def _oss(asked: Arguments, comm: Comm, options: dict[str, Any]) -> list[OSS]:
    """One of each optimizer. Those of whole parameters come first: the others then make memory equal."""
    named = {parts.of(param): name for name, param in asked.model.named_parameters()}
    how: Any = {"process_group": comm, "partition": asked.partition, **options}
    optim, asks = asked.optims[0], asked.partition
    if not isinstance(optim, Optimizer):
        if callable(asks):
            how["partition"] = lambda _, param: asks(named[parts.of(param)], param)
        oss = OSS(asked.groups or [*named], optim, **how, **asked.defaults)  # without names, as at stages 0 and 3
        oss.shards.rename(oss.param_groups, named)
        return [oss]
    if callable(asks):  # the optimizers' groups have no names to ask it by
        how["partition"] = lambda _, param: "whole" if param in asked.whole else "even"
    cut = {one: sum(param.nbytes for param in params_of(one) if param not in asked.whole) for one in asked.optims}
    in_order = sorted(asked.optims, key=cut.__getitem__)
    shares = Shares(comm.world, still_cut=sum(cut[one] for one in in_order[1:]))
    made: dict[Optimizer, OSS] = {}
    for one in in_order:
        made[one] = OSS.from_optimizer(one, shares=shares, **how)
        made[one].shards.rename(made[one].param_groups, named)
        shares = made[one].shards.shares
    return [made[one] for one in asked.optims]


@dataclass
class Arguments:
    """Arguments of zero.setup. options: those that mean something at some stages, by name. defaults: the optimizer's.

    `policy`: what `precision` means, after `agree`.

    `optims`: the optimizers, or the class, in a list; `kinds`: their classes. `is_one`: whether it was given without.
    `groups`: after `agree`, the parameters that `params` asks for, in groups. `found`: what each optimizer is known, or
    was measured, to need.
    """

    model: nn.Module
    optim: Optim
    stage: Any
    params: Iterable[Any] | None
    partition: Partition
    precision: Any
    process_group: Any
    device_mesh: DeviceMesh | None
    options: dict[str, Any]
    defaults: dict[str, Any]
    groups: list[dict[str, Any]] = field(default_factory=list)
    found: list[Finding | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.is_one = not isinstance(self.optim, Sequence) or isinstance(self.optim, str)
        self.policy = MixedPrecision()
        self.optims: list[Any] = [self.optim] if self.is_one else [*self.optim]  # type: ignore[misc]
        self.kinds = [type(one) if isinstance(one, Optimizer) else one for one in self.optims]

    def agree(self, comm: Comm) -> None:
        """Collective. Raises ValueError on every rank for what cannot be used on any."""
        with alike([comm], "the stages, models and optimizers given to zero.setup") as lines:
            self._refuse_unusable(comm)
            for optim, kind in zip(self.optims, self.kinds, strict=True) if self.stage else ():
                if comm.world == 1:
                    found = known(kind)
                elif isinstance(optim, Optimizer):
                    found = finding_of_built(optim)
                else:
                    found = finding_of(optim, self.defaults, [options(group) for group in self.groups or [{}]])
                if found is not None:
                    refuse_optimizer(title(kind), found, self.partition)
                if isinstance(optim, Optimizer) and comm.world > 1 and cut_for(self.partition, found) == "even":
                    refuse_uncut(optim)
                self.found.append(found)
            lines.append(f"stage {self.stage}, {self.policy}")
            built = [one for one in self.optims if isinstance(one, Optimizer)]
            of_each = (f"a built {called(one)} with state of {len(states_of(one))} parameters" for one in built)
            lines += of_each if built else ["a class"]
            names = {param: name for name, param in self.model.named_parameters()}
            groups = [group for one in built for group in one.param_groups] or self.groups or [{"params": [*names]}]
            lines += [f"optimizer options {alike_options(self.defaults)}", *describe_groups(groups, names)]
            lines.append(f"whole {[*self.whole.values()] if self.found else []}")
            if self.policy.param_dtype is not None:  # before stages 1 and 2 are built, values are sent
                lines += describe(self.model)

    @property
    def call(self) -> str:
        """As the user wrote it."""
        given = ", ".join(map(called, self.optims))
        return f"zero.setup(model, {given if self.is_one else f'[{given}]'}, stage={self.stage})"

    @property
    def fsdp_partition(self) -> Partition:
        if len(self.optims) > 1:
            return lambda _, param: "whole" if param in self.whole else "even"
        cut = cut_for(self.partition, self.found[0])
        # Not the measured one: FSDP then checks other optimizers that step its parameters, too.
        return self.partition if cut == "even" and known(self.kinds[0]) is not None else cut

    @cached_property
    def whole(self) -> dict[nn.Parameter, str]:
        """The parameters that stay whole where optimizers are built, with their names in the model."""
        whole: dict[nn.Parameter, str] = {}
        for optim, found in zip(self.optims, self.found, strict=True):
            if isinstance(optim, Optimizer):
                own = {*params_of(optim)}
                named = [(name, param) for name, param in self.model.named_parameters() if param in own]
                whole |= whole_among(cut_for(self.partition, found), named)
        return whole

    def _refuse_unusable(self, comm: Comm) -> None:
        """Raises ValueError for what cannot be used."""
        mesh, model, stage = self.device_mesh, self.model, self.stage
        if mesh is not None and mesh.ndim > 1:
            raise ValueError(
                f"device_mesh={mesh} has {mesh.ndim} dimensions. Pass the one that the model trains over: mesh['dp']. "
                "Hybrid strategies take two: zero.FSDP(model, device_mesh=mesh, sharding_strategy='HYBRID_SHARD')."
            )
        if mesh is not None and self.process_group is not None:
            raise ValueError("process_group and device_mesh both say which ranks train the model. Pass one of them.")
        if isinstance(self.model, Optimizer) and isinstance(self.optim, nn.Module):
            raise ValueError("the optimizer stands before the model. Call zero.setup(model, optimizer, stage=...).")
        if not isinstance(self.model, nn.Module):
            raise ValueError(
                f"zero.setup was given a {type(self.model).__name__} as the model. Pass an nn.Module; of several "
                "models, set up each, or pass an nn.ModuleList of them."
            )
        one: Any = self.optim
        if self.is_one and not isinstance(one, Optimizer) and (not callable(one) or isinstance(one, nn.Module)):
            given = "no optimizer (None)" if one is None else f"a {type(one).__name__} as the optimizer"
            raise ValueError(
                f"zero.setup was given {given}. Pass one that is built, or its class and its arguments: "
                "zero.setup(model, torch.optim.AdamW, stage=2, lr=1e-3)."
            )
        self.policy = as_precision(self.precision)
        refuse_scripted(self.model, inside=False)
        if isinstance(stage, bool) or not isinstance(stage, SupportsIndex) or stage not in (0, 1, 2, 3):
            raise ValueError(
                f"stage={stage!r} is no stage. Pass an int: 0 (DDP), 1 (OSS), 2 (ShardedDDP) or 3 (FSDP); or '3 kept'."
            )
        wrapped = next(((name, one) for name, one in model.named_modules() if isinstance(one, Wrapped)), None)
        if wrapped is not None and (stage < 3 or isinstance(unwrapped_of_torchs(model), Wrapped)):
            where = f", as {wrapped[0]!r}," if wrapped[0] else ""
            raise ValueError(
                f"zero.setup was given a model that is wrapped already{where} in a {type(wrapped[1]).__name__}, as in "
                "a notebook whose cell runs again. Pass what zero.unwrap(model) returns."
            )
        refuse_left(model.named_parameters())
        if stage < 3:
            refuse_sharded((repr(name), param) for name, param in model.named_parameters())
        for name, param in model.named_parameters() if stage < 3 else ():
            if param.is_meta:
                raise ValueError(
                    f"{name!r} is on the meta device and has no values, which stage 3 alone initialises. Call "
                    "model.to_empty(device=...) and initialise the model first."
                )
        if stage == 0 and any(map(parts.takes, parameters_of(model))):
            raise ValueError(
                "the model has DTensors, which DistributedDataParallel (stage 0) does not take. Take stage 1, 2 or 3."
            )
        for name, least, instead in (
            ("offload", 1, "Shards can be offloaded: take stage 1, 2 or 3."),
            ("reshard_after_forward", 3, "Below stage 3 parameters stay full anyway: leave it out."),
        ):
            if name in self.options and stage < least:
                raise ValueError(f"{name}={self.options[name]!r} means nothing at stage {stage}. {instead}")
        if stage in (1, 2):
            refuse_two_devices(model.named_parameters())
            refuse_unsendable(model.named_buffers())
        if stage:
            refuse_shared(((repr(name), param) for name, param in model.named_parameters()), model.named_buffers())
        refuse_precision(self.policy, self.model, self.stage)
        # Options of FSDP, or of DistributedDataParallel, among the optimizer's.
        of_fsdp = {name for name, taken in signature(FSDP).parameters.items() if taken.kind is taken.KEYWORD_ONLY}
        for option in sorted(of_fsdp & {*self.defaults}):
            raise ValueError(
                f"{option}= is an option of FSDP that zero.setup does not take. Wrap the model by zero.FSDP(model, "
                f"{option}=...), and build the optimizer of the parameters() of what that returns."
            )
        for option in sorted(signature(DistributedDataParallel).parameters.keys() & {*self.defaults}):
            raise ValueError(
                f"{option}= is an option of DistributedDataParallel. Leave it out: stages 1 to 3 average gradients "
                "themselves. Or build zero.OSS.from_optimizer(optimizer) and DistributedDataParallel(model, "
                f"{option}=..., gradient_as_bucket_view=True) yourself, which is stage 1."
            )
        parts.refuse_unfit(self.model.named_parameters(), [comm])
        own_options = [*signature(setup).parameters]
        for optim in self.optims:
            if not isinstance(optim, Optimizer):
                refuse_arguments(optim, self.defaults, own_options)
                continue
            for option in self.defaults:
                if near := nearest(option, own_options):
                    raise ValueError(f"zero.setup has no option {option}=.{near}")
        if self.params is not None:
            self.groups = as_groups(self.params, call="zero.setup")
        refuse_partition(self.partition)
        _refuse_foreign("zero.setup(params=) was given", self.model, self.groups)
        if self.groups and self.stage in (1, 2):
            own = {param for _, param in named_params(self.groups)}
            left = [name for name, one in self.model.named_parameters() if one.requires_grad and one not in own]
            if left:
                raise ValueError(
                    f"zero.setup(params=) lacks {len(left)} trained parameters, such as {left[0]!r}, whose gradients "
                    f"stage {self.stage} would not average. Add them, or freeze them by requires_grad_(False)."
                )
        if self.is_one and not isinstance(self.optim, Optimizer):
            # A class that cannot be built with these arguments, while the model is as it was. Others than torch's may
            # look for the parameters themselves, and are built of them once the model is sharded, which is undone where
            # they raise, but for what was rounded.
            groups = self.groups or [{"params": [*self.model.named_parameters()]}]
            if known(one) is not None or (self.stage in (1, 2) and self.policy.param_dtype is not None):
                refuse_unbuilt(one, groups, self.defaults)
        else:
            beside = [*([] if self.params is None else ["params"]), *self.defaults]
            _refuse_unfit(self.optims, self.model, self.stage, beside)


def _refuse_foreign(given: str, model: nn.Module, groups: list[dict[str, Any]]) -> None:
    """Raises ValueError for parameters that are none of the model's. given: its beginning."""
    own = {*parameters_of(model)}
    foreign = [(name, param) for name, param in named_params(groups) if param not in own]
    if not foreign:
        return
    name, param = foreign[0]
    raise ValueError(
        f"{given} {len(foreign)} parameters that are not the model's, such as {name} of shape "
        f"{list(param.shape)}. Pass parameters of the same model object, as it is now; of two models, set up each, or "
        "one module that holds both."
    )


def _refuse_unfit(optims: Sequence[Any], model: nn.Module, stage: int, beside: Iterable[str]) -> None:
    """Raises ValueError for built optimizers that cannot train the model. beside: the names of options for them."""
    odd = [one for one in optims if not isinstance(one, Optimizer)]
    if odd or not optims:
        raise ValueError(
            f"zero.setup was given a list of optimizers with {called(odd[0]) if odd else 'nothing'} in it. Pass "
            "optimizers that are built, each of its own parameters: [Muon(matrices, ...), AdamW(rest, ...)]."
        )
    names = " and the ".join(map(called, optims))
    for option in beside:
        raise ValueError(
            f"zero.setup was given an {names} that is built already, and {option}= for it. Set options in its "
            f"param_groups; or pass its class: zero.setup(model, {called(optims[0])}, stage={stage}, {option}=...)."
        )
    if any(map(parts.takes, parameters_of(model))):
        raise ValueError(
            f"the model has DTensors, and the {names} was built of these, while plain parameters are stepped in their "
            f"place. Pass its class and its arguments: zero.setup(model, {called(optims[0])}, stage={stage}, ...)."
        )
    named, counts = dict(model.named_parameters()), Counter(param for one in optims for param in params_of(one))
    missing = [own for own, param in named.items() if param.requires_grad and param not in counts]
    if missing and not counts.keys() & {*named.values()}:
        raise ValueError(
            f"the {names} given to zero.setup has none of the model's parameters: those of another one, of a copy "
            "such as float32 masters, or from before the model was moved or loaded with assign=True. Build it of "
            "model.parameters(); precision= keeps masters."
        )
    if missing:
        raise ValueError(
            f"the {names} given to zero.setup does not have {len(missing)} trained parameters of the model, such as "
            f"{missing[0]!r}, which nothing would step. Add them by its add_param_group, or freeze them by "
            "requires_grad_(False)."
        )
    if twice := [own for own, param in named.items() if counts[param] > 1]:
        raise ValueError(
            f"{twice[0]!r} is a parameter of several of the optimizers given to zero.setup ({names}), each of which "
            "would step it. Give each parameter to one of them."
        )
    for one in optims:
        _refuse_foreign(f"the {called(one)} given to zero.setup has", model, one.param_groups)
        refuse_unfit(one, OSS, moves=stage in (1, 2))
