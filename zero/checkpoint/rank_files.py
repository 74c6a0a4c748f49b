"""What one rank writes of a model and its optimizers (shards.py), its file, and the index made of all ranks' files.

Beside its file a rank writes its part of the index: what is in the file, and values of optimizers that are no tensors.
The index is made from these, which are removed then, and no rank sends another what it has written.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from zero._torch.telling import warn_user
from zero._torch.tensors import as_plain_tensors, tree_iter
from zero.checkpoint import directory
from zero.checkpoint.files import Chunk, progress, write
from zero.checkpoint.format import CONFIGS, LONGEST, Entry, Index, ParamShard, refuse_unstorable
from zero.checkpoint.ranks import Ranks
from zero.checkpoint.shards import Held, Training, whole
from zero.checkpoint.storage import Place
from zero.checkpoint.values import encode
from zero.measure.param_groups import options
from zero.shards.sharded_parameter import plain_state
from zero.state.stepped import SteppedShards

# Bytes. Every copy starts at a multiple of these, so that it can be viewed as any dtype.
_ALIGNMENT = 64

# One buffer a model for its copies, to be reused: memory that is new to the process costs more than the copy.
_buffers: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()


@dataclass
class SavePlan:
    """What this rank writes.

    index: of the checkpoint, without tensors; the first rank's is used, with all ranks' values of optimizers.
    held: tensors, or ranges of them.
    common: tensors that are the same on all ranks; `held` has this rank's share of them.
    release: called when the tensors are written.
    """

    index: Index
    held: list[Held] = field(default_factory=list)
    common: list[Held] = field(default_factory=list)
    release: Callable[[], None] = lambda: None


def plan_save(training: Training, *, frozen: bool = True) -> SavePlan:
    """Raises ValueError, with a message for the user, for what cannot be stored or mapped to full parameters.

    frozen: whether frozen parameters are stored that no optimizer has state of."""
    plan = SavePlan(Index(training.stage, training.ranks.world, tied=training.tied))
    if training.ranks.rank == 0:
        plan.index.values = {f"model/{name}": encode(value, name) for name, value in training.values.items()}
    if training.ranks.first:
        plan.index.configs = _configs(training.module)
    left_out = set[str]() if frozen else set(training.frozen)
    for shards in training.shards:  # what has state was trained before it was frozen, and its values are nowhere else
        left_out -= {one.name for one in training.stepped(shards) if shards.optim.state.get(one.tensor)}
    # Only the owners of a parameter's shards know of its state: `seal` takes from these what they have written.
    plan.index.left_out = {name: training.parts[name].full for name in sorted(left_out)}
    for name, tensor in training.tensors.items():
        if name in left_out:
            continue
        held = training.owned(name) if training.in_shard_group(name) else training.resident(name)
        if held is None or training.repeats(name):
            continue
        if held.shared and isinstance(tensor, nn.Parameter):
            plan.common.append(held)
        elif training.ranks.rank == 0 or not held.shared:
            plan.held.append(held)
    for one in training.masters():
        if (name := one.name.removeprefix("master/")) not in left_out and not training.repeats(name):
            plan.held.append(one)
    for shards in training.shards:
        _plan_optimizer(plan, training, shards)
    if not training.ranks.writes:
        return SavePlan(plan.index, common=plan.common)
    plan.held += _share(plan.common, training.ranks)
    return plan


def _configs(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Of a module whose class has `from_pretrained`: see Index. Warns of what is no JSON."""
    found: dict[str, dict[str, Any]] = {}
    for file, attribute in CONFIGS.items() if hasattr(type(module), "from_pretrained") else ():
        # The module's own: adapters pass on that of the model inside, whose names are others.
        config: Any = vars(module).get(attribute)
        if hasattr(config, "to_json_string"):
            try:
                found[file] = {**json.loads(config.to_json_string())}
            except (TypeError, ValueError, AttributeError) as error:
                warn_user(
                    f"{attribute}.to_json_string() of the {type(module).__name__} raised {type(error).__name__}: "
                    f"{error}. An export of this checkpoint has no {file}, which from_pretrained needs."
                )
    if "config.json" in found:
        found["config.json"]["architectures"] = [type(module).__name__]  # as save_pretrained does
    return found


def _plan_optimizer(plan: SavePlan, training: Training, shards: SteppedShards) -> None:
    groups: list[dict[str, Any]] = []
    prefix = f"optimizer/{len(plan.index.optimizers)}"
    plan.index.optimizers.append({"kind": shards.kind, "groups": groups})
    for number, names in enumerate(training.group_names(shards)):
        given = options(shards.param_groups[number]).items()
        encoded = {key: encode(value, f"option {key!r} of group {number}") for key, value in given}
        groups.append({"params": names, "options": encoded})
    state = shards.optim.state
    if unknown := [key for key in state if not isinstance(key, Tensor)]:
        raise ValueError(f"the {shards.kind} keeps state under {unknown[0]!r}, which is no parameter and has no owner.")
    for one in training.stepped(shards):
        for key, value in {} if training.repeats(one.name) else plain_state(state.get(one.tensor, {})).items():
            path = f"{prefix}/{one.name}/{key}"
            if not isinstance(key, str) or "/" in key:
                raise ValueError(f"{path}: names of state must be strings without a slash.")
            if isinstance(value, Tensor) and value.dim():
                (plan.common if one.shared else plan.held).append(_state_held(path, one, value))
            elif not one.is_full and any(isinstance(leaf, Tensor) and leaf.dim() for leaf in tree_iter(value)):
                raise ValueError(
                    f"{path} is a {type(value).__name__} of tensors, and the parameter is cut between ranks: only the "
                    "optimizer knows which elements of the parameter they are for. Build the optimizer, or FSDP, with "
                    "partition='whole'."
                )
            elif one.start == 0 and (training.ranks.rank == 0 or not one.shared):
                plan.index.values[path] = encode(value, path)


def _state_held(path: str, one: Held, value: Tensor) -> Held:
    """A state tensor of a parameter that this rank steps: it is elements of a full tensor, or a full tensor itself."""
    refuse_unstorable(path, value)
    with as_plain_tensors():
        alike = value.shape == one.tensor.shape
    if alike:
        return replace(one, name=path, full=replace(one.full, dtype=value.dtype), tensor=value)
    if not one.is_full:
        raise ValueError(
            f"{path} has shape {list(value.shape)}, but this rank's shard of the parameter has "
            f"{list(one.tensor.shape)}: only the optimizer knows which elements of the parameter it is for. Build the "
            "optimizer, or FSDP, with partition='whole'."
        )
    return whole(path, value, kept=one.kept)


def _share(common: list[Held], ranks: Ranks) -> list[Held]:
    """This rank's share of tensors that are the same on all ranks: as many bytes as any other rank."""
    low, high = (sum(one.nbytes for one in common) * rank // ranks.world for rank in (ranks.rank, ranks.rank + 1))
    mine, at = [], 0
    for one in common:
        # The first element that begins at a byte or after it.
        start, stop = (min(max(-((at - end) // one.full.dtype.itemsize), 0), one.numel) for end in (low, high))
        if start < stop or (one.numel == 0 and ranks.rank == 0):
            mine.append(replace(one, start=start, stop=stop))
        at += one.nbytes
    return mine


# Another save of the model that begins before the memory is left to it makes copies of its own.
def staged(model: nn.Module, held: Sequence[Held]) -> tuple[list[Held], Callable[[], None]]:
    """Copies of the held elements, and the function that leaves their memory to the model's next save."""
    sizes = [-(-one.nbytes // _ALIGNMENT) * _ALIGNMENT for one in held]
    buffer = _buffers.pop(model, None)
    if buffer is None or len(buffer) < sum(sizes):
        del buffer  # freed before the larger one is allocated
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
    copies, low = [], 0
    for one, size in zip(held, sizes, strict=True):
        copy = buffer[low : low + one.nbytes].view(one.full.dtype)
        copies.append(replace(one, tensor=copy.copy_(one.flat()), written=None))
        low += size
    return copies, partial(_buffers.__setitem__, model, buffer)


def rank_file(checkpoint: Place, rank: int) -> Place:
    return checkpoint / f"rank-{rank:05d}.safetensors"


def part_of(file: Place) -> Place:
    """Where the part of the index is that a rank writes when its file is on disk."""
    return file.parent / f"{file.name}.json"


def write_rank_file(file: Place, plan: SavePlan, *, shown: bool) -> None:
    """Writes a rank's file, and its part of the index; both are on disk when this returns. shown: show progress."""
    chunks, entries = [_chunk(held) for held in plan.held], {}
    with progress("saving", sum(chunk.nbytes for chunk in chunks), shown) as tick:
        written, starts = write(file, chunks, tick)
    for chunk, held in zip(chunks, plan.held, strict=True):
        shard = ParamShard(file.name, chunk.key, starts[chunk.key], held.start, held.stop)
        entries[held.name] = Entry(held.full, (shard,)).to_json()
    part = {"file": written, "tensors": entries, "values": plan.index.values}
    part_of(file).put(json.dumps(part).encode())


def _chunk(held: Held) -> Chunk:
    """Other libraries can read a full tensor, under its own name and with its shape."""
    key = held.name if held.is_full else f"{held.name}@{held.start}"
    shape = held.full.shape if held.is_full and held.full.counting == (None, None) else (held.numel,)
    return Chunk(key, held.full.dtype, shape, lambda: iter([held.flat()]))


def seal(checkpoint: Place, index: Index, *, keep: int | None) -> None:
    """Makes a directory that has all ranks' files a checkpoint.

    index: of the checkpoint; what the files hold is added, and what writes it when. keep: how many of the run's
        checkpoints stay; None for all.
    """
    found: dict[str, list[Entry]] = {}
    files = [rank_file(checkpoint, rank) for rank in range(index.world)]
    for file in files:
        part = json.loads(part_of(file).read())
        index.files[file.name] = part["file"]
        index.values |= part["values"]
        for path, entry in part["tensors"].items():
            found.setdefault(path, []).append(Entry.from_json(entry))
    for path, entries in sorted(found.items()):
        shards = sorted((shard for one in entries for shard in one.shards), key=lambda one: (one.start, one.stop))
        index.tensors[path] = Entry(entries[0].geometry, tuple(shards))
        index.left_out.pop(path.removeprefix("model/"), None)
        try:
            index.tensors[path].refuse_unsound(f"{path}, as the ranks wrote it,")
        except ValueError as error:
            raise ValueError(f"{error}: they do not hold the same model") from None
    # The version from where it is, because no room imports the package that holds all of them.
    by, at = sys.modules["zero"].__version__, datetime.now(timezone.utc).isoformat(timespec="seconds")
    index.saved = {"by": by, "torch": torch.__version__, "at": at}
    text = index.dumps().encode()
    if len(text) > LONGEST:
        raise ValueError(f"the index would have {len(text)} bytes, more than the {LONGEST} that are read")
    directory.publish(checkpoint, text, keep)
    for file in files:
        part_of(file).remove()
