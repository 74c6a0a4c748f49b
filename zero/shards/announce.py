"""What each constructor says, at INFO on the first rank of the group: what a rank holds, beside what DDP would take."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from zero._torch.tensors import has_values
from zero.comm import Comm
from zero.shards.log import logger
from zero.shards.shard_group import ShardGroup

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")

_SILENT = ContextVar("silent", default=False)


@contextmanager
def without_announcing() -> Iterator[None]:
    """Constructors within say nothing: another one says it for them."""
    before = _SILENT.set(True)
    try:
        yield
    finally:
        _SILENT.reset(before)


def announce(what: str, comm: Comm, groups: Sequence[ShardGroup], left_out: str = "", *, stage: int) -> None:
    """Logs what a stage keeps on this rank. Constructors call it after their first collective operation.

    what: such as "OSS(Adam)". left_out: parameters that are not sharded, and why.
    """
    silent = comm.rank or _SILENT.get() or not logger.isEnabledFor(logging.INFO)
    if silent or not groups or not has_values(groups[0].full):  # which has none where zero.plan rehearses
        return  # the transport was chosen when ranks compared what they were given
    own, full = _sizes(groups)
    own_trained, trained = _sizes([group for group in groups if group.params[0].requires_grad])
    state = sum(group.main.numel() for group in groups) / sum(group.layout.numel for group in groups) * 100
    weights, gradients = own if stage == 3 else full, own_trained if stage >= 2 else trained
    masters = any(group.master is not None for group in groups)
    # Which has parameters and gradients in the dtype of what is stepped.
    main = [(group.layout.numel * group.main.element_size(), group.params[0].requires_grad) for group in groups]
    by_ddp = sum(size for size, _ in main), sum(size for size, is_trained in main if is_trained)
    offloads = dict.fromkeys(group.offload.alike for group in groups if group.offload.active)
    logger.info(
        "stage %d, %s on %d %s by %s: weights %s, gradients %s, optimizer state of %s on a rank (DDP: %s, %s, 100 %%)"
        "%s%s",
        *(stage, what, comm.world, "rank" if comm.world == 1 else "ranks"),
        *(comm.transport_name(groups[0].full.device), _text(weights), _text(gradients)),
        *(f"{state:.3g} %{' with masters' if masters else ''}", *map(_text, by_ddp)),
        f"; left out: {left_out}" if left_out else "",
        "".join(f"; {alike}, stepped by {torch.get_num_threads()} threads of the CPU" for alike in offloads),
    )


def _sizes(groups: Sequence[ShardGroup]) -> tuple[int, int]:
    """Bytes of this rank's shards, and of the full parameters in the same dtypes."""
    full = sum(group.layout.numel * group.shard.element_size() for group in groups)
    return sum(group.shard.nbytes for group in groups), full


def _text(size: float) -> str:
    for unit in _UNITS[:-1]:
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} {_UNITS[-1]}"
