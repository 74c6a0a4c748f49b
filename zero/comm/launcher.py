"""Ranks that a launcher has started, by its environment variables."""

from __future__ import annotations

import os


def launched_ranks() -> int:
    """Returns the number of ranks of the job, WORLD_SIZE of torchrun and other launchers; 1 without a launcher."""
    value = os.environ.get("WORLD_SIZE", "")
    return int(value) if value.isdecimal() else 1


def refuse_launched() -> None:
    """Raises RuntimeError if a launcher has started other ranks. Called where torch.distributed is not initialised."""
    ranks = launched_ranks()
    if ranks > 1:
        raise RuntimeError(
            f"WORLD_SIZE={ranks} in the environment says that a launcher has started {ranks} ranks, but "
            "torch.distributed is not initialised, so each rank would train another model. Call "
            'torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo") before you build '
            "the model and its optimizer. For a process that is to train alone, remove WORLD_SIZE from its "
            'environment, or call torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), '
            "rank=0, world_size=1)."
        )
