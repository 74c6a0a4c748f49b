"""Measures how fast this machine's CPU computes and sends, on two ranks at once, and writes a file for `zero.plan`.

    python benchmarks/calibrate.py own.toml
    python -m zero.plan package.module:factory --batch 8x1024:int64 --backend gloo --hardware own.toml

All figures are of CPU time, with one thread a rank, so that other load on the machine matters little. Each is the
median of several rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from launch import Rank, run_ranks
from zero.comm import Comm, configure
from zero.plan import Hardware, Link
from zero.plan.rehearsal import Rehearsal
from zero.plan.trace import Trace

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
    found = run_ranks(measure, RANKS)
    means = {name: statistics.mean(one[name] for one in found) for name in found[0]}
    note = (
        f"Measured by benchmarks/calibrate.py on {date.today():%d %B %Y}: torch {torch.__version__},\n"
        f"CPU time of {RANKS} ranks at once, one thread each. within: ranks that read one another's memory;\n"
        "between: Gloo, on the same host."
    )
    return hardware_of(means), note


def hardware_of(found: Measured) -> Hardware:
    return Hardware(
        "measured",
        overlaps=False,
        ranks_a_host=1,
        flops={"float32": found["flops"]},
        cache=float(CACHE),
        within=_link(found, "within"),
        between=_link(found, "between"),
        **{name: found[name] for name in ("memory", "launch", "cached", "elements", "exchange")},
    )


def _link(found: Measured, name: str) -> Link:
    def bandwidth(kind: str, moved: float) -> float:
        """Bytes a second of a rank. moved: the share of the buffer that a rank moves, on two ranks."""
        seconds = found[f"{name} {kind} large"] - found[f"{name} {kind} small"]
        return moved * (SIZES["large"] - SIZES["small"]) / max(1e-9, seconds)

    gather, reduce, all_reduce = bandwidth("gather", 0.5), bandwidth("reduce", 0.5), bandwidth("all-reduce", 1)
    latency = found[f"{name} gather small"] - SIZES["small"] / 2 / gather
    return Link(max(0.0, latency), gather, reduce, all_reduce)


def measure(_: Rank) -> Measured:
    torch.manual_seed(0)
    found: Measured = {}
    for link, host_memory in (("within", "auto"), ("between", "off")):
        configure(host_memory=host_memory)
        comm = Comm(dist.new_group(backend="gloo"))
        found |= sending(comm, link) | (computing(comm) if link == "within" else {})
    return found


def _seconds(work: Callable[[], object], times: int, comm: Comm) -> float:
    """CPU time of one call, on all ranks at once."""
    work()
    rounds = []
    for _ in range(ROUNDS):
        comm.all_gather_text("")
        begin = time.process_time()
        for _ in range(times):
            work()
        rounds.append((time.process_time() - begin) / times)
    return statistics.median(rounds)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cpu")


def computing(comm: Comm) -> Measured:
    tokens, width = 256, 512
    x, weight, y = _random(tokens, width), _random(4 * width, width), _random(tokens, 4 * width)
    multiplied = _seconds(lambda: (F.linear(x, weight), y.mm(weight), y.t().mm(x)), 5, comm)
    many, few = _random(2, 1 << 24), _random(2, CACHE // 16)
    taken, in_cache = _seconds(lambda: many[0].add_(many[1]), 2, comm), _seconds(lambda: few[0].add_(few[1]), 200, comm)
    layers = [[nn.LayerNorm(8, device="cpu"), nn.Linear(8, 8, device="cpu"), nn.GELU()] for _ in range(20)]
    model, little = nn.Sequential(*[nn.Sequential(*layer) for layer in layers]), torch.zeros(2, 8, device="cpu")

    def train() -> None:
        model(little).sum().backward()
        model.zero_grad()

    trace = Trace()
    with Rehearsal(trace), trace.taken():
        train()
    return {
        "flops": 6 * tokens * width * 4 * width / multiplied,
        "memory": 3 * many[0].nbytes / taken,
        "cached": 3 * few[0].nbytes / in_cache,
        "elements": few[0].numel() / _seconds(lambda: F.gelu(few[0]), 20, comm),
        "launch": _seconds(train, 20, comm) / len(trace.tasks),
        "exchange": _seconds(lambda: comm.compare("nothing", ["one line"]), 100, comm) / 2 / (RANKS - 1),
    }


def sending(comm: Comm, link: str) -> Measured:
    channel = comm.channel("a transfer that is measured")
    found: Measured = {}
    for size, nbytes in SIZES.items():
        full = _random(nbytes // 4)
        half, times = len(full) // RANKS, max(2, (1 << 22) // nbytes)

        def gather(full: Tensor = full, half: int = half) -> Any:
            return comm.gather(full, [0, half, 2 * half], channel).wait()

        def reduce(full: Tensor = full, half: int = half) -> Any:
            return comm.reduce([(full, [half, half])], times=0.5, channel=channel).wait()

        def all_reduce(full: Tensor = full) -> None:
            full.zero_()
            comm.all_reduce(full)

        for kind, work in (("gather", gather), ("reduce", reduce), ("all-reduce", all_reduce)):
            found[f"{link} {kind} {size}"] = _seconds(work, times, comm)
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
