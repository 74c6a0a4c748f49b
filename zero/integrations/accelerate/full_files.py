"""Files with full weights and optimizer state: gathered to the CPU of the ranks that write them, and read by rank 0.

No rank holds more than what it writes, and the tensors of one shard group. What is read is mapped from its file, so
that a rank holds one tensor of it at a time; others receive that tensor, take their elements, and forget it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.utils import load
from safetensors import safe_open
from torch import Tensor, nn
from torch.optim import Optimizer

from zero._torch import name_without_compile
from zero.comm import Comm
from zero.fsdp.full_weights import named_tensors
from zero.fsdp.model import models_of
from zero.full_state import full_optimizer_state_dict, full_state_dict, full_tensors
from zero.load_full import load_full_state_dict
from zero.wrappers import unwrapped

T = TypeVar("T")


def full_weights(
    model: nn.Module, writes: bool, dtype: torch.dtype | None = None, only: Sequence[str] | None = None
) -> dict[str, Any]:
    """Collective. The full weights on the CPU of each rank that writes, one after another; {} on other ranks.

    dtype: to which floating-point tensors are cast. only: the names of those that this rank writes, by default all;
    on every rank or on none.
    """
    if dtype is None and only is None:
        return _for_writers(writes, lambda to: full_state_dict(model, to=to))
    return _for_writers(writes, lambda to: _chosen(model, to, dtype, only))


def full_state(model: nn.Module, optimizer: Optimizer, writes: bool) -> dict[str, Any]:
    """Collective. The same for an optimizer's state, in the plain optimizer's format."""
    return _for_writers(writes, lambda to: full_optimizer_state_dict(model, optimizer, to=to))


def _for_writers(writes: bool, gather: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rank, flag in enumerate(Comm.default().all_gather_text("1" if writes else "")):
        if flag:
            found = gather(rank) or found
    return found


def _chosen(model: nn.Module, to: int, dtype: torch.dtype | None, only: Sequence[str] | None) -> dict[str, Tensor]:
    """Collective. Full weights on rank `to`, perhaps in another dtype, beside one unit that has its own."""
    inner = unwrapped(model)[0]
    names = {name_without_compile(name): value for name, value in named_tensors(inner).items()}
    first: dict[Tensor, str] = {}
    for name, value in names.items():
        first.setdefault(value, name)
    chosen = {name: first[names[name_without_compile(name)]] for name in (names if only is None else only)}
    kept = {*chosen.values()}
    whole = [(name, value) for value, name in first.items()] if Comm.default().rank == to else []
    found = {
        name: value.detach().to("cpu", dtype if value.is_floating_point() else None, copy=True)
        for name, value in (full_tensors(model, to=to) if models_of(inner) else whole)
        if name in kept
    }
    return {name: found[of] for name, of in chosen.items() if of in found}  # with those tied


# ---------------------------------------------------------------------------------------------------- reading


def on_first(what: str, read: Callable[[], T]) -> T | None:
    """Collective. What rank 0 reads; None on other ranks. Raises ValueError on every rank if reading raises."""
    return on_some(Comm.default().rank == 0, what, read)


def on_some(here: bool, what: str, read: Callable[[], T]) -> T | None:
    """Collective. The same for the ranks that pass here=True."""
    comm, found, problem = Comm.default(), None, None
    if here:
        try:
            found = read()
        except Exception as error:  # of whatever kind: the other ranks wait
            problem = f"{type(error).__name__}: {error}"
    comm.compare(what, [], problem)
    return found


def stored(files: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of files, one after another."""
    for file in files:
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as opened:
                yield from ((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118
        else:
            yield from mapped(file).items()


def mapped(file: Path, **options: Any) -> Any:
    """What torch.save wrote. Among several ranks its tensors take no memory until they are read: those are copied. One
    rank's optimizer keeps what it is given, under which the file must not be written again."""
    return load(file, **{**options, "map_location": "cpu", "mmap": Comm.default().world > 1})


def load_weights(model: nn.Module, files: Callable[[], Sequence[Path]], *, strict: bool = True) -> Any:
    """Collective. Loads full weights. files: called on rank 0. Returns what load_state_dict() does."""
    found = on_first("the files with weights", files)
    return load_full_state_dict(model, None if found is None else stored(found), strict)
