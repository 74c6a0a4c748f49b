"""What zero.setup was given, looked at while nothing is changed yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from typing import Any, SupportsIndex

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zero._torch.compiling import unwrapped_of_torchs
from zero._torch.modules import parameters_of
from zero.comm import Comm
from zero.comm.together import alike
from zero.fsdp import FSDP
from zero.measure.built import finding_of_built, refuse_arguments, refuse_unbuilt
from zero.measure.kinds import Finding, finding_of, known, title
from zero.measure.param_groups import called, described_options, nearest, options, params_of
from zero.oss import OSS
from zero.oss.from_optimizer import refuse_uncut, refuse_unfit, states_of
from zero.precision import refuse_precision
from zero.shards.arguments import as_groups, named_params, refuse_two_devices
from zero.shards.partition import Partition, cut_for, refuse_optimizer, refuse_partition, whole_among
from zero.shards.shapes import refuse_shared, refuse_unsendable
from zero.tensor_parallel import parts
from zero.wrap.gradients import refuse_left
from zero.wrap.precision import MixedPrecision, as_precision
from zero.wrap.wrapper import describe, refuse_scripted
from zero.wrappers import Wrapped

One = Callable[..., Optimizer] | Optimizer
"""The class of an optimizer, or an optimizer of the full parameters."""

Optim = One | Sequence[Optimizer]
"""Also several optimizers, each of some of the parameters."""


@dataclass
class Arguments:
    """Arguments of zero.setup. options: those that mean something at some stages, by name. defaults: the optimizer's.

    `policy`: what `precision` means, after `agree`.

    `optims`: the optimizers, or the class, in a list; `kinds`: their classes. `is_one`: whether it was given without.
    `names`: of all options that zero.setup has.
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
    names: Sequence[str] = ()
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
            groups = [group for one in built for group in one.param_groups] or self.groups
            for what, given in (("optimizer", self.defaults), *(("group", options(one)) for one in groups)):
                # Those that are the same text in every process: others may have an address in theirs.
                kinds = bool, int, float, str, type(None), tuple
                plain = {name: value for name, value in given.items() if isinstance(value, kinds)}
                lines.append(f"{what} options {described_options(plain)}")
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
            raise ValueError(f"stage={stage!r} is no stage. Pass an int: 0 (DDP), 1 (OSS), 2 (ShardedDDP) or 3 (FSDP).")
        wrapped = next(((name, one) for name, one in model.named_modules() if isinstance(one, Wrapped)), None)
        if wrapped is not None and (stage < 3 or isinstance(unwrapped_of_torchs(model), Wrapped)):
            where = f", as {wrapped[0]!r}," if wrapped[0] else ""
            raise ValueError(
                f"zero.setup was given a model that is wrapped already{where} in a {type(wrapped[1]).__name__}, as in "
                "a notebook whose cell runs again. Pass what zero.unwrap(model) returns."
            )
        refuse_left(model.named_parameters())
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
        for optim in self.optims:
            if not isinstance(optim, Optimizer):
                refuse_arguments(optim, self.defaults, self.names)
                continue
            for option in self.defaults:
                if near := nearest(option, self.names):
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
    """Raises ValueError for built optimizers that cannot train the model at the stage.

    beside: the names of options for them.
    """
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
        refuse_unfit(one, OSS, rebuilds=stage in (1, 2))
