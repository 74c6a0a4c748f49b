"""Ranks of tests as `accelerate launch` would have started them."""

import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest import mock

import torch.distributed as dist

# At each save of tied weights it says that one of their names went, as is meant.
logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)


@contextmanager
def launched(rank: int, world: int, **environment: str) -> Iterator[None]:
    """In here Accelerate finds this rank of the process group, on the CPU, and nothing of runs before."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    _freeze(len(sys.modules) // 500)
    started = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    given = {name: str(value) for name, value in {**started, **where, **environment}.items()}
    try:
        with mock.patch.dict(os.environ, given), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`log_with`", UserWarning)
            yield
    finally:
        for state in (AcceleratorState, PartialState, GradientState):
            state._shared_state.clear()


@cache
def _freeze(imported: int) -> None:
    """What was imported stays. Accelerate collects garbage before each training, which else takes longer than it."""
    gc.collect()
    gc.freeze()


def shared_folder(folder: str, name: str) -> Path:
    """A folder that rank 0 makes for all ranks."""
    path = Path(folder, name)
    if dist.get_rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return path
