"""Times zero's checkpoints beside torch.distributed.checkpoint on FSDP2: the same model, the same disk, by turns.

Prints the medians and how many times as long as torch's each takes. Disks are uneven: look at the spread (the fastest
and the slowest of the rounds) before believing a difference.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import Adam, Optimizer

import zero
from launch import Rank, run_ranks

WIDTH = 1024
ELSEWHERE = "load of another number of ranks"
Times = dict[str, list[float]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)


class Zero:
    """Stage 3 and zero.checkpoint."""

    name = "zero"

    def __init__(self, blocks: int, device: torch.device) -> None:
        model = nn.Sequential(*[Block() for _ in range(blocks)]).to(device)
        self.model = zero.FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
        self.optimizer = with_state(self.model)

    def save(self, path: Path) -> None:
        zero.checkpoint.save(path, self.model, self.optimizer)

    def save_behind(self, path: Path) -> Callable[[], None]:
        return zero.checkpoint.save(path, self.model, self.optimizer, wait=False).wait

    def load(self, path: Path) -> None:
        zero.checkpoint.load(path, self.model, self.optimizer)


class Torch:
    """FSDP2 and torch.distributed.checkpoint."""

    name = "torch"

    def __init__(self, blocks: int, device: torch.device) -> None:
        self.model = nn.Sequential(*[Block() for _ in range(blocks)]).to(device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for block in [*self.model, self.model]:
            fully_shard(block, mesh=mesh)
        self.optimizer = with_state(self.model)

    def save(self, path: Path) -> None:
        weights, state = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": weights, "optim": state}, checkpoint_id=path)

    def save_behind(self, path: Path) -> Callable[[], None] | None:
        return None  # needs a second process group

    def load(self, path: Path) -> None:
        weights, state = get_state_dict(self.model, self.optimizer)
        told = {"model": weights, "optim": state}
        dcp.load(told, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=told["model"], optim_state_dict=told["optim"])


def with_state(model: nn.Module) -> Optimizer:
    optimizer = Adam(model.parameters(), foreach=False)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def leave(rank: Rank, *, folder: str, blocks: int) -> None:
    """Saves on both sides, for another number of ranks to load."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    for side in (Zero(blocks, rank.device), Torch(blocks, rank.device)):
        side.save(Path(folder) / side.name)


def measure(rank: Rank, *, folder: str, blocks: int, rounds: int, found: str | None) -> Times:
    """Seconds until the slowest rank is done. found: what another number of ranks has left, to be loaded too."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    sides = [Zero(blocks, rank.device), Torch(blocks, rank.device)]
    times: Times = {}
    for number in range(rounds + 1):
        for side in sides:
            path = Path(folder) / side.name
            clear(rank, path)
            jobs: dict[str, Callable[[], Any]] = {
                "save": partial(side.save, path),
                "load": partial(side.load, path),
            }
            if found is not None:
                jobs[ELSEWHERE] = partial(side.load, Path(found) / side.name)
            for job, work in jobs.items():
                seconds, _ = timed(work)
                if number:  # the first round warms up
                    times.setdefault(f"{job} {side.name}", []).append(seconds)
            clear(rank, path) if side.name == "zero" else None
            seconds, finish = timed(partial(side.save_behind, path))
            if finish is not None:
                finish()
                if number:
                    times.setdefault(f"save behind {side.name}", []).append(seconds)
    return times


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    dist.barrier()
    start = time.perf_counter()
    result = work()
    dist.barrier()
    return time.perf_counter() - start, result


def clear(rank: Rank, path: Path) -> None:
    dist.barrier()
    if rank.rank == 0:
        shutil.rmtree(path, ignore_errors=True)
        os.sync()
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--blocks", type=int, default=12, help="of 100 MB of parameters and Adam's state each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", help="on the disk to be measured; by default the system's temporary directory")
    options = parser.parse_args()
    nbytes = options.blocks * sum(param.numel() for param in Block().parameters()) * 12
    print(f"{nbytes / 1e9:.2f} GB of parameters and Adam's state, medians of {options.rounds} rounds, in seconds")
    print(f"{'ranks':>5}  {'':<22}{'zero':>8}{'torch':>8}{'zero/torch':>12}   {'zero from..to':<16}torch from..to")
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        worlds: list[int] = options.worlds
        for world, other in zip(worlds, worlds[1:] + worlds[:1], strict=True):
            found = None
            if other != world:
                found = f"{folder}/left"
                run_ranks(partial(leave, folder=found, blocks=options.blocks), other)
            work = partial(measure, folder=f"{folder}/here", blocks=options.blocks, rounds=options.rounds, found=found)
            report(world, other, run_ranks(work, world)[0])
            shutil.rmtree(f"{folder}/left", ignore_errors=True)
            shutil.rmtree(f"{folder}/here")


def report(world: int, elsewhere: int, times: Times) -> None:
    for job in ["save", "load", ELSEWHERE]:
        ours, theirs = times.get(f"{job} zero"), times.get(f"{job} torch")
        if ours is not None and theirs is not None:
            mine, other = statistics.median(ours), statistics.median(theirs)
            called = f"load of {elsewhere} ranks' save" if job == ELSEWHERE else job
            print(
                f"{world:>5}  {called:<22}{mine:>8.2f}{other:>8.2f}{mine / other:>12.2f}   "
                f"{spread(ours):<16}{spread(theirs)}",
                flush=True,
            )
    behind, waiting = statistics.median(times["save behind zero"]), statistics.median(times["save zero"])
    print(
        f"{world:>5}  {'wait=False blocks':<22}{behind:>8.2f}   {behind / waiting:.0%} of the waiting save", flush=True
    )


def spread(seconds: list[float]) -> str:
    return f"{min(seconds):.2f}..{max(seconds):.2f}"


if __name__ == "__main__":
    main()
