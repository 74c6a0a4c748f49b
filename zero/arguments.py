"""What zero.setup was given, looked at while nothing is changed yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from zero._torch.compiling import uncompiled
from zero.comm import Comm
from zero.measure.built import finding_of_built
from zero.measure.kinds import Finding, finding_of, known, title
from zero.measure.param_groups import called, options, params_of
from zero.oss import OSS
from zero.oss.from_optimizer import problem_of, states_of, uncut_state
from zero.precision import precision_problem
from zero.shards.arguments import as_groups, named_params
from zero.shards.partition import Partition, cut_for, optimizer_problem, partition_problem
from zero.shards.shapes import shared_memory
from zero.tensor_parallel import parts
from zero.wrap.wrapper import describe
from zero.wrappers import Wrapped

Optim = Callable[..., Optimizer] | Optimizer
"""The class of an optimizer, or an optimizer of the full parameters."""


@dataclass
class Arguments:
    """Arguments of zero.setup. options: those that mean something at some stages, by name. defaults: the optimizer's.

    `groups`: after `agree`, the parameters that `params` asks for, in groups. `found`: what the optimizer is known, or
    was measured, to need.
    """

    model: nn.Module
    optim: Optim
    stage: int
    params: Iterable[Any] | None
    partition: Partition
    options: dict[str, Any]
    defaults: dict[str, Any]
    groups: list[dict[str, Any]] = field(default_factory=list)
    found: Finding | None = None

    def agree(self, comm: Comm, problem: str | None) -> None:
        """Collective. Raises ValueError on every rank for what cannot be used on any. problem: one found before."""
        problem = problem or self._problem()
        if self.stage and not problem:
            self.found, problem = self._measured(comm)
        lines = [f"stage {self.stage}, precision {self.options.get('precision')}", _described(self.optim)]
        if "precision" in self.options:  # before stages 1 and 2 are built, values are sent
            lines += describe(self.model)
        comm.compare("the stages, models and optimizers given to zero.setup", lines, problem)

    @property
    def fsdp_partition(self) -> Partition:
        cut = cut_for(self.partition, self.found)
        # Not the measured one: FSDP then checks other optimizers that step its parameters, too.
        return self.partition if cut == "even" and known(self._class) is not None else cut

    @property
    def _class(self) -> Callable[..., Optimizer]:
        return type(self.optim) if isinstance(self.optim, Optimizer) else self.optim

    def _problem(self) -> str | None:
        problem = _unusable(self.stage, self.options, self.model)
        if problem is None and self.params is not None:
            self.groups, problem = as_groups(self.params, call="zero.setup")
        problem = problem or partition_problem(self.partition)
        problem = problem or _foreign("zero.setup(params=) was given", self.model, self.groups)
        if problem is None and isinstance(self.optim, Optimizer):
            beside = [*([] if self.params is None else ["params"]), *self.defaults]
            problem = _unfit(self.optim, self.model, self.stage, beside)
        return problem

    def _measured(self, comm: Comm) -> tuple[Finding | None, str | None]:
        """Returns what is known or measured of the optimizer, and an error message if it cannot be sharded so."""
        optim, partition = self.optim, self.partition
        if comm.world == 1:
            found = known(self._class)
        elif isinstance(optim, Optimizer):
            found = finding_of_built(optim)
        else:
            found = finding_of(optim, self.defaults, [options(group) for group in self.groups or [{}]])
        problem = None if found is None else optimizer_problem(title(self._class), found, partition)
        if problem is None and isinstance(optim, Optimizer) and comm.world > 1 and cut_for(partition, found) == "even":
            problem = uncut_state(optim)
        return found, problem


def _foreign(given: str, model: nn.Module, groups: list[dict[str, Any]]) -> str | None:
    """Returns an error message for parameters that are none of the model's. given: its beginning."""
    own = {*model.parameters()}
    foreign = [(name, param) for name, param in named_params(groups) if param not in own]
    if not foreign:
        return None
    name, param = foreign[0]
    return (
        f"{given} {len(foreign)} parameters that are not the model's, such as {name} of shape "
        f"{list(param.shape)}. Pass parameters of the same model object, as it is now; of two models, set up each, or "
        "one module that holds both."
    )


def _unfit(optim: Optimizer, model: nn.Module, stage: int, beside: Iterable[str]) -> str | None:
    """Returns an error message for a built optimizer that cannot train the model at the stage. beside: the names of
    options for it."""
    name = called(optim)
    for option in beside:
        return (
            f"zero.setup was given an {name} that is built already, and {option}= for it. Set options in its "
            f"param_groups; or pass its class: zero.setup(model, {name}, stage={stage}, {option}=...)."
        )
    if any(map(parts.takes, model.parameters())):
        return (
            f"the model has DTensors, and the {name} was built of these, while plain parameters are stepped in their "
            f"place. Pass its class and its arguments: zero.setup(model, {name}, stage={stage}, ...)."
        )
    held = {*params_of(optim)}
    missing = [own for own, param in model.named_parameters() if param.requires_grad and param not in held]
    if missing:
        return (
            f"the {name} given to zero.setup does not have {len(missing)} trained parameters of the model, such as "
            f"{missing[0]!r}, which nothing would step. Add them by its add_param_group, or freeze them by "
            "requires_grad_(False)."
        )
    foreign = _foreign(f"the {name} given to zero.setup has", model, optim.param_groups)
    return foreign or problem_of(optim, OSS, rebuilds=stage in (1, 2))


def _described(optim: Optim) -> str:
    """What must be the same on every rank of a built optimizer."""
    if not isinstance(optim, Optimizer):
        return "a class"
    return f"a built {called(optim)} with state of {len(states_of(optim))} parameters"


def ranks_of(group: Any, mesh: DeviceMesh | None, model: nn.Module) -> tuple[Comm, str | None]:
    """Returns the ranks that train the model together, and an error message if they cannot."""
    problem = None
    if mesh is not None and mesh.ndim > 1:
        problem = (
            f"device_mesh={mesh} has {mesh.ndim} dimensions. Pass the one that the model trains over: mesh['dp']. "
            "Hybrid strategies take two: zero.FSDP(model, device_mesh=mesh, sharding_strategy='HYBRID_SHARD')."
        )
    elif mesh is not None:
        if group is not None:
            problem = "process_group and device_mesh both say which ranks train the model. Pass one of them."
        group = mesh.get_group()
    comm = Comm(group)
    return comm, problem or parts.problem(model.named_parameters(), [comm])


# The stages at which an option means something.


_STAGES = {"precision": (0, 1, 2, 3), "offload": (1, 2, 3), "mixed_precision": (3,), "master_dtype": (1, 2)}

_INSTEAD = {
    "offload": "Shards can be offloaded: take stage 1, 2 or 3.",
    "mixed_precision": "Pass precision='bf16', which trains alike at every stage; or, at stages 1 and 2, convert the "
    "model to 16 bits and pass master_dtype=torch.float32.",
    "master_dtype": "Pass precision='bf16' with a model in float32, which trains alike at every stage; at stage 3 the "
    "shards are the masters.",
}


def _unusable(stage: object, given: Mapping[str, Any], model: nn.Module) -> str | None:
    """Returns an error message for a stage that is unknown, a model, or options that mean nothing at the stage."""
    if stage not in (0, 1, 2, 3):
        return f"stage={stage!r} is unknown. Choose 0 (DDP), 1 (OSS), 2 (ShardedDDP) or 3 (FSDP)."
    wrapped = next(((name, one) for name, one in model.named_modules() if isinstance(one, Wrapped)), None)
    if wrapped is not None and (stage < 3 or isinstance(uncompiled(model), Wrapped)):
        where = f", as {wrapped[0]!r}," if wrapped[0] else ""
        return (
            f"zero.setup was given a model that is wrapped already{where} in a {type(wrapped[1]).__name__}, as in a "
            "notebook whose cell runs again. Pass what zero.unwrap(model) returns."
        )
    if stage == 0 and any(map(parts.takes, model.parameters())):
        return "the model has DTensors, which DistributedDataParallel (stage 0) does not take. Take stage 1, 2 or 3."
    if "precision" in given:
        beside = [f"{name}={given[name]!r}" for name in ("mixed_precision", "master_dtype") if name in given]
        problem = precision_problem(given["precision"], model, stage, beside)
        if problem is not None:
            return problem
    wrong = next((name for name in given if stage not in _STAGES[name]), None)
    if wrong is not None:
        return f"{wrong}={given[wrong]!r} means nothing at stage {stage}. {_INSTEAD[wrong]}"
    named = ((repr(name), param) for name, param in model.named_parameters())
    return shared_memory(named, model.named_buffers()) if stage else None
