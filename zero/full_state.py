"""Weights and optimizer state in full, the same at any stage: as dictionaries, and as streams that hold one unit. Where
they are loaded, each rank takes its elements of one tensor after another."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero._torch.compiling import name_without_compile, named_as_compiled, renamed, versions_of, with_versions
from zero._torch.modules import loads_by_itself, parameters_of
from zero._torch.optimizers import with_load_hooks, with_state_hooks
from zero.comm import AGREEMENT, Comm
from zero.comm.together import MOST_FLAGS, Together, alike
from zero.comm.waiting import calling
from zero.fsdp.full_weights import Recipient, full_weights, gathered, loading, named_tensors
from zero.fsdp.model import models_of
from zero.measure.built import state_made_by
from zero.measure.kinds import ELEMENTWISE
from zero.measure.param_groups import numbers_of, options, params_of
from zero.oss import OSS
from zero.sdp import ShardedDDP
from zero.shards.owned_shards import LoadsMasters
from zero.state import gathered as gathered_states
from zero.state import leaves
from zero.state import optimizer_state as states
from zero.state.given import OPTION, STATE, WEIGHT, FromFirst, Label, first_alone
from zero.state.optimizer_state import Leaf
from zero.state.shard_mark import marks_of
from zero.state.stepped import SteppedShards
from zero.tensor_parallel.parts import is_first
from zero.wrap.precision import original_dtypes
from zero.wrappers import Wrapped, comms_of, each, names_of, stepped_by, stepped_for, taken_out, unwrapped

Device = torch.device | str | None
WITHIN = "/"
"""Between the name of a parameter and the key of its state, in the names of streams. torch's names have dots."""

Given = Mapping[str, Any] | Iterable[tuple[str, Tensor]] | None


@calling("zero.full_state_dict")
def full_state_dict(
    model: nn.Module, to: int | None = 0, device: Device = "cpu", dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """Collective. The full weights as copies, under the module's own names, whatever wraps it.

    Takes FSDP, ShardedDDP, DistributedDataParallel, modules that contain them, plain ones, and modules inside of these,
    compiled or not. Tied parameters share one copy. Shards are gathered unit by unit: besides the result, a rank that
    gets it holds at most one unit, and other ranks hold nothing. Where the module has hooks of the user's on its
    state_dict(), or a state_dict() of its own, the recipient holds all full parameters at once, on `device`.

    to: the rank of the model's process group that gets the weights; others send theirs and get an empty dictionary. In
        hybrid strategies ranks are numbered through the first replica first. None: every rank gets the weights, which
        takes as many copies on a host as it has ranks.
    device: the weights' device, by default the CPU, whose memory they need; None for that of the parameters.
    dtype: of floating-point tensors, by default that of the model as the user made it: where `precision=` stores
        parameters rounded, these are the masters.

    Weights of a tensor parallel model are whole tensors; `to` then means one of the ranks that have the parts.

    Raises ValueError where `to` is no rank of the group, RuntimeError within forward and backward.
    """
    inner, wrappers = unwrapped(model)
    receives = to is None or is_first(parameters_of(inner))
    with taken_out(inner):
        full = full_weights(inner, comms_of(wrappers)[0], _recipient(inner, wrappers, to, device, dtype))
    return renamed(full, name_without_compile) if receives else {}


@overload
def full_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer, to: int | None = 0, device: Device = "cpu"
) -> dict[str, Any]: ...
@overload
def full_optimizer_state_dict(
    model: nn.Module, optimizer: Sequence[Optimizer], to: int | None = 0, device: Device = "cpu"
) -> list[dict[str, Any]]: ...
@calling("zero.full_optimizer_state_dict")
def full_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], to: int | None = 0, device: Device = "cpu"
) -> Any:
    """Collective. The full state of the optimizer in the plain optimizer's own format, at any stage, as copies.

    It loads by `load_full_optimizer_state_dict` at any other stage and number of ranks, and into the plain optimizer.
    It is gathered shard group by shard group: besides the result, a rank that gets it holds as much as one unit.

    model, optimizer: those that train; of several optimizers it returns a list. to, device: as of `full_state_dict`.

    Raises ValueError on every rank for state that cannot be made whole, and where `to` is no rank of the group.
    """
    (inner, wrappers), optimizers = unwrapped(model), each(optimizer)
    if not isinstance(optimizer, Optimizer):
        return [full_optimizer_state_dict(model, one, to, device) for one in optimizers]
    optimizer = optimizers[0]
    stepped, to, takes_part = stepped_for(inner, wrappers, optimizer, to)
    receives = takes_part and gathered_states.receives(stepped, to)
    if not stepped.shard_groups:
        own = optimizer.state_dict() if receives else {}
        for number, of_one in own.get("state", {}).items():
            # torch's own load_state_dict has taken it, and keeps it as it was.
            if isinstance(of_one, dict) and states.MASTER in of_one:
                own["state"][number] = {key: value for key, value in of_one.items() if key != states.MASTER}
        return leaves.closed({key: leaves.copied(leaf, device) for key, leaf in leaves.opened(own).items()})
    with Together([optimizer.comm] if isinstance(optimizer, OSS) else comms_of(wrappers), AGREEMENT) as together:

        def consolidated() -> dict[str, Any]:
            together.agree()  # before anybody sends: hooks and the device are the recipient's alone
            return (takes_part and gathered_states.consolidate(stepped, to, device)) or {}

        if receives:
            torch.empty(0, device=device)  # raises if there is none
            full = with_state_hooks(optimizer, consolidated)
        else:
            full = consolidated()
        together.agree()
        return full


def full_tensors(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    to: int | None = 0,
    device: Device = "cpu",
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Collective while it is iterated, on every rank. Yields the full weights and then, of an optimizer, its state, as
    pairs of name and tensor, at any stage: for a file, or for an inference engine that takes weights from a trainer.

        for name, tensor in zero.full_tensors(model): ...

    A rank that gets them holds at most one unit at a time, as far as the caller keeps none. Tied weights come once.
    Ranks that get none iterate, too, over nothing. Whoever breaks off ends the iteration on all ranks, and the model
    can be used; where every rank gets tensors, one that goes on raises RuntimeError. An iterator that is kept after it
    was broken off, as a traceback keeps it, has to be closed by its `close()`. Extra state of modules is not in it.

    optimizer: that trains the model, or several as a list. Its state has names such as "layers.0.weight/exp_avg", and
        numbers are tensors without dimensions. to, device, and for weights dtype: as of `full_state_dict`.

    Raises as `full_state_dict` and `full_optimizer_state_dict`; ValueError for state that is neither tensor nor number.
    """
    inner, wrappers = unwrapped(model)
    comms = comms_of(wrappers)
    names = {tensor: name_without_compile(name) for name, tensor in reversed(named_tensors(inner).items())}
    receives = to is None or is_first(parameters_of(inner))

    def named(batch: dict[Tensor, Tensor]) -> list[tuple[str, Tensor]]:
        return [(names[tensor], copy) for tensor, copy in batch.items() if tensor in names and receives]

    weights = gathered(inner, comms[0], _recipient(inner, wrappers, to, device, dtype))
    of_optimizers = [stepped_for(inner, wrappers, one, to) for one in (() if optimizer is None else each(optimizer))]
    # Neither keeps a batch.
    batches = chain(map(named, weights), *(_state(inner, device, *one) for one in of_optimizers))
    return _in_step(comms, batches, receives_some=to is None)


def _recipient(
    inner: nn.Module, wrappers: Sequence[nn.Module], to: int | None, device: Device, dtype: torch.dtype | None
) -> Recipient:
    dtypes: dict[Any, torch.dtype] = {**original_dtypes(inner)}
    for one in wrappers:
        dtypes |= one.rounded if isinstance(one, ShardedDDP) else {}
    return Recipient(to, device, dtype, dtypes)


def _in_step(
    comms: Sequence[Comm], batches: Iterable[list[tuple[str, Tensor]]], *, receives_some: bool
) -> Iterator[tuple[str, Tensor]]:
    """Collective. Yields from the batches, of which all ranks have as many; after each they agree whether to go on."""
    remaining, together = iter(batches), Together(comms, AGREEMENT)
    try:
        while True:
            with calling("zero.full_tensors"):
                batch = next(remaining, None)
            if batch is None:
                return
            while batch:  # neither it nor what it has given is kept while the next one is gathered
                yield batch.pop(0)
            if together.agree():
                break
    except GeneratorExit:
        together.agree(MOST_FLAGS)
        raise
    except Exception as error:
        together.tell(error)
        raise
    if receives_some:
        raise RuntimeError("another rank has broken off zero.full_tensors, which every rank iterates to the same item.")


def _state(
    inner: nn.Module, device: Device, stepped: SteppedShards, to: int | None, takes_part: bool
) -> Iterator[list[tuple[str, Tensor]]]:
    names = names_of(inner, stepped)

    def named(batch: list[Leaf]) -> list[tuple[str, Tensor]]:
        found = []
        for number, key, leaf in batch:
            if not isinstance(leaf, Tensor):
                leaf = leaf.item() if isinstance(leaf, np.generic) else leaf
                if not isinstance(leaf, (bool, int, float, complex)):
                    raise ValueError(
                        f"the state {leaves.entry_of(key)!r} of {names[number]} is no tensor or number, and cannot be "
                        "streamed. Call zero.full_optimizer_state_dict."
                    )
                dtype = {float: torch.float64, complex: torch.complex128}.get(type(leaf))  # Python's own
                leaf = torch.tensor(leaf, dtype=dtype, device="cpu")
            found.append((f"{names[number]}{WITHIN}{key}", leaf))
        return found

    return map(named, gathered_states.gathered(stepped, to, device, takes_part=takes_part))  # it keeps no batch


# ---------------------------------------------------------------------------------------------------------- loading


@calling("zero.load_full_state_dict")
def load_full_state_dict(model: nn.Module, weights: Given, strict: bool = True) -> Any:
    """Collective. Loads full weights into a model of any stage: what `full_state_dict` returns or `full_tensors`
    yields, or a file of the plain model's. Returns what `load_state_dict` does: missing and unexpected names.

    Where `precision=` stores parameters rounded, their masters get the values as they are given.

    weights: a mapping, or an iterator of pairs (name, tensor), by the module's own names, with or without `_orig_mod.`
        of torch.compile; an iterator may read a file tensor by tensor. If all names begin with `module.`, as in files
        of DistributedDataParallel and AveragedModel, that is taken off. Either the same on every rank, or on
        rank 0 alone, with None or {} on all others: those receive rank 0's tensor by tensor.

    Each rank takes its elements of one tensor after another: besides its shards it holds one tensor, and one unit whose
    modules the user's code loads in another way than by copying. Tensors of an iterator that belong to such a module
    are kept until its end, and `_extra_state` too.

    Raises ValueError on every rank if names or shapes differ between ranks, or if neither rank 0 nor every rank has
    weights; RuntimeError within forward and backward, and as `load_state_dict` for what does not fit. torch then has
    loaded what fits.
    """
    inner, wrappers = unwrapped(model)
    if isinstance(weights, (str, bytes, os.PathLike)):
        raise TypeError(
            f"weights is the path {weights!r}. Pass what is in the file: torch.load(path, weights_only=True), or the "
            "pairs of safetensors.safe_open."
        )
    comms, sharded = comms_of(wrappers), [one for one, _ in models_of(inner)]
    what = "the weights given to zero.load_full_state_dict"
    alone = first_alone(comms, what, weights, parameters_of(inner))
    with Together(comms, AGREEMENT) as together:
        if alone:
            device = next((group.full.device for one in sharded for group in one.index.groups), torch.device("cpu"))
            sent = FromFirst(comms, device)
            iterates = together.agree(int(sent.is_first and not isinstance(weights, Mapping)))
            if iterates:  # by maps, which keep no value
                labelled = map(lambda pair: ((WEIGHT, 0, pair[0]), pair[1]), weights or ())  # noqa: C417
                passed_on = sent.passed_on(labelled if sent.is_first else None)
                weights = map(lambda item: (item[0][2], item[1]), passed_on)  # noqa: C417
            else:
                weights = sent.mapping(weights)  # type: ignore[arg-type]
        elif isinstance(weights, Mapping):
            shapes = [f"{name}: {list(value.shape)}" for name, value in weights.items() if isinstance(value, Tensor)]
            comms[0].compare(what, sorted(shapes))
        with loading(sharded), LoadsMasters():
            try:
                weights = _without_ddps(inner, weights)
                with taken_out(inner):
                    result = _load(inner, weights, strict)
            except RuntimeError:
                if alone and sent.failed is not None:
                    raise sent.failed from None
                raise
        together.agree()
        if not alone:
            comms[0].compare(f"the names of {what}", sorted(result.missing_keys + result.unexpected_keys))
        return result


def _load(inner: nn.Module, weights: Given, strict: bool) -> Any:
    if isinstance(weights, Mapping):
        prefixed = {name.startswith("module.") for name in weights if name != _AVERAGED}
        if prefixed == {True} and not hasattr(inner, "module"):
            weights = renamed(weights, lambda path: path.removeprefix("module").removeprefix("."))
            weights.pop(_AVERAGED, None)
        return inner.load_state_dict(named_as_compiled(inner, weights), strict)
    # The beginnings of names that belong to modules which the user's code loads in another way than by copying.
    loading_itself = [path for path, one in inner.named_modules() if loads_by_itself(one)]
    by_itself = tuple(name_without_compile(f"{path}." if path else "") for path in loading_itself)
    expected = named_tensors(inner)
    kept, unexpected, problems, loaded = dict[str, Any](), list[str](), list[str](), set[Tensor]()
    for given, value in _without_module(expected, weights or ()):
        name = name_without_compile(given)
        into = expected.get(name)
        if name.rpartition(".")[2] == "_extra_state" or name.startswith(by_itself):
            kept[name] = value
        elif into is None:
            unexpected.append(name)
        elif not isinstance(value, Tensor):
            problems.append(f"{name} is a {type(value).__name__}, not a tensor;")
        elif into.shape != value.shape:
            problems.append(f"size mismatch for {name}: {list(value.shape)} was given for {list(into.shape)};")
        else:
            with torch.no_grad():
                into.copy_(value)
            loaded.add(into)
        del value
    if kept:
        # They are of this version: a stream has none.
        named = with_versions(named_as_compiled(inner, kept), versions_of(inner))
        found = inner.load_state_dict(named, strict=False)
        unexpected += found.unexpected_keys
        loaded |= {expected[name] for name in kept.keys() & expected.keys()}
    missing = [name for name, tensor in expected.items() if tensor not in loaded]
    if problems or (strict and (missing or unexpected)):
        raise RuntimeError(
            f"the weights do not fit {type(inner).__name__}: {' '.join(problems)} missing are {missing or 'none'}, "
            f"unexpected are {unexpected or 'none'}. strict=False loads what there is."
        )
    return nn.Module().load_state_dict({})._replace(missing_keys=missing, unexpected_keys=unexpected)


def _without_ddps(inner: nn.Module, weights: Given) -> Given:
    """Takes off the `module.` that the state_dict() of a module that contains DistributedDataParallel has for it."""
    expected = named_tensors(inner)
    wrapped = [path for path, one in inner.named_modules(remove_duplicate=False) if isinstance(one, Wrapped) and path]
    within = [f"{name_without_compile(path)}.module" for path in wrapped]
    within = [path for path in within if not any(name.startswith(f"{path}.") for name in expected)]

    def own(path: str) -> str:
        path = name_without_compile(path)
        found = next((one for one in within if f"{path}.".startswith(f"{one}.")), None)
        return path if found is None else found.removesuffix(".module") + path[len(found) :]

    if not within or weights is None:
        return weights
    if isinstance(weights, Mapping):
        return renamed(weights, own)
    return map(lambda pair: (next(iter(renamed({pair[0]: None}, own))), pair[1]), weights)  # noqa: C417  # keeps none


_AVERAGED = "n_averaged"  # that AveragedModel has beside its module


def _without_module(expected: Iterable[str], pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Takes 'module.' off the names of a stream, if the first has it, and none that is expected."""
    strips, averaged = None, list[tuple[str, Any]]()
    for name, value in pairs:
        if strips is None and name == _AVERAGED and name not in expected:
            averaged.append((name, value))
            continue
        if strips is None:
            strips = name.startswith("module.") and not any(one.startswith("module.") for one in expected)
            if not strips:
                yield from averaged
        yield name.removeprefix("module.") if strips else name, value
        del value


@calling("zero.load_full_optimizer_state_dict")
def load_full_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], state_dict: Given | Sequence[Mapping[str, Any]]
) -> None:
    """Collective. Loads full optimizer state at any stage: what `full_optimizer_state_dict` returns, the state of the
    plain optimizer, that of PyTorch's FSDP, which has the names of parameters, or pairs of name and tensor as
    `full_tensors` yields them.

    model, optimizer: those that train. Several optimizers, as a list, take a list of states, or the pairs of all, and
        load one after another.
    state_dict: the same on every rank, or on rank 0 alone, with None or {} on all others. Those then receive the state
        tensor by tensor, and hold one beside their shards. An iterator has no options: the optimizer keeps its own.

    Raises ValueError, and changes nothing, if it does not fit, or an iterator ended early: on every rank if rank 0
    alone has it, or if neither rank 0 nor every rank has it.
    """
    (inner, wrappers), optimizers = unwrapped(model), each(optimizer)
    given: Any = state_dict
    if not isinstance(optimizer, Optimizer):
        with Together(comms_of(wrappers), AGREEMENT) as together:
            names = [{*names_of(inner, stepped_by(inner, wrappers, one)).values()} for one in optimizers]
            of_each = _of_each(names, given)
            together.agree()
        for one, state in zip(optimizers, of_each, strict=True):
            load_full_optimizer_state_dict(model, one, state)
        return
    optimizer = optimizers[0]
    stepped = stepped_by(inner, wrappers, optimizer)
    comms = [optimizer.comm] if isinstance(optimizer, OSS) else comms_of(wrappers)
    what = "the state given to zero.load_full_optimizer_state_dict"
    alone = first_alone(comms, what, given, params_of(optimizer))
    for unit in (unit for one, _ in models_of(inner) for unit in one.units):
        unit.reshard()  # a forward without backward may have left it unsharded
    if not alone and isinstance(given, Mapping):
        with alike(comms, what):
            given = _by_numbers(inner, stepped, given)
            states.refuse_other_shard(stepped, marks_of(given), "Load what zero.full_optimizer_state_dict returns.")
            states.refuse_other_options(stepped, given["param_groups"])
        with Together(comms, AGREEMENT) as together:
            given = dict(given)
            has_masters = any(states.MASTER in of_one for of_one in given.get("state", {}).values())
            if isinstance(optimizer, OSS):
                optimizer.load_state_dict(given)
            elif stepped.shard_groups or has_masters:
                states.load(stepped, given)
            else:
                keys = (key for group in given["param_groups"] for key in group["params"])
                of = dict(zip(keys, params_of(optimizer), strict=False))  # torch refuses another number of them
                ordered = {key: states.in_order_of(of[key], one) for key, one in given["state"].items() if key in of}
                given["state"] = {**given["state"], **ordered}
                optimizer.load_state_dict(given)
                states.keep_dtypes(optimizer, given)
            together.agree()
        return
    groups: list[dict[str, Any]] = [{} for _ in optimizer.param_groups]
    with Together(comms, AGREEMENT) as together:
        items = _items(inner, stepped, given)
        if alone:
            device = next((group.full.device for group in stepped.shard_groups), torch.device("cpu"))
            items = FromFirst(comms, device).passed_on(items)
        taken = states.cut(stepped, _without_options(items, groups))
        given = [leaves.closed(group) for group in groups]
        if any(given):
            states.refuse_other_options(stepped, given)
        together.agree()  # nothing has changed so far
        load_shards(stepped, optimizer, taken, given if any(given) else states.numbered_groups(stepped))
        together.agree()  # of the user's hooks


def _of_each(names: Sequence[set[str]], given: Any) -> list[Any]:
    """The state of each of several optimizers. names: of their parameters."""
    if not given:
        return [None] * len(names)
    if isinstance(given, Mapping) or (isinstance(given, Sequence) and not isinstance(given[0], tuple)):
        if isinstance(given, Mapping) or len(given) != len(names):
            raise ValueError(
                f"{len(names)} optimizers were given {1 if isinstance(given, Mapping) else len(given)} states. Pass a "
                "list with one state of each, in the same order."
            )
        return [*given]
    pairs, of_next = _without_module({*chain(*names)}, given), list[tuple[str, Tensor]]()

    def of(number: int) -> Iterator[tuple[str, Tensor]]:
        later = {*chain(*names[number + 1 :])}
        while (pair := of_next.pop() if of_next else next(pairs, None)) is not None:
            if _cut_label(pair[0], later)[0]:
                of_next.append(pair)
                return
            yield pair

    return [of(number) for number in range(len(names))]


def load_shards(
    stepped: SteppedShards,
    optimizer: Optimizer,
    taken: dict[nn.Parameter, dict[str, Any]],
    groups: list[dict[str, Any]],
) -> None:
    """Loads this rank's shards. The user's hooks see them, as they do at stage 3."""
    if not isinstance(optimizer, OSS):
        states.hand_over(stepped, taken, groups)
        return
    own = {owned.number: stepped.part(owned.param) for owned in states.stepped_here(stepped)}
    own |= dict(states.unsharded(stepped))

    def load(state_dict: dict[str, Any]) -> None:
        by_part = {own[number]: state for number, state in state_dict["state"].items()}
        states.hand_over(stepped, by_part, state_dict["param_groups"])

    numbered = zip(groups, states.numbered_groups(stepped), strict=True)
    state_dict = {
        "state": {number: taken[part] for number, part in own.items() if part in taken},
        "param_groups": [{**group, "params": with_numbers["params"]} for group, with_numbers in numbered],
    }
    with_load_hooks(optimizer, state_dict, load)


def _by_numbers(inner: nn.Module, stepped: SteppedShards, given: Mapping[str, Any]) -> dict[str, Any]:
    """The state with numbers for the names of parameters, under which PyTorch's FSDP has it."""
    groups = given.get("param_groups", ())
    if not any(isinstance(key, str) for group in groups for key in group["params"]):
        return dict(given)
    numbers = numbers_of(stepped)
    number_of = {
        name_without_compile(name): numbers[one] for name, one in named_tensors(inner).items() if one in numbers
    }
    found: dict[str, Any] = {"state": {number_of.get(key, key): one for key, one in given["state"].items()}}
    found["param_groups"] = []
    for group, own in zip(groups, stepped.param_groups, strict=False):
        expected, saved = [numbers[param] for param in own["params"]], {*group["params"]}
        if {number_of.get(name) for name in saved} != {*expected}:
            own_names = {name for name, number in number_of.items() if number in expected}
            raise ValueError(
                "a group of the optimizer has other parameters than it was saved with, such as "
                f"{min(saved ^ own_names)}. Build model and optimizer as before."
            )
        found["param_groups"].append({**group, "params": expected})
    return found


def _items(inner: nn.Module, stepped: SteppedShards, given: Given) -> Iterator[tuple[Label, Any]]:
    """Yields leaves of state, and options of groups."""
    if isinstance(given, Mapping):
        given = _by_numbers(inner, stepped, given)
        if marks_of(given):
            raise ValueError("the state is one rank's shard. Save what zero.full_optimizer_state_dict() returns.")
        fitting = states.fitting(stepped, given)
        for number, group in enumerate(given["param_groups"]):
            yield from (((OPTION, number, key), leaf) for key, leaf in leaves.opened(options(group)).items())
        yield from (((STATE, number, key), leaf) for number, key, leaf in states.leaves_of(fitting))
        return
    names = names_of(inner, stepped)
    numbers = {name: number for number, name in names.items()}
    made = [state_made_by(stepped.optim, group, group["params"][0].dtype) for group in stepped.param_groups]
    by_number = [of_group for of_group, group in zip(made, stepped.param_groups, strict=True) for _ in group["params"]]
    entries: dict[int, set[str]] = {}
    for label, tensor in _without_module(numbers, given or ()):
        name, key = _cut_label(label, numbers)
        if name not in numbers or not key:
            raise ValueError(
                f"{label!r} is the state of no parameter of the {type(stepped.optim).__name__}. Names are as "
                f"zero.full_tensors yields them, such as {next(iter(numbers), '')}{WITHIN}exp_avg."
            )
        number = numbers[name]
        entries.setdefault(number, set()).add(leaves.entry_of(key))
        like, leaf = by_number[number].get(key), tensor
        if isinstance(like, (int, float, complex, np.generic)) and not tensor.dim():  # the optimizer makes a number
            leaf = type(like)(tensor.item()) if isinstance(like, np.generic) else tensor.item()
        del tensor
        yield (STATE, number, key), leaf
        del leaf
    # A stream has ended early if trained parameters have no state beside others that have, or, with torch's own
    # element-wise optimizers, if they have a part of what these make.
    missing, numbered, is_torchs = list[str](), iter(range(len(names))), type(stepped.optim) in ELEMENTWISE
    for group in stepped.param_groups if entries else ():
        keys = {*state_made_by(stepped.optim, group, torch.float32, of_torchs=True)} if is_torchs else set()
        for param, number in zip(group["params"], numbered, strict=False):
            if number in entries:
                missing += [f"{names[number]}{WITHIN}{key}" for key in sorted(keys - entries[number])]
            elif param.requires_grad and (keys or not is_torchs):
                missing += [f"{names[number]}{WITHIN}{key}" for key in sorted(keys)] or [names[number]]
    if missing:
        raise ValueError(
            f"the stream has no state for {len(missing)} entries, such as {missing[0]!r}, and may have ended early. "
            "Where parameters were trained without any, pass what zero.full_optimizer_state_dict returns."
        )


def _cut_label(label: str, names: Container[str]) -> tuple[str, str]:
    """The name of a parameter, one of these or "", and the key of its state."""
    cuts = [at for at, letter in enumerate(label) if letter == WITHIN]  # names of modules may have it, too
    name = next((label[:at] for at in reversed(cuts) if label[:at] in names), "")
    return name, label[len(name) + 1 :]


def _without_options(items: Iterable[tuple[Label, Any]], groups: Sequence[dict[str, Any]]) -> Iterator[Leaf]:
    """Yields the leaves of state, and puts options into the groups."""
    for (what, number, key), leaf in items:
        if what == OPTION:
            groups[number][key] = leaf
        else:
            yield number, key, leaf
        del leaf
