"""Times zero's checkpoints beside torch.distributed.checkpoint on FSDP2: the same model, the same disk, by turns.

A checkpoint is saved, loaded, and loaded by the other number of ranks. Prints medians in seconds, until the slowest
rank is done, and writes checkpoint.json. Disks are uneven: look there at all rounds before believing a difference.
"""

import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Adam

import zero
from contestants import How, Trained, build
from launch import Launch, Rank
from loop import take_step
from models import Task, gpt
from report import Figures, failures, machine, parser_of, tabulate

ELSEWHERE = "of other ranks"
NAMES = {"zero": "zero3", "torch": "fsdp2"}


def save(trained: Trained, path: Path, **options: Any) -> Any:
    if isinstance(trained.model, zero.FSDP):
        return zero.checkpoint.save(path, trained.model, trained.optimizer, **options)
    weights, state = get_state_dict(trained.model, trained.optimizer)
    return dcp.save({"model": weights, "optim": state}, checkpoint_id=path)


def load(trained: Trained, path: Path) -> Any:
    if isinstance(trained.model, zero.FSDP):
        return zero.checkpoint.load(path, trained.model, trained.optimizer)
    weights, state = get_state_dict(trained.model, trained.optimizer)
    told = {"model": weights, "optim": state}
    dcp.load(told, checkpoint_id=path)
    of = {"model_state_dict": told["model"], "optim_state_dict": told["optim"]}
    return set_state_dict(trained.model, trained.optimizer, **of)


def measure(task: Task, whose: str, folder: Path, worlds: list[int], rank: Rank) -> Figures:
    """Each once to warm up, and then in seconds. What the other number of ranks has left is loaded, too."""
    warnings.simplefilter("ignore")
    trained = build(NAMES[whose], task, rank, How(partial(Adam, foreach=False)))
    take_step(trained, task.batch(0, rank.rank, rank.device), rank.device)
    path = folder / f"{whose}{rank.world}"
    jobs = {"save": partial(save, trained, path), "load": partial(load, trained, path)}
    left = [folder / f"{whose}{world}" for world in worlds if world != rank.world]
    if left and left[0].exists():
        jobs[ELSEWHERE] = partial(load, trained, left[0])
    for _ in range(2):
        clear(rank, path)
        figures: Figures = {job: timed(work)[0] for job, work in jobs.items()}
        figures |= {ELSEWHERE: figures.get(ELSEWHERE), "save, wait=False": None}
        if whose == "zero":  # torch's needs a second process group
            clear(rank, path)
            figures["save, wait=False"], saving = timed(partial(save, trained, path, wait=False))
            saving.wait()
    return figures


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    dist.barrier()
    begin = time.perf_counter()
    result = work()
    dist.barrier()
    return time.perf_counter() - begin, result


def clear(rank: Rank, path: Path) -> None:
    dist.barrier()
    if rank.rank == 0:
        shutil.rmtree(path, ignore_errors=True)
        os.sync()
    dist.barrier()


def main() -> None:
    numbers = {"blocks": (8, "of 151 MB of parameters and Adam's state each"), "rounds": (5, "rounds")}
    parser = parser_of(__doc__, **numbers, worlds=([2, 4], "ranks"))
    parser.add_argument("--dir", help="on the disk to be measured; by default the system's temporary directory")
    given = parser.parse_args()
    task = gpt(given.blocks, 1024)
    nbytes = 12 * sum(param.numel() for param in task.build("meta").parameters())
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        jobs = {
            f"{whose}, {world} ranks": partial(
                Launch(world).first, partial(measure, task, whose, Path(folder), given.worlds)
            )
            for world, whose in product(given.worlds, NAMES)
        }
        subject = f"{nbytes / 1e9:.2f} GB of parameters and Adam's state, seconds; {machine()}"
        _, failed = tabulate(jobs, given.rounds, given.out, "checkpoint", subject)
    sys.exit(failures(failed))


if __name__ == "__main__":
    main()
