"""The ranks of a model, and what one of them has of it and its optimizers, at every stage.

    stage               parameters                    optimizer state       written by
    0  plain, DDP       full, the same on all ranks   full, the same        each rank an equal share
    1  OSS              full, the same                this rank's shards    the owner of each shard
    2  OSS, ShardedDDP  full, the same                this rank's shards    the owner of each shard
    3  FSDP             this rank's shards            this rank's shards    the owner of each shard

Buffers, and parameters in no shard group, are full on every rank. Rank 0's buffers are the ones that count, as in
training. Parameters that no wrapper keeps the same on all ranks are compared before they are written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zero._torch.compiling import name_without_compile
from zero._torch.modules import parameters_of
from zero._torch.tensors import as_plain_tensors
from zero.checkpoint.format import (
    CheckpointError,
    Geometry,
    Index,
    Part,
    all_of,
    decode,
    geometry_of,
    listed,
    memory_order,
    refuse_unstorable,
    under,
)
from zero.comm import Comm
from zero.comm.together import alike
from zero.comm.waiting import running_call
from zero.fsdp import FSDP
from zero.fsdp.fsdp import running_model
from zero.fsdp.model import models
from zero.fsdp.unit import refuse_busy
from zero.measure.param_groups import params_of
from zero.oss import OSS
from zero.sdp import AveragingDDP, ShardedDDP
from zero.shards.cut import held
from zero.shards.masters import settled
from zero.shards.partition import Place, places_in
from zero.shards.shard_group import GroupState
from zero.state.stepped import SteppedShards, refuse_retired
from zero.tensor_parallel import parts
from zero.wrap.precision import original_dtypes
from zero.wrappers import comms_of, prepared, stepped_by, taken_out, unwrapped


class Ranks:
    """The ranks of the shard group and, where there are any, those that have other parts of the tensors (tensor
    parallelism), and the replicate group.

    rank, world: in the shard group, and among the ranks that have other parts. writes: whether this rank is in the
    first replica, which writes what all replicas hold. all: how many ranks there are. number: this rank's place among
    all, as `gather` orders them; the first's is 0.
    """

    def __init__(self, comms: Sequence[Comm], parts: Comm | None) -> None:
        shards, *replicas = comms
        self.comms = [shards, *([] if parts is None else [parts]), *replicas]
        self.writes = all(comm.rank == 0 for comm in replicas)
        self.all, self.number = 1, 0
        for comm in self.comms:
            if comm not in replicas:
                self.rank, self.world = self.number + self.all * comm.rank, self.all * comm.world
            self.all, self.number = self.all * comm.world, self.number + self.all * comm.rank
        self.first = self.number == 0

    def gather(self, value: Any) -> list[Any]:
        """Collective. The JSON values of all ranks, in order."""
        gathered = [value]
        for comm in self.comms:
            gathered = [one for text in comm.all_gather_text(json.dumps(gathered)) for one in json.loads(text)]
        return gathered

    @contextmanager
    def together(
        self, what: str = "", *, writing: object = None, before: str = "", after: str = ""
    ) -> Iterator[list[str]]:
        """Collective. What is raised here, or differs between the lines of ranks, is raised on every rank."""
        try:
            with alike(self.comms, what) as lines:
                try:
                    yield lines
                except Exception as error:  # also from the user's optimizer, modules or values
                    raise ValueError(f"{before}{described(error, writing)}{after}") from None
        except ValueError as error:
            raise CheckpointError(str(error)) from None


def described(error: Exception, writing: object = None) -> str:
    """An error as a message for the user. writing: where it was written to; None if it was read."""
    if isinstance(error, ValueError):
        return f"{str(error).removesuffix('.')}."
    if writing is None:
        return f"{type(error).__name__}: {error}."
    file, reason = writing, f"{type(error).__name__}: {error}"
    if isinstance(error, OSError):
        file, reason = error.filename or writing, str(error.strerror or error)
    return f"{file} could not be written ({reason}). Earlier checkpoints stay."


@dataclass(frozen=True)
class Held(Part):
    """Elements of a full tensor, which this rank has in `tensor`.

    name: the path of a stored tensor; of what an optimizer steps, the parameter's name.
    tensor: has these elements, or all of the full tensor. Of as many dimensions as the full one, with any strides; or
        flat, such as a shard, with its elements in the order of `full`.
    shared: whether all ranks have the same elements. kept: whether a wrapper keeps them so.
    written: of masters, the parameter's elements, which replace those that were written since.
    """

    name: str
    tensor: Tensor
    shared: bool = False
    kept: bool = False
    written: Tensor | None = None

    @property
    def own(self) -> Geometry:
        """Of `tensor`."""
        with as_plain_tensors():
            order = self.full.order if self.tensor.dim() == len(self.full.shape) else None
            return Geometry(tuple(self.tensor.shape), self.full.dtype, order)

    @property
    def ordered(self) -> Tensor:
        """The tensor, permuted so that its elements are counted row by row."""
        return next(self.own.counted(self.tensor.detach()))[1]

    def flat(self) -> Tensor:
        """The elements, flat, in the order and dtype of `full`: a view where memory has them so, otherwise a copy."""
        with as_plain_tensors():
            flat = self.ordered.reshape(-1)
            if len(flat) > self.numel:
                flat = flat[self.start : self.stop]
            flat = flat.to(self.full.dtype)
            return flat if self.written is None else settled(flat, self.written)


def whole(name: str, tensor: Tensor, kept: bool) -> Held:
    """All of a tensor that this rank has full, and so have the others."""
    return Held(**vars(all_of(geometry_of(tensor))), name=name, tensor=tensor, shared=True, kept=kept)


class Training:
    """A model and its optimizers, seen from this rank.

    model: as it was given. module: the user's own, inside of `wrappers`, which are around or in it.

    Raises CheckpointError within forward, backward and summon_full_params() of stage 3, on every rank.

    Once `look` has been called:

    shards: of each optimizer what holds the state.
    tensors: parameters and buffers, each once, by the innermost module's name, under which they are stored.
    parts: by these names the full tensors, buffers in their own dtype also where the model has another; and which of
        the elements the ranks of the shard group have.
    names: those of `tensors`, by tensor.
    tied: for each further name of a tensor the name that it is stored under.
    frozen: the names of frozen parameters.
    values: the entries of the state_dict that are no tensors, by name; holders: the modules that they come from.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        process_group: torch.distributed.ProcessGroup | None,
    ) -> None:
        if not isinstance(model, nn.Module):
            call = running_call()
            raise TypeError(
                f"{call} was given a {type(model).__name__} for the model, which is a module and the second argument: "
                f"write {call}(path, model, optimizer). Values of your own are saved by extra={{...}}."
            )
        given = [optimizer] if isinstance(optimizer, Optimizer) else optimizer or ()
        self.model = model
        self.optimizers = [prepared(one) for one in given]
        self._sharding = [one for one in self.optimizers if isinstance(one, OSS)]
        self.module, self.wrappers = module, wrappers = unwrapped(model)
        # AveragingDDP is a ShardedDDP, whose gradients stay full.
        kinds: list[tuple[type, int]] = [(FSDP, 3), (AveragingDDP, 1), (ShardedDDP, 2), (OSS, 1)]
        each = [[stage for kind, stage in kinds if isinstance(one, kind)] for one in [*wrappers, *self._sharding]]
        self.stage = max((stages[0] for stages in each if stages), default=0)
        self._tensor_parallel = parts.ranks(parameters_of(module))
        try:  # the shard group and, if there is one, the replicate group
            if wrappers:
                comms = comms_of(wrappers)
            elif self._sharding:
                comms = [self._sharding[0].comm]
            else:
                comms = [Comm.default() if process_group is None else Comm(process_group)]
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        self.ranks = Ranks(comms, self._tensor_parallel)
        # Not with what ranks compare: those that have not called may be in operations of forward or backward.
        for running in (running_model(one) for one in wrappers if isinstance(one, FSDP)):
            with running.together:
                try:
                    refuse_busy(running.units, running_call() or "")
                except RuntimeError as error:
                    raise CheckpointError(str(error)) from None

    def look(self, *, stores_frozen: bool = False) -> None:
        """Names the tensors and finds their shards. stores_frozen: whether all of frozen modules is stored."""
        module = self.module
        self.tensors, self.tied, self.names = dict[str, Tensor](), dict[str, str](), dict[Tensor, str]()
        self.values, self.holders = dict[str, Any](), dict[str, nn.Module]()
        with taken_out(module):
            known = {*parameters_of(module), *module.buffers()}
            try:
                given_state = module.state_dict(keep_vars=True)
            except Exception as error:
                raise ValueError(f"the module's state_dict() raised {type(error).__name__}: {error}") from error
            modules = dict(module.named_modules(remove_duplicate=False))
            for given, value in given_state.items():
                name = name_without_compile(given)
                if isinstance(value, Tensor) and value in known:
                    if value in self.names:
                        self.tied[name] = self.names[value]
                        continue
                    self.names[value], self.tensors[name] = name, value
                    refuse_unstorable(repr(name), value)
                    continue
                if name.rpartition(".")[2] == "_extra_state":
                    self.values[name] = value
                    self.holders[name] = module.get_submodule(given.rpartition(".")[0])
                    continue
                maker = given
                while maker not in modules:
                    maker = maker.rpartition(".")[0]
                own = [*modules[maker].parameters(recurse=False)]
                of_frozen = bool(own) and not any(param.requires_grad for param in own)  # scales of quantised weights
                if not of_frozen or stores_frozen:
                    remedy = "; what belongs to frozen modules is left out by frozen=False of save" if of_frozen else ""
                    raise ValueError(
                        f"{name!r} of the module's state_dict is none of its parameters and buffers, but was made by a "
                        f"hook. zero.checkpoint stores parameters, buffers, and what get_extra_state() returns{remedy}"
                    )
        params = {name: one for name, one in self.tensors.items() if isinstance(one, nn.Parameter)}
        self.frozen = {name for name, one in params.items() if not one.requires_grad}

        synchronising = [one for one in self.wrappers if isinstance(one, DistributedDataParallel | ShardedDDP)]
        kept_by = [module] if self.ranks.all == 1 else synchronising
        self._kept = {param for one in kept_by for param in parameters_of(one)}
        sharded = [stepped for one in self.optimizers if (stepped := getattr(one, "stepped_shards", None)) is not None]
        groups = [*dict.fromkeys(group for stepped in sharded for group in stepped.shard_groups)]
        # Masters of parameters that are rounded are weights, also where no optimizer is given.
        passed = [one.shards for one in self._sharding]
        steppers = {id(one): one for param in params.values() if (one := held(param).stepped_by()) is not None}
        self.rounded = [one for one in steppers.values() if one.rounded and not any(one is other for other in passed)]
        groups += [group for one in self.rounded for group in one.rounded]
        self._in_shards = set[Any]()
        for one in self.wrappers:
            if isinstance(one, FSDP):
                for unit in running_model(one).units:  # not by its method, in which ranks would wait for one another
                    unit.reshard()
                groups += running_model(one).index.groups
                self._in_shards |= running_model(one).index.keys()
        elsewhere = {param for one in models() for param in one.index} - self._in_shards
        if foreign := [name for name, param in params.items() if param in elsewhere]:
            raise ValueError(
                f"{foreign[0]!r} is sharded by an FSDP that is not in the module that was given. Pass the model that "
                "zero.setup or FSDP returned; after zero.unwrap, what that returned"
            )
        self._places = dict[Any, Place](places_in(groups))
        for number, optimizer in enumerate(self.optimizers):
            if not isinstance(optimizer, Optimizer):
                raise ValueError(f"optimizer {number} is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
            refuse_retired(optimizer, ValueError)
            if isinstance(optimizer, OSS) and optimizer.comm.group is not self.ranks.comms[0].group:
                raise ValueError("the model and its OSS were given different process groups. Pass one to both")
            for index, param in enumerate(params_of(getattr(optimizer, "stepped_shards", optimizer))):
                if param not in self.names:
                    raise ValueError(
                        f"parameter {index} of the {type(optimizer).__name__}, of shape {list(param.shape)}, is not in "
                        "the state_dict of the model. Pass the model that the optimizer trains"
                    )
        for group in groups:
            if group.state is GroupState.GATHERING:
                raise ValueError(f"{group.names[0]} is being gathered. Save and load between steps")
            if (moved := group.moved()) is not None:
                raise ValueError(f"{moved} was moved, cast or given other data after it was sharded: do that before")
        self.shards = [stepped_by(module, self.wrappers, one) for one in self.optimizers]

        self.parts, dtypes = dict[str, Part](), original_dtypes(module)
        for name, tensor in self.tensors.items():
            if (place := self._places.get(tensor)) is None:
                self.parts[name] = all_of(replace(geometry_of(tensor), dtype=dtypes.get(tensor, tensor.dtype)))
                continue
            group, position = place.group, place.position
            shape, stride = group.shapes.full[position], group.shapes.strides[position]
            full = Geometry(tuple(shape), group.shard.dtype, memory_order(shape, stride))
            slice_of = parts.slice_of(group.params[position])
            self.parts[name] = all_of(full) if slice_of is None else full.part(*slice_of)

    def names_in(self, index: Index, *, strict: bool = True) -> dict[str, str]:
        """For each of the model's tensors, the name that it is stored under in a checkpoint. strict: whether each has
        one, and the checkpoint no others."""
        here, there = {name: name for name in self.tensors} | self.tied, index.stored_as()
        found: dict[str, str] = {}
        for alias, name in here.items():
            if alias in there:  # a tensor with several names matches a stored tensor that has any of them
                found.setdefault(name, there[alias])
        differing = []
        for name, stored_as in found.items():
            stored = index.left_out.get(stored_as) or index.tensors[f"model/{stored_as}"].geometry
            full = self.parts[name].full
            if not full.takes(stored):
                differing.append(f"{name} (saved {stored}, here {full})")
        names = [
            ("it has nothing for", [name for name in self.tensors if strict and name not in found]),
            ("the model has no", [name for name in there if strict and name not in here]),
            ("these differ", differing),
        ]
        problems = [f"{what}: {listed(some)}" for what, some in names if some]
        if not problems:
            problems += [
                f"{name} and {other} were {'two' if tied_here else 'one tensor'} when it was saved, and are not here"
                for name, other in [*index.tied.items(), *self.tied.items()]
                if (strict or {name, other} <= here.keys() & there.keys())
                and (tied_here := here[name] == here[other]) != (there.get(name) == there.get(other))
            ]
        if strict and self.values.keys() != under("model/", index.values).keys() and not problems:
            problems.append("other modules had extra state (get_extra_state) when it was saved")
        if problems:
            raise ValueError(f"it is of another model: {'; '.join(problems)}")
        return found

    def set_values(self, values: dict[str, Any]) -> None:
        """Collective. The modules take their extra state, given as JSON by name; if one refuses it, all get theirs
        back."""
        try:
            with self.ranks.together():
                for name, value in values.items():
                    if name in self.holders:
                        self.holders[name].set_extra_state(decode(value))
        except CheckpointError:
            for name, value in self.values.items():
                with suppress(Exception):  # a module may refuse even its own state
                    self.holders[name].set_extra_state(value)
            raise

    def left_out(self) -> set[str]:
        """The names of frozen parameters of which this rank has no state: what has state was trained before it was
        frozen, and its values are nowhere else. Only the owners of a parameter's shards know of its state."""
        stepped = ((shards, one) for shards in self.shards for one in self.stepped(shards))
        return self.frozen - {one.name for shards, one in stepped if shards.optim.state.get(one.tensor)}

    def repeats(self, name: str) -> bool:
        """Whether it is the same on all ranks that have parts of other tensors, and this is not the first of these."""
        if self._tensor_parallel is None or self._tensor_parallel.rank == 0 or self.tensors[name] not in self._places:
            return False
        return parts.others(self.tensors[name]) is None  # type: ignore[arg-type]

    def held(self, name: str, *, owned: bool = False) -> Held | None:
        """What this rank keeps of a parameter or buffer; None without a shard. owned: the shard, also if it is full."""
        tensor = self.tensors[name]
        if tensor in self._in_shards or (owned and tensor in self._places):
            place = self._places[tensor]
            return None if place.span is None else self._shard("model/", place, place.group.shard)
        kept = tensor in self._kept
        return Held(**vars(self.parts[name]), name=f"model/{name}", tensor=tensor, shared=True, kept=kept)

    def masters(self) -> Iterator[Held]:
        """This rank's shards of masters, as the next step uses them."""
        given = [group for one in self._sharding for group in one.shards.shard_groups]
        for group in [*given, *(group for one in self.rounded for group in one.rounded)]:
            if (master := group.master) is not None:
                own = (index for index in group.shapes.spans if group.params[index] in self.names)
                for place in (Place(group, index) for index in own):
                    written = self._shard("master/", place, group.shard).tensor
                    yield replace(self._shard("master/", place, master), written=written)

    def _shard(self, prefix: str, place: Place, shards: Tensor) -> Held:
        """The elements of a parameter that this rank owns. prefix: of the path. shards: those of the whole group."""
        span = place.span
        assert span is not None
        name = self.names[place.group.params[place.position]]
        full, start = replace(self.parts[name].full, dtype=shards.dtype), self.parts[name].start + span.start
        own = shards[span.offset : span.offset + span.numel]
        return Held(full, start, start + span.numel, f"{prefix}{name}", own)

    def stepped(self, shards: SteppedShards) -> Iterator[Held]:
        """What this rank's optimizer steps, parameter by parameter, by their names."""
        for param in params_of(shards):
            # An optimizer without shard groups holds the full parameters, perhaps of another's OSS.
            place = self._places.get(param) if shards.shard_groups else None
            if place is None:
                yield whole(self.names[param], param, param in self._kept)
            elif place.span is not None:
                yield replace(self._shard("", place, place.group.shard), tensor=shards.part(param))


def names_left_out(model: nn.Module, optimizers: Sequence[Optimizer]) -> set[str]:
    """Collective. Each name of the parameters that are left out where frozen ones are."""
    training = Training(model, optimizers, None)
    with training.ranks.together():
        training.look()
    found = set[str].intersection(*map(set, training.ranks.gather([*training.left_out()])))
    return found | {alias for alias, name in training.tied.items() if name in found}
