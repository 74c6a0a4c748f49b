"""One real rank of W whose transfers take as long as on a wire: zero beside FSDP2, FSDP1 and an unsharded model.

The other ranks are torch's fake process group (fake.py): kernels, streams, allocations and the host's work are real.
Losses mean nothing. On the CPU the host sleeps, so that nothing overlaps.

    python benchmarks/wires.py --world 8 --bandwidth 300 --tokens 8192
    python benchmarks/wires.py --world 64 --gpus-a-host 8 --nics 1 --bandwidth 45 --tokens 8192
    python benchmarks/wires.py --world 1024 --bandwidth inf

--bandwidth is that of links between the GPUs of one host. With --gpus-a-host it is that of a NIC, of which a host has
--nics, and --link that of links. What a collective takes depends on its kind (tests/simulated/network.py).

The kernel of a transfer is of one thread. With --ctas N it is of N programs that copy what arrives, and take their part
of the GPU from the computing, as NCCL's do (ctas.py). Transfers on different streams have the whole bandwidth each;
with --one they follow one another in the order of their launches, as in one communicator. What ranks compare between
hosts takes no time. All send gradients in --reduce-dtype: FSDP2's own default is what it computes in, zero's float32.

Every contestant runs in fresh processes, in turn, over and over; its steps run with and without the wires, in turn.
Prints a table of medians, and writes wires.json. "host" is the time until a step is launched, "exposed" that of a step
with the wires less the next one without, "waits" how often the host waits for the device in a step. Allocated and
reserved is by CUDA's allocator at the peak of a step. Without a GPU the default model is tiny.
"""

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from unittest import mock

import torch
from torch.optim import AdamW
from torch.profiler import ProfilerActivity, profile

from contestants import CONTESTANTS, OVER_FAKE_RANKS, How, build
from fake import Wires, Wiring
from launch import Launch, Rank
from loop import WARM_UP, median, take_step
from models import CONTEXT, Task, gpt
from report import MIB, Figures, add_names, failures, machine, parser_of, tabulate
from zero.comm.link import Link

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def gpu_parser(told: str | None, names: Sequence[str], default: Sequence[str], *, tokens: int, **numbers):
    """Options of a GPT in bfloat16, which on a GPU has 1.04B parameters. names: of contestants."""
    on_gpu = torch.cuda.is_available()
    sizes = {
        "tokens": (tokens if on_gpu else 2 * CONTEXT, f"of a batch, a multiple of {CONTEXT}"),
        "layers": (18 if on_gpu else 2, "blocks"),
        "width": (2048 if on_gpu else 64, "of the model"),
    }
    parser = parser_of(told, world=(8, "ranks, of which one runs"), **sizes, **numbers)
    parser.add_argument("--bandwidth", metavar="GB/s", type=float, default=300.0, help="or inf (default: %(default)s)")
    parser.add_argument("--reduce-dtype", choices=["float32", "bfloat16"], default="float32")
    add_names(parser, "--only", names, default)
    return parser


def asked(given: argparse.Namespace, *, rate: float = 0.0) -> tuple[Task, How, str]:
    """The model, how it is trained, and both in words. rate: of learning; by default 0, since what the fake group
    brings are not the ranks' gradients, and the weights would diverge. Otherwise the optimizer counts its steps on the
    GPU."""
    on_gpu = torch.cuda.is_available()
    task = gpt(given.layers, given.width, 16 * given.width, tokens=given.tokens)
    optim = partial(AdamW, lr=rate, fused=on_gpu, capturable=on_gpu and rate > 0)
    how = How(optim, torch.bfloat16, getattr(torch, given.reduce_dtype))
    told = (
        f"{given.tokens} tokens, GPT of {task} ({given.layers} blocks of {given.width}), "
        f"computed in bfloat16, gradients sent in {given.reduce_dtype}, AdamW; {machine()}"
    )
    return task, how, told


def measure(name: str, task: Task, how: How, wiring: Wiring, steps: int, rank: Rank) -> Figures:
    """Of one process, medians over the steps."""
    warnings.simplefilter("ignore")
    wires = Wires(wiring, rank.world, rank.device)
    on_gpu = rank.device.type == "cuda"
    one_host = wiring.network(rank.world).hosts == 1
    with wires.patched(), mock.patch.object(Link, "one_host", one_host):
        trained, batch = build(name, task, rank, how), task.batch(0, rank.rank, rank.device)
        for _ in range(WARM_UP):
            take_step(trained, batch, rank.device)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        wires.seconds, sent, unsent = 0.0, [], []
        for _ in range(steps):
            for wires.on, taken in ((True, sent), (False, unsent)):
                taken.append(take_step(trained, batch, rank.device)[0])
        return {
            "step ms": median(sent, lambda step: step.wall_ms),
            "no wires": median(unsent, lambda step: step.wall_ms),
            "host ms": median(sent, lambda step: step.launched),
            "CPU ms": median(sent, lambda step: step.cpu_ms),
            "wire ms": 1000 * wires.seconds / (2 * steps),
            "exposed ms": statistics.median(a.wall_ms - b.wall_ms for a, b in zip(sent, unsent, strict=True)),
            "allocated MiB": torch.cuda.max_memory_allocated() / MIB if on_gpu else None,
            "reserved MiB": torch.cuda.max_memory_reserved() / MIB if on_gpu else None,
            "waits": count_waits(lambda: take_step(trained, batch, rank.device)) if on_gpu else None,
        }


def count_waits(step: Callable[[], object]) -> int:
    """How often the host waits for the GPU, besides the measurement's own two."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        step()
    return sum(event.count for event in profiled.key_averages() if event.key in WAITS) - 2


def describe(wiring: Wiring, world: int) -> str:
    wires = f"{wiring.bandwidth:g} GB/s, {wiring.ctas} CTAs" + ", one communicator" * wiring.one
    network = wiring.network(world)
    if network.hosts > 1:
        wires = f"hosts of {network.gpus_a_host} GPUs and {network.nics_a_host:g} NICs, each of {wires}"
    return f"one rank of {world}, {wires}"


def main() -> None:
    default = ["alone", "fsdp1", "fsdp2", "zero3", "zero2"]
    numbers = {"steps": (10, "timed steps a round, with the wires and without"), "rounds": (3, "turns of each")}
    numbers |= {"gpus_a_host": (0, "ranks of a host; 0: all"), "nics": (0, "of a host; 0: one a GPU")}
    numbers |= {"ctas": (0, "programs of a transfer's kernel, by Triton; 0: one thread that sleeps")}
    parser = gpu_parser(__doc__, OVER_FAKE_RANKS, default, tokens=8192, **numbers)
    parser.add_argument("--link", metavar="GB/s", type=float, default=300.0, help="within a host of several")
    parser.add_argument("--one", action="store_true", help="transfers wait for one another")
    given = parser.parse_args()
    if given.world % (given.gpus_a_host or 1):
        parser.error("--world is a multiple of --gpus-a-host")
    wiring = Wiring(given.bandwidth, given.gpus_a_host, given.nics, given.link, given.ctas, given.one)
    task, how, told = asked(given)
    launch = Launch(given.world, "fake")
    jobs = {
        CONTESTANTS[name].title: partial(launch.first, partial(measure, name, task, how, wiring, given.steps))
        for name in given.only
    }
    _, failed = tabulate(jobs, given.rounds, given.out, "wires", f"{describe(wiring, given.world)}, {told}")
    sys.exit(failures(failed))


if __name__ == "__main__":
    main()
