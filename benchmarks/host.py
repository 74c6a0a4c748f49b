"""What the host does for a unit in a settled step: CPU time of stage 3 beside FSDP2, and of the model alone.

One rank trains 100 units of 12 parameters each. The other ranks are torch's fake process group, and the tensors are so
small that computing with them takes little. What is left is what the host of a GPU does while the GPU computes. Every
parameter has 1,024 rows, so that nobody pads up to 1,024 ranks. The fake group copies one tensor after another for each
rank, which is no work of a host's and at 1,024 ranks more than all else; here one copy is for all.

    python benchmarks/host.py --worlds 8 1024

The variants take turns, a step each, in one process. Prints the CPU time of a step divided by the units, medians, and
the median of the ratios of steps that were run next to one another. Fails where stage 3 takes more than 0.8 of FSDP2.
"""

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import SGD, Optimizer

import zero
from launch import Rank, run_one_of
from report import align

ROWS, COLUMNS = 1024, 4
AIM = 0.8
WARM_UP = 4
PARTS = ("forward", "backward", "optimizer")
COLLECTIVES = ("all_gather_single", "reduce_scatter_single", "_allgather_base", "_reduce_scatter_base")
"""By the names that versions of torch give them."""


def bring_own(group: dist.ProcessGroup, into: Tensor, tensor: Tensor, options: Any = None) -> dist.Work:
    """As the fake group's all-gather and reduce-scatter, at once: every rank is taken to have what this one has."""
    own = tensor.view(-1)[: into.numel()].clone()  # it may lie in `into`
    into.view(-1, len(own)).copy_(own)
    return FakeWork()


class FakeWork(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


def without_copies() -> AbstractContextManager[Any]:
    return mock.patch.multiple(
        dist.ProcessGroup, **{name: bring_own for name in COLLECTIVES if hasattr(dist.ProcessGroup, name)}
    )


class Block(nn.Module):
    """As many modules and parameters as a block of a GPT has."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(ROWS) for _ in range(2))
        self.linears = nn.ModuleList(nn.Linear(COLUMNS, ROWS) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth = self.linears
        y = self.norms[0](x)
        x = x + second(first(y[:, :COLUMNS])[:, :COLUMNS])
        y = self.norms[1](x)
        return x + fourth(third(y[:, :COLUMNS])[:, :COLUMNS])


class Model(nn.Module):
    """Its last layer is the root unit's."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(units - 1))
        self.last = nn.Linear(COLUMNS, ROWS)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x[:, :COLUMNS]).square().mean()


Trainable = tuple[nn.Module, Optimizer]

SGD_OF_NONE = partial(SGD, lr=0.0, foreach=True)
"""Nothing is learned: what the fake group sums up is not the ranks' gradients, and would grow to NaN."""


def alone(model: Model, rank: Rank) -> Trainable:
    return model, SGD_OF_NONE(model.parameters())


def fsdp2(model: Model, rank: Rank) -> Trainable:
    mesh = init_device_mesh(rank.device.type, (rank.world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh), SGD_OF_NONE(model.parameters())


def stage_2(model: Model, rank: Rank) -> Trainable:
    optimizer = zero.OSS(model.parameters(), SGD_OF_NONE)
    return zero.ShardedDDP(model, optimizer), optimizer


def stage_3(model: Model, rank: Rank) -> Trainable:
    model = zero.FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
    return model, SGD_OF_NONE(model.parameters())


VARIANTS: dict[str, Callable[[Model, Rank], Trainable]] = {
    "model alone": alone,
    "FSDP2": fsdp2,
    "stage 2": stage_2,
    "stage 3": stage_3,
}


class Trained:
    def __init__(self, variant: str, units: int, rank: Rank) -> None:
        torch.manual_seed(0)
        self.model, self.optimizer = VARIANTS[variant](Model(units).to(rank.device), rank)
        self.x = torch.randn(1, ROWS, device=rank.device)

    def step(self) -> list[float]:
        """CPU seconds of each of PARTS."""
        times = [time.process_time()]
        loss = self.model(self.x)
        times.append(time.process_time())
        loss.backward()
        times.append(time.process_time())
        self.optimizer.step()
        self.optimizer.zero_grad()
        times.append(time.process_time())
        return [end - begin for begin, end in pairwise(times)]


def measure(units: int, steps: int, rank: Rank) -> dict[str, list[list[float]]]:
    """Of each variant the CPU seconds of its steps, by shard."""
    trained = {name: Trained(name, units, rank) for name in VARIANTS}
    found: dict[str, list[list[float]]] = {name: [] for name in VARIANTS}
    with without_copies():
        for _ in range(WARM_UP + steps):
            for name, one in trained.items():
                found[name].append(one.step())
    return {name: taken[WARM_UP:] for name, taken in found.items()}


def profile(units: int, steps: int, variant: str, rank: Rank) -> str:
    """Where the time of a variant's steps goes, by function."""
    one = Trained(variant, units, rank)
    profiler = cProfile.Profile()
    with without_copies():
        for _ in range(WARM_UP):
            one.step()
        for _ in range(steps):
            profiler.runcall(one.step)
    told = Told()
    pstats.Stats(profiler, stream=told).sort_stats("tottime").print_stats(45)
    return "".join(told.lines)


class Told:
    """What pstats writes to."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, line: str) -> None:
        self.lines.append(line)


def compare(found: dict[str, list[list[float]]], units: int) -> tuple[list[tuple[str, ...]], float]:
    """The lines of the table, in microseconds a unit, and the ratio of stage 3 to FSDP2."""
    lines: list[tuple[str, ...]] = []
    whole = {name: [sum(step) for step in steps] for name, steps in found.items()}
    for name, steps in found.items():
        shards = [statistics.median(shard) for shard in zip(*steps, strict=True)]
        ratio = statistics.median(a / b for a, b in zip(whole[name], whole["FSDP2"], strict=True))
        figures = [f"{1e6 * seconds / units:.0f}" for seconds in (*shards, statistics.median(whole[name]))]
        lines.append((name, *figures, f"{ratio:.2f}"))
    return lines, float(lines[-1][-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--worlds", type=int, nargs="+", metavar="N", default=[8, 1024], help="ranks, of which one runs")
    add("--units", type=int, metavar="N", default=100, help="units (default: %(default)s)")
    add("--steps", type=int, metavar="N", default=20, help="timed steps (default: %(default)s)")
    add("--profile", choices=VARIANTS, metavar="NAME", help=f"where the time goes, of {', '.join(VARIANTS)}")
    given = parser.parse_args()
    missed = []
    for world in given.worlds:
        if given.profile:
            print(run_one_of(partial(profile, given.units, given.steps, given.profile), world))
            continue
        lines, ratio = compare(run_one_of(partial(measure, given.units, given.steps), world), given.units)
        head = ("CPU us a unit", *PARTS, "step", "/ FSDP2")
        print(f"one rank of {world}, {given.units} units, torch {torch.__version__}\n\n{align([head, *lines])}\n")
        if ratio > AIM:
            missed.append(f"{ratio:.2f} at {world} ranks")
    if missed:
        sys.exit(f"FAILED: stage 3 is to take {AIM} of FSDP2's time, and takes " + ", ".join(missed))


if __name__ == "__main__":
    main()
