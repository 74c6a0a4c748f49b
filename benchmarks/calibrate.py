"""Measures how fast this machine computes, launches and sends, and writes a file for `zero.plan`.

    python benchmarks/calibrate.py own.toml
    python -m zero.plan package.module:factory --batch 8x1024:int64 --hardware own.toml

Uses all GPUs, a rank each. What is not there to be measured is taken from the preset h100-8: links between hosts, and
with one GPU also those within. Without GPUs two ranks run on the CPU, all figures are of CPU time, with one thread a
rank, so that other load on the machine matters little. Each figure is the median of several rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F
from torch.optim import SGD

import host
import zero
from launch import Rank, describe_device, run_one_of, run_ranks
from measure import wait_for_device
from zero.comm import Comm, configure
from zero.plan import Hardware, Link
from zero.plan.hardware import PRESETS
from zero.plan.rehearsal import Rehearsal
from zero.plan.trace import GATHER, HOST, REDUCE, Trace

RANKS = 2
ROUNDS = 7

CACHE = 4 << 20
"""Bytes. Operators that move at most so many are taken to work in the processor's cache."""

SIZES = {"small": 1 << 16, "large": 1 << 24}
"""Bytes of transfers."""

Measured = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="TOML, for --hardware")
    file = parser.parse_args().file
    hardware, note = calibrate()
    write_toml(hardware, file, note)
    print(f"{note}\nwrote {file}")


def calibrate() -> tuple[Hardware, str]:
    """The hardware, and a note on where and how it was measured. Takes about half a minute."""
    gpus = torch.cuda.device_count()
    world = gpus or RANKS
    found = run_ranks(measure, world)
    means = {name: statistics.mean(one[name] for one in found) for name in found[0]}
    means |= run_one_of(partial(hooks, means["launch"], 50, 10), 8)
    note = f"Measured by benchmarks/calibrate.py on {date.today():%d %B %Y}: torch {torch.__version__},\n"
    if gpus:
        links = "between:" if world > 1 else "within and between:"
        note += f"{describe_device(world)}. {links} as in the preset h100-8."
    else:
        note += (
            f"CPU time of {RANKS} ranks at once, one thread each. within: ranks that read one another's memory;\n"
            "between: Gloo, on the same host."
        )
    return hardware_of(means, gpus), note


def hardware_of(found: Measured, gpus: int = 0) -> Hardware:
    """gpus: on this host; 0 for the CPU."""
    flops = {name: found[name] for name in ("float32", "bfloat16", "float16") if name in found}
    computing = {name: found[name] for name in ("memory", "launch", "unit")}
    if not gpus:
        links = {name: _link(found, name, RANKS) for name in ("within", "between")}
        on_cpu = {name: found[name] for name in ("cached", "elements", "exchange")}
        return Hardware("measured", False, 1, flops, cache=float(CACHE), **computing, **on_cpu, **links)
    preset = PRESETS["h100-8"]
    within = _link(found, "within", gpus) if gpus > 1 else preset.within
    return Hardware(
        "measured",
        overlaps=True,
        ranks_a_host=gpus,
        flops=flops,
        collective=0.0 if gpus > 1 else preset.collective,
        exchange=found["exchange"],
        within=within,
        between=preset.between,
        **computing,
    )


def _link(found: Measured, name: str, ranks: int) -> Link:
    def bandwidth(kind: str, moved: float) -> float:
        """Bytes a second of a rank. moved: the share of the buffer that a rank moves."""
        seconds = found[f"{name} {kind} large"] - found[f"{name} {kind} small"]
        return moved * (SIZES["large"] - SIZES["small"]) / max(1e-9, seconds)

    share = (ranks - 1) / ranks
    gather, reduce, all_reduce = (
        bandwidth("gather", share),
        bandwidth("reduce", share),
        bandwidth("all-reduce", 2 * share),
    )
    latency = (found[f"{name} gather small"] - SIZES["small"] * share / gather) / (ranks - 1)  # of a hop
    return Link(max(0.0, latency), gather, reduce, all_reduce)


def measure(rank: Rank) -> Measured:
    torch.manual_seed(0)
    if rank.device.type == "cuda":
        comm = Comm(dist.group.WORLD)
        return computing(comm, rank.device) | (sending(comm, "within", rank.device) if rank.world > 1 else {})
    found: Measured = {}
    for link, host_memory in (("within", "auto"), ("between", "off")):
        configure(host_memory=host_memory)
        comm = Comm(dist.new_group(backend="gloo"))
        found |= sending(comm, link, rank.device) | (computing(comm, rank.device) if link == "within" else {})
    return found


def _seconds(
    work: Callable[[], object], times: int, comm: Comm, device: torch.device, *, launched: bool = False
) -> float:
    """Seconds of one call, on all ranks at once: CPU time on the CPU, else until the device has done it.

    launched: until the host has launched it.
    """
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    work()
    rounds = []
    for _ in range(ROUNDS):
        wait_for_device(device)
        comm.all_gather_text("")
        begin = clock()
        for _ in range(times):
            work()
        if not launched:
            wait_for_device(device)
        rounds.append((clock() - begin) / times)
    return statistics.median(rounds)


def computing(comm: Comm, device: torch.device) -> Measured:
    on_gpu = device.type == "cuda"
    seconds = partial(_seconds, comm=comm, device=device)
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16) if on_gpu else (torch.float32,):
        found[str(dtype).removeprefix("torch.")] = _flops(seconds, device, dtype)
    many = torch.randn(2, 1 << (27 if on_gpu else 24), device=device)
    found["memory"] = 3 * many[0].nbytes / seconds(lambda: many[0].add_(many[1]), 2)
    if not on_gpu:
        few = torch.randn(2, CACHE // 16, device=device)
        found["cached"] = 3 * few[0].nbytes / seconds(lambda: few[0].add_(few[1]), 200)
        found["elements"] = few[0].numel() / seconds(lambda: F.gelu(few[0]), 20)
    train = _little_training(device)
    trace = Trace()
    with Rehearsal(trace), trace.taken():
        train()
    compared = seconds(lambda: comm.compare("nothing", ["one line"]), 100)
    return found | {
        "launch": seconds(train, 5, launched=True) / len(trace.tasks),
        "exchange": compared / 2 / max(1, comm.world - 1),
    }


def _flops(seconds: Callable[..., float], device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a linear layer, forward and backward."""
    tokens, width = (8192, 2048) if device.type == "cuda" else (256, 512)
    x, weight, y = (
        torch.randn(shape, device=device, dtype=dtype)
        for shape in ((tokens, width), (4 * width, width), (tokens, 4 * width))
    )
    taken = seconds(lambda: (F.linear(x, weight), y.mm(weight), y.t().mm(x)), 5)
    return 6 * tokens * width * 4 * width / taken


def _little_training(device: torch.device) -> Callable[[], None]:
    """A step of so little computing that it takes as long as its launches."""
    with torch.device(device):
        layers = [[nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()] for _ in range(20)]
        model, little = nn.Sequential(*[nn.Sequential(*layer) for layer in layers]), torch.zeros(2, 8)

    def train() -> None:
        model(little).sum().backward()
        model.zero_grad()

    return train


def hooks(launch: float, units: int, steps: int, rank: Rank) -> Measured:
    """What stage 3 takes of the host beside the model alone, by transfer of a unit: the Python of zero's hooks.

    One rank runs over torch's fake process group, as in host.py. launch: seconds of a launch, which are taken off.
    """
    found = {}
    with host.without_copies():
        for name in ("stage 3", "model alone"):
            trained = host.Trained(name, units, rank)
            taken = [sum(trained.step()) for _ in range(host.WARM_UP + steps)]
            found[name] = statistics.median(taken[host.WARM_UP :])
    (launched, transfers), (alone, _) = (_launches(units, *of) for of in ((rank.world, "3"), (1, "0")))
    return {"unit": max(0.0, found["stage 3"] - found["model alone"] - launch * (launched - alone)) / transfers}


def _launches(units: int, world: int, stage: str) -> tuple[int, int]:
    """The launches of a step of the model of host.py, and its transfers, as planned."""
    with torch.device("meta"):
        model, batch = host.Model(units), [torch.empty(1, host.ROWS)]
    spans = (
        zero.plan(
            model,
            world_size=world,
            optimizer=partial(SGD, lr=0.0),
            auto_wrap_policy=ModuleWrapPolicy({host.Block}),
            batch=batch,
            stages=[stage],
            hardware="h100-8",
        )
        .timings[-1]
        .timeline.spans
    )
    transfers = [span for span in spans if span.queue in (GATHER, REDUCE) and span.name in (GATHER, REDUCE)]
    return sum(span.queue == HOST for span in spans), len(transfers)


def sending(comm: Comm, link: str, device: torch.device) -> Measured:
    channel = comm.channel("a transfer that is measured")
    found: Measured = {}
    for size, nbytes in SIZES.items():
        full = torch.randn(nbytes // 4 // comm.world * comm.world, device=device)
        own, times = len(full) // comm.world, max(2, (1 << 22) // nbytes)

        def gather(full: Tensor = full, own: int = own) -> Any:
            return comm.gather(full, [own * rank for rank in range(comm.world + 1)], channel).wait()

        def reduce(full: Tensor = full, own: int = own) -> Any:
            return comm.reduce([(full, [own] * comm.world)], times=1 / comm.world, channel=channel).wait()

        def all_reduce(full: Tensor = full) -> None:
            full.zero_()
            comm.all_reduce(full)

        for kind, work in (("gather", gather), ("reduce", reduce), ("all-reduce", all_reduce)):
            found[f"{link} {kind} {size}"] = _seconds(work, times, comm, device)
    return found


def write_toml(hardware: Hardware, path: Path, note: str) -> None:
    """note: a comment at its head."""
    content = asdict(hardware)
    tables = {name: content.pop(name) for name in ("flops", "within", "between")}
    lines = [f"# {line}" for line in note.splitlines()]
    for name, table in {"": content, **tables}.items():
        lines += ["", f"[{name}]"] if name else []
        lines += [f"{key} = {_written(value)}" for key, value in table.items() if value is not None]
    path.write_text("\n".join(lines) + "\n")


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
