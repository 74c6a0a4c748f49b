"""What NCCL takes of a GPU's memory beside torch's allocator, as stage 3 is made, in its first forward and backward,
and as its weights are saved on one rank.

By the dtype in which gradients are sent (float32 by a reduce-scatter, bfloat16 by an all-to-all), and with and without
a communicator of its own for reductions. Ranks pose as hosts on however few GPUs there are. Over sockets most buffers
lie in the memory of the host: links between GPUs take more, and the rows compare with one another only.

    python benchmarks/nccl_memory.py

Every row runs in fresh processes. A model alone has trained in them before, so that its kernels are loaded. Without a
GPU it shows by how much the process grew at most, over Gloo.
"""

import gc
import os
import sys
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed as dist

import zero
from contestants import How, build
from launch import Launch, Rank
from loop import peak_of_process, wait_for
from models import Task, gpt
from report import MIB, Figures, failures, machine, parser_of, tabulate


def measure(task: Task, dtype: str, second: bool, rank: Rank) -> list[tuple[int, int]]:
    """What the device, or the process, has given away, and what torch has of it for this rank: at the beginning, before
    the first forward, before the first backward, after it, and after all weights were saved on the first rank."""
    os.environ["ZERO_SECOND_COMMUNICATOR"], os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] = str(int(second)), "1"
    meeting, batch, found = dist.new_group(backend="gloo"), task.batch(0, rank.rank, rank.device), []
    task.build(rank.device).bfloat16()(*batch).backward()

    def look() -> None:
        wait_for(rank.device)
        dist.barrier(meeting)
        found.append(in_use(rank.device))
        dist.barrier(meeting)

    gc.collect()
    look()
    trained = build("zero3", task, rank, How(dtype=torch.bfloat16, reduce_dtype=getattr(torch, dtype)))
    look()
    loss = trained.loss(*batch)
    look()
    trained.backward(loss)
    look()
    zero.full_state_dict(trained.model, to=0)
    look()
    return found


def in_use(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return peak_of_process(device), 0
    free, whole = torch.cuda.mem_get_info(device)
    return whole - free, torch.cuda.memory_reserved(device)


def row(launch: Launch, work: Any) -> Figures:
    """A rank's, from point to point, and what torch took at the last."""
    found, world = launch(work), launch.world
    gpus = min(torch.cuda.device_count(), world)
    sharing = world / gpus if gpus else 1
    outside, torchs = [], []
    for of_ranks in zip(*found, strict=True):  # at one point
        given, own = map(sum, zip(*of_ranks, strict=True))
        outside.append((given / sharing - own) / world / MIB)
        torchs.append(own / world / MIB)
    points = ("made MiB", "forward MiB", "backward MiB", "saved MiB")
    figures = dict(zip(points, (after - before for before, after in pairwise(outside)), strict=True))
    return {**figures, "torch's, backward MiB": torchs[-2] - torchs[-3]}


def main() -> None:
    sizes = {"layers": (4, "blocks"), "width": (1024 if torch.cuda.is_available() else 64, "of the model")}
    given = parser_of(__doc__, world=(2, "ranks"), **sizes, seconds=(40, "that a row may take")).parse_args()
    launch = Launch(given.world, "hosts", seconds=given.seconds)
    task = gpt(given.layers, given.width, 16 * given.width)
    jobs = {}
    for dtype, second in product(("float32", "bfloat16"), (False, True)):
        title = f"gradients in {dtype}, {'two communicators' if second else 'one'}"
        jobs[title] = partial(row, launch, partial(measure, task, dtype, second))
    subject = f"{given.world} ranks as hosts, a GPT of {given.layers} blocks of {given.width}; {machine()}"
    _, failed = tabulate(jobs, 1, given.out, "nccl_memory", subject)
    sys.exit(failures(failed))


if __name__ == "__main__":
    main()
