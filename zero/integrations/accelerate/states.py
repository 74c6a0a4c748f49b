"""Files with weights and optimizer state, and the optimizer that loads them.

Full: `model.safetensors` (or `pytorch_model.bin`) and `optimizer.bin`, as Accelerate without zero writes them. They are
gathered to the CPU of the ranks that write them, and read by rank 0. No rank holds more than what it writes, and the
tensors of one shard group. What is read is mapped from its file, so that a rank holds one tensor of it at a time;
others receive that tensor, take their elements, and forget it. What Accelerate saves with PyTorch's FSDP, full or in
shards, is loaded, too.
SHARDED_STATE_DICT: a zero.checkpoint of each model with its optimizers, in `zero`, `zero_1` and so on.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import OPTIMIZER_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from accelerate.utils.constants import FSDP_MODEL_NAME
from safetensors import safe_open
from torch import Tensor, nn
from torch.optim import Optimizer

from zero import checkpoint
from zero._torch.compiling import name_without_compile
from zero.checkpoint.read import load_part
from zero.checkpoint.shards import names_left_out
from zero.checkpoint.storage import checkpoints, place
from zero.checkpoint.write import save_in_place
from zero.comm import Comm
from zero.comm.together import together
from zero.fsdp.full_weights import named_tensors
from zero.full_state import (
    full_optimizer_state_dict,
    full_state_dict,
    full_tensors,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)
from zero.measure.param_groups import steps
from zero.wrappers import unwrapped, wrapper_of

T = TypeVar("T")
Hooks = Sequence[Callable[..., None]]
SHARDED, _OPTIMIZER = "zero", f"{OPTIMIZER_NAME}.bin"


class ShardedAcceleratedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Loads full state, at every stage. Moves no state. accelerator: zero's, which hears of each real step before."""

    def __init__(self, optimizer: Optimizer, accelerator: Any) -> None:
        super().__init__(optimizer, device_placement=False, scaler=accelerator.scaler)
        self._accelerator = accelerator

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Collective."""
        if self.gradient_state.sync_gradients:
            self._accelerator.before_step(self.optimizer)
        super().step(closure)

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        """Collective. Loads full state, of every rank or of rank 0 and None elsewhere; or this rank's own."""
        holder = wrapper_of(self.optimizer, self._accelerator.sharding.wrapped)
        load_full_optimizer_state_dict(holder, self.optimizer, state_dict)


# -------------------------------------------------------------------------------------------------- gathering


def full_weights(
    model: nn.Module, writes: bool, dtype: torch.dtype | None = None, only: Sequence[str] | None = None
) -> dict[str, Any]:
    """Collective. The full weights on the CPU of each rank that writes. only: the names that this rank writes."""
    if only is None:
        return for_writers(writes, partial(full_state_dict, model, dtype=dtype))
    named = {name_without_compile(name): value for name, value in named_tensors(unwrapped(model)[0]).items()}
    first = {value: name for name, value in reversed(named.items())}  # of those that are tied
    chosen = {name: first[named[name_without_compile(name)]] for name in only}
    kept = {*chosen.values()}

    def gather(*, to: int) -> dict[str, Tensor]:
        found = {name: value for name, value in full_tensors(model, to=to, dtype=dtype) if name in kept}
        return {name: found[of] for name, of in chosen.items() if of in found}  # with those tied

    return for_writers(writes, gather)


def for_writers(writes: bool, gather: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Collective. What ranks that write gather, one after another."""
    found: dict[str, Any] = {}
    for rank, flag in enumerate(Comm.default().all_gather_text("1" if writes else "")):
        if flag:
            found = gather(to=rank) or found
    return found


# ---------------------------------------------------------------------------------------------------- reading


def on_first(read: Callable[[], T], *, here: bool | None = None) -> T | None:
    """Collective. What rank 0 reads, or each rank that passes here=True; None on other ranks."""
    with together():
        return read() if (_first() if here is None else here) else None


def _first() -> bool:
    return Comm.default().rank == 0


def load_weights(model: nn.Module, files: Iterable[Path], *, strict: bool = True) -> Any:
    """Collective. Loads full weights. files: iterated on rank 0. Returns what load_state_dict() does."""
    return load_full_state_dict(model, _stored(files) if _first() else None, strict)


def load_optimizer(optimizer: Any, file: Any, models: Sequence[nn.Module], **options: Any) -> None:
    """Collective. Loads full state, also as PyTorch's FSDP saves it. file: on rank 0. options: of `torch.load`."""

    def read() -> Any:
        state = _mapped(file, **options)
        if not isinstance(state, dict) or "param_groups" not in state:
            raise ValueError(
                f"{file} has no full state of an optimizer, and there is no {SHARDED} with shards beside it."
            )
        return state

    stepped = optimizer.optimizer
    load_full_optimizer_state_dict(wrapper_of(stepped, models), stepped, on_first(read))


def _mapped(file: Path, **options: Any) -> Any:
    """What torch.save wrote. Among several ranks its tensors take no memory until they are read: those are copied. One
    rank's optimizer keeps what it is given, under which the file must not be written again."""
    return accelerate.utils.load(file, **{**options, "map_location": "cpu", "mmap": Comm.default().world > 1})


def _stored(files: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as opened:
                yield from ((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118
        else:
            yield from _mapped(file).items()


# ----------------------------------------------------------------------------------------- a whole Accelerator


def save(
    accelerator: Any,
    models: Sequence[nn.Module],
    optimizers: Any,
    hooks: Hooks,
    folder: str,
    *,
    safe: bool,
    frozen: bool,
) -> None:
    """Collective. hooks: the user's, which may take weights away that they save. frozen: whether frozen parameters are
    saved that have no state in an optimizer."""
    in_shards, writes, file = accelerator.saves_shards, accelerator.writes, SAFE_WEIGHTS_NAME if safe else WEIGHTS_NAME
    # Files take their names when all are complete. Ranks agree between what some write, and what all do.
    with together() as step, tempfile.TemporaryDirectory(prefix=".", dir=folder) as new:
        step.agree()
        weights = []
        for model in () if in_shards else models:
            only = None
            if not frozen:
                left_out = names_left_out(model, [one.optimizer for one in optimizers if steps(one, model)])
                own = map(name_without_compile, named_tensors(unwrapped(model)[0]))
                only = [name for name in own if name not in left_out]
            weights.append(full_weights(model, writes, only=only))
        for hook in hooks:
            hook(models, weights, folder)
        step.agree()
        if in_shards:
            save_sharded(folder, models, optimizers, frozen=frozen)
        for number in range(len(weights)):  # nothing stays while the next ones are saved, and the state is gathered
            accelerator.save(OrderedDict(weights.pop(0)), _numbered(new, file, number), safe_serialization=safe)
        for number, one in enumerate(() if in_shards else optimizers):
            step.agree()
            holder = wrapper_of(one.optimizer, accelerator.sharding.wrapped)
            state = for_writers(writes, partial(full_optimizer_state_dict, holder, one))
            accelerator.save(state, _numbered(new, _OPTIMIZER, number))
        step.agree()
        for path in Path(new).iterdir():
            path.replace(Path(folder, path.name))
    if writes:
        remove_others(folder, (SHARDED,) if in_shards else (file, _OPTIMIZER), len(models) + len(optimizers))


def load(models: Sequence[nn.Module], optimizers: Any, hooks: Hooks, strict: bool, options: Any, folder: str) -> None:
    """Collective. hooks: the user's, which may take models away that they load themselves. options: of `torch.load`."""
    left = [*models]
    with together():
        for hook in hooks:
            hook(left, folder)
    if has_shards(folder, len(models)):
        load_sharded(folder, models, optimizers, left)
        return
    for number, model in enumerate(left):
        names = SAFE_WEIGHTS_NAME, f"{FSDP_MODEL_NAME}.bin", WEIGHTS_NAME
        files = [_numbered(folder, name, number) for name in names]
        file, in_shards = stored(files, Path(folder, f"{FSDP_MODEL_NAME}_{number}"))
        if in_shards:
            checkpoint.load(file, model)
        else:
            load_weights(model, [file], strict=strict)
    for number, optimizer in enumerate(optimizers):
        files = [_numbered(folder, _OPTIMIZER, number)]
        file, in_shards = stored(files, Path(folder, f"{OPTIMIZER_NAME}_{number}"))
        if in_shards:
            load_part(file, wrapper_of(optimizer.optimizer, models), [optimizer.optimizer], weights=False)
        else:
            load_optimizer(optimizer, file, models, **options)


def stored(files: Sequence[Path], of_fsdp: Path) -> tuple[Path, bool]:
    """Collective. The first of these files that rank 0 has; or the folder in which PyTorch's FSDP has saved shards, if
    there is that alone. Returns its path, which counts on rank 0, and whether it is the folder."""
    with together() as step:
        found = next((file for file in files if file.is_file()), None)
        if step.agree(int(_first() and found is None and of_fsdp.is_dir())):
            return of_fsdp, True
        return found or files[-1], False


def save_sharded(folder: str, models: Sequence[nn.Module], optimizers: Any, *, frozen: bool) -> None:
    """Collective. Saves a checkpoint of each model and its optimizers, which replaces an existing one."""
    for number, model in enumerate(models):
        own = [one.optimizer for one in optimizers if steps(one, model)]
        save_in_place(_numbered(folder, SHARDED, number), model, own, keep=1, frozen=frozen)


def has_shards(folder: str, models: int) -> bool:
    """Collective. Whether rank 0 finds a state in shards. What a save that failed has left of one is none, where there
    is a full one beside it."""
    with together() as step:
        found = _first() and Path(folder, SHARDED).is_dir()
        if found and any(one for name in ("*model*", "optimizer*") for one in Path(folder).glob(name)):
            found = all(checkpoints(place(_numbered(folder, SHARDED, number))) for number in range(models))
        return bool(step.agree(int(found)))


def load_sharded(folder: str, models: Sequence[nn.Module], optimizers: Any, left: Sequence[nn.Module]) -> None:
    """Collective. left: those of the models that take weights; of others the optimizers take their state."""
    for number, model in enumerate(models):
        path, own = _numbered(folder, SHARDED, number), [one.optimizer for one in optimizers if steps(one, model)]
        if model in left:
            checkpoint.load(path, model, own)
        elif own:
            load_part(path, model, own, weights=False)


def remove_others(folder: str, names: Sequence[str], numbers: int = 1) -> None:
    """Removes what a state of another kind has left, which who loads next could take for what was saved."""
    stale = {SHARDED, SAFE_WEIGHTS_NAME, WEIGHTS_NAME, _OPTIMIZER} - {*names}
    for path in (_numbered(folder, name, number) for name in stale for number in range(numbers)):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _numbered(folder: str, name: str, number: int) -> Path:
    """Accelerate's path of a file: all but the first have their number in the name."""
    stem, dot, suffix = name.partition(".")
    return Path(folder, f"{stem}_{number}{dot}{suffix}" if number else name)
