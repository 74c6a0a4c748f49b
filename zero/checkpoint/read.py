"""Loading, in four steps.

    compare   every rank reads the index, compares it with its model and optimizers, and plans what to read (`_plan`)
    check     every rank reads the bytes that it needs and compares them with their checksums
    values    the modules take their extra state (get_extra_state); if one refuses it, all get theirs back
    take      every rank reads the tensors again, into the parameters and the optimizer's state, in place; then the
              objects of `resume` and the generators take their states

After each step the ranks agree that all can go on. Only the last step changes anything for good.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from zero._torch.telling import warn_user
from zero._torch.tensors import as_plain_tensors
from zero.checkpoint import storage
from zero.checkpoint.files import Source
from zero.checkpoint.format import RESUMED, Entry, Index, decode, label, listed, resumed, under
from zero.checkpoint.shards import Held, Training, whole
from zero.checkpoint.storage import place
from zero.checkpoint.write import finish
from zero.comm.waiting import calling
from zero.full_state import load_shards
from zero.measure.kinds import SINGLE
from zero.shards.log import logger
from zero.state.optimizer_state import stepped_here


@overload
def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    resume: Any = None,
    missing_ok: Literal[False] = False,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> dict[str, Any]: ...


@overload
def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    resume: Any = None,
    missing_ok: bool,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> dict[str, Any] | None: ...


@calling("zero.checkpoint.load")
def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    resume: Any = None,
    missing_ok: bool = False,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> dict[str, Any] | None:
    """Collective. Loads a checkpoint that was saved at any stage, on any number of ranks. Returns its `extra`.

        extra = zero.checkpoint.load("run", model, optimizer, resume=schedule)

    path: a run's directory, for its latest checkpoint, or one checkpoint's directory; or an fsspec URL of either. A
        save of the run that is still being written (wait=False) is waited for first. Or a mounted directory of
        torch.distributed.checkpoint, which the first rank reads, tensor by tensor: it has no checksums, and what else
        is in it comes back as `extra`, under the names that it has there, but for further tensors.
    model, optimizer: built as for training, at any stage. Without an optimizer only parameters and buffers are loaded.
    resume: the objects that were saved, in the same order. They, and the random generators, go on as they were then.
        Without it all of them stay as they are.
    missing_ok: True returns None, and leaves all as it is, where nothing was saved yet: the path is not there, has no
        checkpoint and no file of weights, or its first save was interrupted. What is damaged, or was saved by another
        library, raises all the same. The first rank alone looks what is there.
    process_group: of a plain model; a wrapped one knows its own.

    Frozen parameters that were left out (`frozen=False` of `save`) keep the values that they have, and the logger
    `zero` says which: build the model with its base, and freeze it as it was.

    Floating-point tensors are converted to the model's dtypes. Where masters were stored, a parameter whose dtype is
    not the stored one takes its master's values. Optimizer state keeps the dtype in which the optimizer makes it. What
    differed between ranks of `extra` and `resume`, such as generators, returns to the same ranks; on another number of
    ranks it is left out, with a warning, and generators stay as they are.

    Memory: state is overwritten in place, but for tensors in lists, which are new. Besides there is one buffer of
    BUFFER (16 MiB), and one full tensor where its dimensions are stored in another order than the model's, or in parts
    of another size (tensor parallelism), then with a copy of one part.

    Raises CheckpointError, on every rank and before anything is changed, for files that are missing, truncated or
    altered, for a checkpoint of another model or optimizer, and where a module refuses its extra state. Only a disk
    that fails after it was read once, and an optimizer or object of `resume` that refuses what its class has saved,
    leave the model partly loaded; the error, on every rank, says so, and another load repairs it.
    """
    return _load(path, Training(model, optimizer, process_group), resume, missing_ok=missing_ok)


@calling("zero.checkpoint.load")
def load_part(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Sequence[Optimizer] | None = None,
    *,
    weights: bool = True,
    strict: bool = True,
) -> None:
    """Collective. As `load`, for libraries that load weights and state one after the other.

    weights: False leaves parameters and buffers as they are. strict: False leaves those as they are that the checkpoint
        lacks, and in the checkpoint those that the model lacks, as `load_state_dict` does.
    """
    _load(path, Training(model, optimizer, None), None, weights=weights, strict=strict)


def _load(
    path: str | os.PathLike[str],
    training: Training,
    resume: Any,
    *,
    missing_ok: bool = False,
    weights: bool = True,
    strict: bool = True,
) -> dict[str, Any] | None:
    ranks = training.ranks
    with ranks.together("the arguments of zero.checkpoint.load") as lines:
        training.look()
        given, to_resume = place(path), resumed(resume)
        lines += [f"path {given}, missing_ok {missing_ok}", *to_resume]
    finish(given, ranks)
    found: str | None = ""
    with ranks.together():
        try:  # by one rank: network file systems do not show all of them the same at once
            with storage.reading(given):
                of_torch = ranks.first and (given / storage.METADATA).exists()
            if of_torch:
                found = storage.METADATA
                if to_resume:
                    raise ValueError(
                        f"{given} was saved by torch.distributed.checkpoint, without resume=. Load it without, and "
                        "give schedules and generators what it has in extra"
                    )
            elif ranks.first and (checkpoint := storage.resolve(given)) != given:
                found = checkpoint.name
        except storage.NothingSaved as error:
            if not missing_ok:
                raise
            logger.info("%s: training starts afresh", error)
            found = None
    if (found := ranks.gather(found)[0]) is None:
        return None
    if found == storage.METADATA:
        from zero.checkpoint import dcp  # only who needs it waits a second for torch's part

        return dcp.load(given, training, weights=weights, strict=strict)
    with ranks.together("the checkpoints found") as lines:
        source = Source(given / found if found else given)
        lines.append(source.digest)
    index = source.index
    with source:
        with ranks.together(before=f"{source.directory} does not fit: "):
            tensors, loads = _plan(training, index, weights=weights, strict=strict)
            encoded, by_rank = index.extra, index.extra_by_rank
            own = {key for one in by_rank for key in one}
            if to_resume:
                saved = {name for name in [*encoded, *own] if name.startswith(RESUMED)}
                if not saved:
                    raise ValueError(
                        "it was saved without resume=. Load it without, and take from its extra what you put there"
                    )
                both = ([name for name in sorted(names) if name.count("/") == 2] for names in (saved, to_resume))
                before, here = (", ".join(name.rpartition("/")[2] for name in names) for names in both)
                if before != here:
                    raise ValueError(f"it was saved with resume=[{before}], but load was given [{here}]")
            unread = [label(key) for key in sorted(own) if not key.startswith(RESUMED) or key in to_resume]
            if len(by_rank) == ranks.all:
                encoded = encoded | by_rank[ranks.number]
            elif unread:
                warn_user(
                    f"{listed(unread)} differed between the {len(by_rank)} ranks that saved it, and there are "
                    f"{ranks.all} now: left out. Set it anew on each rank: seed generators."
                )
            extra = {key: decode(value) for key, value in encoded.items()}
        with ranks.together():
            source.check(tensors, shown=ranks.first)
        training.set_values(under("model/", index.values))
        # This cannot be undone, because that would take a second copy of everything. But all that is read was read a
        # moment before, from files that are still open: only a disk that fails just then can stop it, or a
        # load_state_dict of the user's.
        partly_loaded = (
            " This happened while tensors were being read: model and optimizer are partly as before and partly as "
            "saved. Load this or another checkpoint before you use them."
        )
        with ranks.together(after=partly_loaded):
            # The bytes are written where autograd does not see it. It counts them as written all the same, also on
            # ranks that have nothing of a parameter, so that a backward of an earlier graph is refused on every rank.
            with torch.no_grad():
                increment_version([one for one in training.tensors.values() if not one.is_inference()])
                for entry, held in tensors:
                    flat = held.flat()
                    source.fill(flat, entry, held)
                    if flat.numel() and flat.data_ptr() != held.tensor.data_ptr():  # a copy: memory has another order
                        with as_plain_tensors():
                            held.ordered.copy_(flat.view(held.ordered.shape))
                for hand_over in loads:
                    hand_over()
            for name, (_, set_state) in to_resume.items():
                if name in extra:
                    set_state(extra[name])
    if weights and ranks.first and (kept := [*index.left_out]):
        text = "%s was saved without %d frozen parameters, which keep their values: %s"
        logger.info(text, source.directory, len(kept), listed(kept))
    return {key: value for key, value in extra.items() if not key.startswith(RESUMED)}


def _plan(
    training: Training, index: Index, *, weights: bool, strict: bool
) -> tuple[list[tuple[Entry, Held]], list[Callable[[], object]]]:
    """The tensors that this rank reads, with where they are read to, and what hands the optimizers their state then."""
    stored_as = training.names_in(index, strict=strict)
    left_out = [name for name, stored in stored_as.items() if stored in index.left_out]
    if weights and strict and (trained := [name for name in left_out if name not in training.frozen]):
        raise ValueError(
            f"it was saved by frozen=False, without parameters that were frozen then and are trained here: "
            f"{listed(trained)}. Freeze them while you load, and they keep the values that they have"
        )
    tensors: list[tuple[Entry, Held]] = []
    for held in [*map(training.held, training.tensors if weights else ()), *training.masters()]:
        stored = None if held is None else stored_as.get(held.name.partition("/")[2])
        if held is not None and stored is not None and stored not in index.left_out:
            tensors.append((index.weight(stored, held.full.dtype), replace(held, written=None)))

    loads: list[Callable[[], object]] = [one.note_versions for one in training.rounded]
    given, saved = len(training.optimizers), len(index.optimizers)
    if given and given != saved:
        optimizers = f"{saved} optimizers" if saved else "no optimizer"
        raise ValueError(f"it was saved with {optimizers}, but {given} to be loaded were given")
    for number, (optimizer, shards) in enumerate(zip(training.optimizers, training.shards, strict=True)):
        kind, groups = index.optimizers[number]["kind"], index.optimizers[number]["groups"]
        if kind != shards.kind:
            raise ValueError(f"it holds the state of {kind}, but the optimizer is {shards.kind}")
        names = [training.names[param] for group in shards.param_groups for param in group["params"]]
        if lacking := [name for name in names if name not in stored_as]:
            raise ValueError(f"it has nothing for {listed(lacking)}, which the {kind} here steps")
        here = [[stored_as[training.names[param]] for param in group["params"]] for group in shards.param_groups]
        if len(here) != len(groups):
            raise ValueError(f"its {kind} has {len(groups)} parameter groups, the optimizer here has {len(here)}")
        group_here = {name: position for position, names in enumerate(here) for name in names}
        group_there = {name: position for position, group in enumerate(groups) for name in group["params"]}
        state = [*index.state(number)]
        if unknown := sorted({name for name, *_ in state} - group_here.keys()):
            raise ValueError(f"it has state of {listed(unknown)}, which the {kind} here does not have")
        if moved := [name for name, position in group_here.items() if group_there.get(name, position) != position]:
            raise ValueError(f"{listed(moved)} were in other parameter groups of the {kind} when it was saved")
        stepped = {stored_as[one.name]: one for one in training.stepped(shards)}
        empty = {
            stored_as[training.names[one.param]]: shards.part(one.param) for one in stepped_here(shards) if one.empty
        }
        taken: dict[Any, dict[str, Any]] = {}  # by what is stepped
        for name, key, value, within in state:
            if (part := empty.get(name)) is not None:
                own = part if isinstance(value, Entry) else decode(value)
                like_part = isinstance(own, Tensor) and key not in SINGLE
                taken.setdefault(part, {})[key] = torch.empty_like(part) if like_part else own
            if (one := stepped.get(name)) is None:
                continue
            own_state = taken.setdefault(one.tensor, {})
            if isinstance(value, Entry):
                # Read into the present tensor, if its dtype and shape fit, or into a new one.
                saved_as, start, stop = value.geometry, one.start, one.stop
                full = replace(one.full, dtype=saved_as.dtype)
                if saved_as.shape != full.shape:
                    if not one.is_full:
                        raise ValueError(
                            f"{key!r} of {name} has shape {list(saved_as.shape)}, the parameter {list(full.shape)}, "
                            "and is cut between ranks here. Build the optimizer, or FSDP, with partition='whole'"
                        )
                    full, start, stop = saved_as, 0, saved_as.numel
                own = full if one.is_full else replace(one.own, dtype=saved_as.dtype)
                room = shards.optim.state.get(one.tensor, {}).get(key)
                with as_plain_tensors():
                    fits = isinstance(room, Tensor) and room.dtype == own.dtype and tuple(room.shape) == own.shape
                if not fits:
                    room = torch.empty_strided(own.shape, own.strides, dtype=own.dtype, device=one.tensor.device)
                tensors.append((value, Held(full, start, stop, f"{name}/{key}", room)))
                own_state[key] = room
            else:
                if within and not one.is_full:
                    raise ValueError(
                        f"{key!r} of {name} has tensors within, and the parameter is cut between ranks here. Build the "
                        "optimizer, or FSDP, with partition='whole'"
                    )
                rooms = [
                    torch.empty_strided(full.shape, full.strides, dtype=full.dtype, device=one.tensor.device)
                    for full in (entry.geometry for entry in within)
                ]
                tensors += [
                    (entry, whole(f"{name}/{key}", room, False)) for entry, room in zip(within, rooms, strict=True)
                ]
                own_state[key] = decode(value, rooms.__getitem__)
        options = [decode(group["options"]) for group in groups]
        loads.append(partial(load_shards, shards, optimizer, taken, options))
    return tensors, loads
