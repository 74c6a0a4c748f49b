"""Optimizer state: this rank's shards of it, and how full state becomes them.

The state tensors of a cut parameter are cut with it (`ParamShard`), their lists and tuples item by item (`leaves`).
Master weights are an entry of the state, MASTER, with the values for the next step (`settled`). Only optimizers that
keep masters have it: others leave out what torch's own load_state_dict has put into their state.

    full   {"state": {number of the parameter: {key: tensor or value}}, "param_groups": [... "params": [numbers]]}
    shard  the same with this rank's shards for tensors; "zero_shard" in each group says which (shard_mark.py)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero._torch.tensors import as_plain_tensors
from zero.measure import param_groups
from zero.measure.built import state_made_by
from zero.measure.kinds import ELEMENTWISE, SINGLE
from zero.measure.param_groups import params_of
from zero.shards.layout import Span
from zero.shards.masters import settled
from zero.shards.sharded_parameter import mark_states, plain_state
from zero.state import leaves
from zero.state.shard_mark import mark, marks_of
from zero.state.stepped import ParamShard, SteppedShards
from zero.tensor_parallel import parts

# --------------------------------------------------------------------------------------------------------- empty shards
#
# The state of empty shards. torch's element-wise optimizers have as many entries there as elsewhere, and take as long
# for an empty tensor as for a small one. So of those that were stepped in the same steps one is stepped, and the others
# take over what it has: the single values of their state, such as the count of steps, are the same tensors.


Led = dict[nn.Parameter, list[nn.Parameter]]
"""By an empty shard that is stepped those that take over its state."""


def led(optimizer: Optimizer, empty: Collection[nn.Parameter]) -> Led:
    """Call it before a step, which is to find no gradients of those that are led. Of optimizers that are not torch's,
    which may divide by the number of elements, nobody leads. empty: the empty shards."""
    found: Led = {}
    for alike in _alike(optimizer, empty, id) if type(optimizer) in ELEMENTWISE else ():
        stepped = [param for param in alike if param.grad is not None]
        if stepped and len(stepped) < len(alike):  # the others keep the values from before
            state = optimizer.state[stepped[0]]
            state.update({key: state[key].clone() for key in SINGLE & state.keys()})
        if stepped:
            found[stepped[0]] = stepped[1:]
    return found


def follow(optimizer: Optimizer, led: Led) -> None:
    """Call it after the step."""
    for leader, others in led.items():
        state = optimizer.state.get(leader, {})
        for other in others if state else ():
            own = optimizer.state[other]
            for key, one in state.items():
                if key in SINGLE or not isinstance(one, Tensor):
                    own[key] = one
                elif not isinstance(own.get(key), Tensor):
                    own[key] = one.new_empty(other.shape)


def share(optimizer: Optimizer, empty: Collection[nn.Parameter]) -> None:
    """Call it after a state was loaded: single values that are equal are the same tensors from then on."""
    alike = _alike(optimizer, empty, lambda one: one.tolist() if isinstance(one, Tensor) else one)
    follow(optimizer, {first: others for first, *others in alike})


def _alike(
    optimizer: Optimizer, empty: Collection[nn.Parameter], value: Callable[[Any], Any]
) -> Iterator[list[nn.Parameter]]:
    """The empty shards in the same group, of the same history."""
    for group in optimizer.param_groups:
        found: dict[Any, list[nn.Parameter]] = {}
        for param in group["params"]:
            if param in empty:
                state = optimizer.state.get(param, {})
                history = [(key, value(one)) for key, one in state.items() if key in SINGLE]
                found.setdefault((param.dtype, param.device, len(state), *history), []).append(param)
        yield from found.values()


# ---------------------------------------------------------------------------------------------------- dtypes of its own
#
# State in a dtype of its own, such as moments in 16 bits of float32 parameters.
#
# torch's `load_state_dict` casts state to the dtype of the parameter, because that of torch's optimizers has it. State
# of other optimizers gets the dtype back that it was saved in, if that is the dtype in which the optimizer makes it.


def keep_dtypes(optimizer: Optimizer, loaded: dict[str, Any]) -> None:
    """Call it after `optimizer.load_state_dict(loaded)`."""
    for group, given in zip(optimizer.param_groups, loaded["param_groups"], strict=True):
        for param, number in zip(group["params"], given["params"], strict=True):
            saved = leaves.opened(loaded["state"].get(number, {}))
            held = leaves.opened(dict(optimizer.state.get(param, {})))
            cast = {}  # a number that became a tensor was converted by the optimizer's class
            for key, one in held.items():
                other = saved.get(key)
                if isinstance(one, Tensor) and isinstance(other, Tensor) and one.dtype != other.dtype:
                    cast[key] = other
            made = leaves.opened(state_made_by(optimizer, group, param.dtype)) if cast else {}
            own = {key: one for key, one in cast.items() if getattr(made.get(key), "dtype", None) == one.dtype}
            if own:
                own = {key: one.to(held[key].device) for key, one in own.items()}
                optimizer.state[param].update(leaves.closed({**held, **own}))


# ---------------------------------------------------------------------------------------------------------------- state


MASTER = "zero_master"
"""The key of a master in a state: no optimizer's own."""

Leaf = tuple[int, str, Any]
"""Of a state: the number of the parameter, the key of the leaf (leaves.py), and the leaf."""


def shard_of(optimizer: SteppedShards) -> dict[str, Any]:
    """This rank's shard of the state, without communication. If there is one rank, it is full and has no mark. Raises
    ValueError as `refuse_ownerless`."""
    refuse_ownerless(optimizer.optim)
    comm = optimizer.comm
    states = {owned.number: state_of(optimizer, owned) for owned in stepped_here(optimizer)}
    states |= {number: state_held(optimizer.optim, param) for number, param in unsharded(optimizer)}
    state = {number: state for number, state in sorted(states.items()) if state}
    found = {"state": state, "param_groups": numbered_groups(optimizer)}
    if comm.world > 1 and optimizer.shard_groups:
        mark(found, fingerprint(optimizer))
    return found


def state_of(optimizer: SteppedShards, owned: ParamShard, settle: bool = True) -> dict[str, Any]:
    """The state of one of this rank's shards. settle: master weights have the values for the next step."""
    shard = optimizer.part(owned.param)
    state = state_held(optimizer.optim, shard)
    masters = optimizer.keeps_masters and owned.group.master is not None and not owned.empty
    # Else a plain optimizer would take it for one that has made its state. Full weights are the masters, too.
    if masters and (state or not settle or not optimizer.makes_state):
        held = owned.group.shard_views[owned.index]
        state[MASTER] = settled(shard.detach(), held) if settle else shard.detach()
    return state


def state_held(optimizer: Optimizer, param: Tensor) -> dict[str, Any]:
    """What the optimizer itself has made of a parameter's state; tensors are plain."""
    state = plain_state(optimizer.state.get(param, {}))
    state.pop(MASTER, None)
    return state


def refuse_ownerless(optimizer: Optimizer) -> None:
    """Raises ValueError for state that is of no parameter, of which nobody knows whose it is, or that stands elsewhere
    than in the optimizer's `state`, where nobody would find it."""
    name, of_zero = type(optimizer).__name__, hasattr(optimizer, "stepped_shards")
    kept = () if of_zero else param_groups.within([*vars(optimizer).values()])
    inside = [one for one in kept if isinstance(one, Optimizer) and one.state is not optimizer.state]
    if inside:
        raise ValueError(
            f"the {name} keeps its state in another optimizer ({type(inside[0]).__name__}), which would be left out. "
            "Train by that one alone, or save its weights alone: zero.full_state_dict(model)."
        )
    # Where a class makes it of more than torch does. A hook on it is the user's, who gets and loads its result.
    own = type(optimizer).state_dict
    beside = own(optimizer).keys() - _KNOWN if own is not Optimizer.state_dict and not of_zero else ()
    if beside:
        raise ValueError(
            f"state_dict() of the {name} has {sorted(beside)[0]!r} beside its state and groups, which would be left "
            "out. Have it keep such values in its groups."
        )
    if unknown := [key for key in optimizer.state if not isinstance(key, Tensor)]:
        raise ValueError(
            f"the {name} keeps state under {unknown[0]!r}, which is no parameter and has no owner. Have it keep such "
            "state in its groups."
        )


_KNOWN = {"state", "param_groups", param_groups.SHARD_MARK}


def shards_of(optimizer: SteppedShards, rank: int | None = None) -> Iterator[ParamShard]:
    """Yields the shards of all ranks (or of `rank`), shard group by shard group, in the same order on all ranks."""
    numbers = param_groups.numbers_of(optimizer)
    for group in optimizer.shard_groups:
        for owner in range(group.layout.world) if rank is None else [rank]:
            for span in group.layout.spans(owner):
                number = numbers.get(group.params[span.index])
                if number is not None:  # otherwise another optimizer has it
                    yield ParamShard(number, group, span.index, owner, span)


def stepped_here(optimizer: SteppedShards) -> Iterator[ParamShard]:
    """Yields this rank's shards; at last the empty ones, if the optimizer steps them and keeps state of them, too."""
    own, rank = set[int](), optimizer.comm.rank
    for owned in shards_of(optimizer, rank):
        own.add(owned.number)
        yield owned
    numbers = param_groups.numbers_of(optimizer)
    for group in optimizer.shard_groups if type(optimizer.optim) in ELEMENTWISE else ():
        for index, param in enumerate(group.params):
            if (number := numbers.get(param)) is not None and number not in own:
                yield ParamShard(number, group, index, rank, Span(index, 0, 0, 0), empty=True)


def unsharded(optimizer: SteppedShards) -> Iterator[tuple[int, nn.Parameter]]:
    """Yields the parameters in no shard group, with their numbers."""
    sharded = {param for group in optimizer.shard_groups for param in group.params}
    yield from ((number, param) for number, param in enumerate(params_of(optimizer)) if param not in sharded)


def numbered_groups(optimizer: SteppedShards) -> list[dict[str, Any]]:
    """The optimizer's current groups, with numbers for parameters."""
    numbers, groups = count(), []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", param_groups.SHARD_MARK)}
        groups.append({**deepcopy(options), "params": [next(numbers) for _ in group["params"]]})
    return groups


# --------------------------------------------------------------------------------------------------- loading


def load(optimizer: SteppedShards, state_dict: dict[str, Any]) -> None:
    """Loads a full state or this rank's own shard. Raises ValueError, and changes nothing, if it does not fit."""
    hand_over(optimizer, *own_shard(optimizer, state_dict))


def own_shard(
    optimizer: SteppedShards, state_dict: dict[str, Any]
) -> tuple[dict[nn.Parameter, dict[str, Any]], list[dict[str, Any]]]:
    """Returns this rank's shard of a full state, or a copy of its own, by `part(param)`, and the groups' options.
    Raises ValueError if the state does not fit."""
    found, is_shard = leaves_of(fitting(optimizer, state_dict)), bool(marks_of(state_dict))
    refuse_other_options(optimizer, state_dict["param_groups"])
    return cut(optimizer, found, is_shard=is_shard), state_dict["param_groups"]


def leaves_of(states: Mapping[int, dict[str, Any]]) -> Iterator[Leaf]:
    """states: by number of the parameter."""
    return ((number, key, leaf) for number, state in states.items() for key, leaf in leaves.opened(state).items())


def fitting(optimizer: SteppedShards, state_dict: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Returns states by number of the parameter. Raises ValueError if they are another rank's or of another model."""
    groups = state_dict["param_groups"]
    found, expected = ([len(group["params"]) for group in all_of] for all_of in (groups, optimizer.param_groups))
    if found != expected:
        raise ValueError(
            f"the state has parameter groups of {found} parameters, the optimizer has {expected}. "
            "Build OSS from the same parameters, in the same groups, as the optimizer that was saved."
        )
    refuse_other_shard(optimizer, marks_of(state_dict))
    keys = [key for group in groups for key in group["params"]]
    if unknown := [*(state_dict["state"].keys() - {*keys})]:
        raise ValueError(
            f"the state has entries under {unknown[0]!r}, which is none of the parameters of its groups "
            f"({', '.join(map(repr, keys[:3]))}, ...). Load a state_dict() as the optimizer returned it."
        )
    return {number: state_dict["state"][key] for number, key in enumerate(keys) if key in state_dict["state"]}


_SCHEDULED = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", param_groups.SHARD_MARK}


def refuse_other_options(optimizer: SteppedShards, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError for groups of another class of optimizer, which would go on with options that it ignores."""
    # Flags come with versions of torch. Schedulers have options of their own in groups.
    own = {key for key, value in optimizer.optim.defaults.items() if value is not None and not isinstance(value, bool)}
    for given, group in zip(groups, optimizer.param_groups, strict=False):  # `fitting` compares how many there are
        lacking, unknown = sorted(own & group.keys() - given.keys()), sorted(given.keys() - group.keys() - _SCHEDULED)
        if lacking and unknown:
            raise ValueError(
                f"the state is of another optimizer than {type(optimizer.optim).__name__}: its groups have "
                f"{', '.join(unknown)} and lack {', '.join(lacking)}. Load the state into an optimizer of the class "
                "that it was saved of, or go on without it."
            )


def cut(
    optimizer: SteppedShards, found: Iterable[Leaf], *, is_shard: bool = False
) -> dict[nn.Parameter, dict[str, Any]]:
    """Returns copies of this rank's shards of states, by `part(param)`. is_shard: they are its shards already.
    Otherwise raises ValueError for what does not fit, on every rank alike: state of a parameter that stays whole may
    have any shape."""
    own = {owned.number: owned for owned in stepped_here(optimizer)}
    cut = {owned.number: owned for owned in shards_of(optimizer) if owned.index not in owned.group.layout.whole}
    whole, taken = dict(unsharded(optimizer)), dict[nn.Parameter, dict[str, Any]]()
    for number, key, leaf in found:
        if not is_shard and number in cut and isinstance(leaf, Tensor) and leaf.numel() != 1:
            one = cut[number]
            full_shape = parts.shape(one.param, one.full_shape)
            if leaf.shape != full_shape:
                raise ValueError(
                    f"the state of {one.name} has {leaves.entry_of(key)!r} of shape {list(leaf.shape)}, but the "
                    f"parameter has {list(full_shape)}, and is cut between ranks. Load it into the same model, or "
                    "build OSS with partition='whole'."
                )
        if number in whole:
            taken.setdefault(whole[number], {})[key] = deepcopy(leaf)
        elif owned := own.get(number):
            part = leaf
            if isinstance(leaf, Tensor) and leaf.dim() and not is_shard:
                try:  # this rank's part of a whole tensor, where the model is tensor parallel
                    part = parts.cut(owned.param, leaf)
                except ValueError as error:
                    raise ValueError(
                        f"the state {leaves.entry_of(key)!r} of {owned.name} {error}. Load full state, such as "
                        "zero.full_optimizer_state_dict returns."
                    ) from None
            if isinstance(part, Tensor):
                if is_shard or not owned.cut or part.numel() == 1:
                    part = leaves.copied(part)
                else:
                    part = owned.slot(part).clone().view(owned.shape)
                if owned.empty and key not in SINGLE:  # one element has no slice
                    part = part.new_empty(owned.shape)
            taken.setdefault(optimizer.part(owned.param), {})[key] = part
        del leaf  # which may be received: see given.py
    return {of: leaves.closed(state) for of, state in taken.items()}


def refuse_other_shard(
    optimizer: SteppedShards,
    marks: set[str],
    remedy: str = "Call consolidate_state_dict() before state_dict() to save what loads anywhere.",
) -> None:
    """Raises ValueError for the shard of another rank or layout. marks: of the state; none if it is full."""
    own = fingerprint(optimizer) if optimizer.shard_groups else "an optimizer of full parameters"
    if marks and own not in marks:
        raise ValueError(f"the state is one rank's shard ({', '.join(sorted(marks))}), but this is {own}. {remedy}")


def hand_over(
    optimizer: SteppedShards, taken: dict[nn.Parameter, dict[str, Any]], groups: list[dict[str, Any]]
) -> None:
    """Loads this rank's shards of a state, by `part(param)`, and the options of the groups.

    Master weights are what is stepped. Where none are kept they become the parameters at stages 0 and 3; at 1 and 2
    they are dropped, as the other ranks would not hear of them.
    """
    masters = {shard: state.pop(MASTER) for shard, state in taken.items() if MASTER in state}
    # Whether the optimizer holds the user's parameters themselves: before torch replaces the groups.
    writes_masters = optimizer.keeps_masters or optimizer.param_groups is optimizer.optim.param_groups
    options = [deepcopy(param_groups.options(group)) for group in groups]
    with as_plain_tensors():
        taken = {shard: in_order_of(shard, state) for shard, state in taken.items()}
    # Not the empty states of frozen parameters, which torch's Adam takes for its own. `load_state_dict` converts device
    # and dtype of the entries.
    state_dict = numbered(optimizer.optim, {shard: state for shard, state in taken.items() if state}, options)
    optimizer.optim.load_state_dict({**state_dict, param_groups.SHARD_MARK: OWN})
    keep_dtypes(optimizer.optim, state_dict)
    for option, group in zip(options, optimizer.param_groups, strict=True):
        group.update(option)
    with torch.no_grad(), as_plain_tensors():
        for shard, master in masters.items() if writes_masters else ():
            shard.copy_(master)
    share(optimizer.optim, {optimizer.part(owned.param) for owned in stepped_here(optimizer) if owned.empty})
    mark_states(optimizer.optim)
    optimizer.loaded()


def in_order_of(shard: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """The state with tensors of the shard's shape in its order in memory: torch's fused optimizers read all tensors in
    the order of the parameter's memory, whatever their strides. Called where tensors are plain."""
    found = leaves.opened(state)
    for key, leaf in found.items():
        if type(leaf) is Tensor and leaf.shape == shard.shape and leaf.stride() != shard.stride():
            found[key] = torch.empty_strided(shard.shape, shard.stride(), dtype=leaf.dtype, device=leaf.device)
            found[key].copy_(leaf)
    return leaves.closed(found)


OWN = "own"
"""The mark of a state that is known to be of the optimizer's own shard, and is not compared."""


def numbered(
    optimizer: Optimizer, taken: Mapping[Any, dict[str, Any]], options: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Converts a state by parameters to the format of state_dict()."""
    numbers = param_groups.numbers_of(optimizer)
    return {
        "state": {numbers[param]: state for param, state in taken.items()},
        "param_groups": [
            {**option, "params": [numbers[param] for param in group["params"]]}
            for option, group in zip(options, optimizer.param_groups, strict=True)
        ],
    }


def fingerprint(optimizer: SteppedShards) -> str:
    """The mark of this rank's shard: rank, world size and a digest of the layout."""
    numbers = param_groups.numbers_of(optimizer)
    laid_out = [
        (group.layout.bounds, [numbers.get(param) for param in group.params], group.shapes.full)
        for group in optimizer.shard_groups
    ]
    layout = hashlib.sha256(json.dumps(laid_out).encode()).hexdigest()[:12]
    others = parts.ranks(params_of(optimizer))
    part = "" if others is None else f", part {others.rank} of {others.world}"
    return f"rank {optimizer.comm.rank} of {optimizer.comm.world}, layout {layout}{part}"
