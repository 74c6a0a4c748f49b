"""What NCCL takes of a GPU's memory beside torch's allocator, as stage 3 is made, in its first forward and backward.

By the dtype in which gradients are sent (float32 by a reduce-scatter, bfloat16 by an all-to-all), and with and without
a communicator of its own for reductions. Ranks pose as hosts on however few GPUs there are. Over sockets most buffers
lie in the memory of the host: links between GPUs take more, and the rows compare with one another only.

    python benchmarks/nccl_memory.py

Every row runs in fresh processes. A model alone has trained in them before, so that its kernels are loaded. Without a
GPU it shows by how much the process grows at most, over Gloo.
"""

import argparse
import gc
import os
import sys
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import zero
from accounting import measure_process_peak
from contestants import Settings
from gpt import CONTEXT, Block
from launch import Rank, RankFailed, run_hosts
from measure import wait_for_device
from report import MIB, align

HEAD = ("gradients in", "communicators", "made MiB", "forward MiB", "backward MiB", "torch's, backward MiB")


def measure(settings: Settings, second: bool, rank: Rank) -> list[tuple[int, int]]:
    """What the device, or the process, has given away, and what torch has of it for this rank: at the beginning, before
    the first forward, before the first backward, and after it."""
    os.environ["ZERO_SECOND_COMMUNICATOR"] = str(int(second))
    meeting, batch, found = dist.new_group(backend="gloo"), settings.batch(rank.device), []
    settings.build(rank.device).bfloat16()(*batch).backward()

    def look() -> None:
        wait_for_device(rank.device)
        dist.barrier(meeting)
        found.append(in_use(rank.device))
        dist.barrier(meeting)

    gc.collect()
    look()
    sharded = zero.FSDP(
        settings.build(rank.device),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=zero.MixedPrecision(torch.bfloat16, getattr(torch, settings.reduce_dtype)),
    )
    look()
    loss = sharded(*batch)
    look()
    loss.backward()
    look()
    return found


def in_use(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return measure_process_peak(), 0
    free, whole = torch.cuda.mem_get_info(device)
    return whole - free, torch.cuda.memory_reserved(device)


def row(settings: Settings, second: bool, seconds: float) -> tuple[str, ...]:
    """A line of the table, in MiB a rank."""
    found = run_hosts(partial(measure, settings, second), settings.world, seconds=seconds)
    gpus = min(torch.cuda.device_count(), settings.world)
    sharing = settings.world / gpus if gpus else 1
    outside, torchs = [], []
    for of_ranks in zip(*found, strict=True):  # at one point
        given, own = map(sum, zip(*of_ranks, strict=True))
        outside.append((given / sharing - own) / settings.world / MIB)
        torchs.append(own / settings.world / MIB)
    figures = [after - before for before, after in pairwise(outside)] + [torchs[-1] - torchs[-2]]
    return settings.reduce_dtype, "two" if second else "one", *(f"{figure:.0f}" for figure in figures)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    on_gpu = torch.cuda.is_available()
    add = partial(parser.add_argument, metavar="N", type=int)
    add("--world", default=2, help="ranks (default: %(default)s)")
    add("--layers", default=4, help="blocks (default: %(default)s)")
    add("--width", default=1024 if on_gpu else 64, help="of the model (default: %(default)s)")
    add("--seconds", default=40, help="that a row may take (default: %(default)s)")
    given = parser.parse_args()
    sizes: dict[str, Any] = {"tokens": 2 * CONTEXT, "layers": given.layers, "width": given.width}
    where = torch.cuda.get_device_name() if on_gpu else "no GPU"
    print(f"{given.world} ranks as hosts, a GPT of {given.layers} blocks of {given.width}; {where}", flush=True)
    lines, failed = [HEAD], []
    for dtype, second in product(("float32", "bfloat16"), (False, True)):
        settings = Settings(given.world, bandwidth=0.0, compile=False, reduce_dtype=dtype, steps=1, **sizes)
        try:
            lines.append(row(settings, second, given.seconds))
            print(*lines[-1], flush=True)
        except RankFailed as failure:
            failed.append(f"{dtype}, {'two' if second else 'one'}: {failure}")
    print(f"\n{align(lines, left=2)}")
    if failed:
        sys.exit("".join(f"FAILED: {told}\n" for told in failed))


if __name__ == "__main__":
    main()
