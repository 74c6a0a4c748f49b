"""Trains the same model by DDP, by its peers and by zero, side by side, and shows what each takes and holds.

Every measurement is made in fresh processes of one thread a rank, the variants in turn, over and over; what counts is
the median. Times, bytes of tensors, and the process's own peak are taken in passes of their own. Prints a table, writes
peers.json and peers.png, and fails if losses differ from DDP's.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from accounting import measure_process_peak, memory_of, return_freed_blocks_at_once
from gpt import GPT, Block
from launch import Rank, RankFailed, run_ranks
from measure import average_over_ranks, read_cpu_seconds, wait_for_device
from report import MIB, align, find_differences
from rivals import VARIANTS, Trained, build

OUT = Path(__file__).parent / "out"
SEED = 0
WARM_UP = 3
TOLERANCE = 1e-3  # of losses; peers add up in other orders, and decay in others
TOKENS, SEQUENCES, LENGTH = 8192, 2, 64

AT_MOST = {
    ("gpt", "zero3", "fsdp2"): 0.60,
    ("gpt", "zero3", "fsdp1"): 0.72,
    ("gpt", "zero3", "ddp"): 1.05,
    ("tiny", "zero3", "fsdp2"): 0.50,
    ("gpt", "zero3kept", "fsdp2kept"): 0.70,
    ("gpt", "zero2", "ddp"): 0.90,
    ("gpt", "zero2", "fairscale2"): 0.85,
    ("gpt", "zero1", "zro"): 0.84,
    ("gpt", "zero1", "deepspeed1"): 0.55,
    ("gpt", "zero2", "deepspeed2"): 0.55,
    ("gpt", "zero3", "deepspeed3"): 0.55,
}
"""(model, variant of zero, peer): what the ratio of CPU time is meant to be, at most."""

CAPTION = """\
CPU ms   of a rank and step, all its threads; the mean over ranks, the median of {rounds} rounds
step ms  the median step, on the slowest rank; the median of the rounds
tensors  MiB of tensors at the peak of a step, counted exactly, on the rank that needs most
process  MiB by which the whole process grew from before the model was built to its peak, in a pass of its own with
         freed blocks returned to the system at once
vs DDP   CPU ms, relative to plain DDP's"""


class Tiny(nn.Module):
    """One of many small layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = x + self.linear(self.norm(x)).relu()
        return mixed


class Chain(nn.Module):
    """Many small layers: what a step takes is what goes on around the computing."""

    def __init__(self, layers: int = 64, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Tiny(width) for _ in range(layers))
        self.output = nn.Linear(width, 1)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (self.output(x) - targets).square().mean()


BLOCKS: dict[str, type[nn.Module]] = {"gpt": Block, "tiny": Tiny}


def build_model(name: str, rank: Rank) -> nn.Module:
    torch.manual_seed(SEED)
    model = GPT(layers=6, width=512, tokens=TOKENS, tied=False) if name == "gpt" else Chain()
    return model.to(rank.device)


def draw(name: str, step: int, rank: Rank) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank.rank)
    if name == "gpt":
        drawn = torch.randint(TOKENS, (SEQUENCES, LENGTH + 1), generator=generator).to(rank.device)
        return drawn[:, :-1], drawn[:, 1:]
    x = torch.randn(SEQUENCES * LENGTH, 64, generator=generator).to(rank.device)
    return x, x.sum(dim=1, keepdim=True)


# -------------------------------------------------------------------------------------------------- on a rank


def start(variant: str, model: str, rank: Rank) -> Trained:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return build(variant, build_model(model, rank), BLOCKS[model], rank)


def run_step(trained: Trained, model: str, step: int, rank: Rank) -> Tensor:
    loss = trained.loss(*draw(model, step, rank))
    trained.backward(loss)
    trained.update()
    return loss.detach()


def time_variant(variant: str, model: str, steps: int, rank: Rank) -> dict[str, Any]:
    trained = start(variant, model, rank)
    losses = [run_step(trained, model, step, rank) for step in range(WARM_UP)]
    begin_cpu, seconds = read_cpu_seconds(), []
    for step in range(WARM_UP, WARM_UP + steps):
        begin = time.perf_counter()
        losses.append(run_step(trained, model, step, rank))
        wait_for_device(rank.device)
        seconds.append(time.perf_counter() - begin)
    cpu_seconds = read_cpu_seconds() - begin_cpu
    return {
        "cpu_ms": 1000 * cpu_seconds / steps,
        "step_ms": 1000 * statistics.median(seconds),
        "losses": average_over_ranks(losses, rank.world),
    }


def count_variant(variant: str, model: str, rank: Rank) -> int:
    with memory_of(rank.device) as memory:
        trained = start(variant, model, rank)
        for step in range(WARM_UP):
            run_step(trained, model, step, rank)
        memory.reset_peak()
        run_step(trained, model, WARM_UP, rank)
        return memory.peak()


def weigh_variant(variant: str, model: str, rank: Rank) -> int:
    """By how many bytes the process grew at most. It is told how to treat freed blocks before it allocates any."""
    return_freed_blocks_at_once()
    start(variant, "tiny", rank)  # what is imported and set up once
    before = measure_process_peak()
    trained = start(variant, model, rank)
    for step in range(WARM_UP):
        run_step(trained, model, step, rank)
    return measure_process_peak() - before


# --------------------------------------------------------------------------------------------------- over all


@dataclass(frozen=True)
class Result:
    """One variant on one model: medians over the rounds; `cpu_rounds` and `step_rounds` are what they are of."""

    variant: str
    title: str
    stage: int
    cpu_ms: float
    step_ms: float
    tensor_bytes: int
    process_bytes: int
    losses: list[float]
    cpu_rounds: list[float]
    step_rounds: list[float]


@dataclass(frozen=True)
class Options:
    world: int
    models: list[str]
    variants: list[str]
    rounds: int
    steps: int
    out: Path


def main() -> None:
    options = read_options(sys.argv[1:])
    missing = [reason for name in options.variants if (reason := VARIANTS[name].missing())]
    for reason in missing:
        print(f"MISSING: {reason}", file=sys.stderr)
    found = {model: compare(model, options, missing) for model in options.models}
    rows = [(model, result) for model, results in found.items() for result in results]
    subject = describe(options)
    told = [subject]
    for model, results in found.items():
        told += [f"\n{model}\n{table(results)}", *ratios(model, results)]
    told += [f"MISSING: {reason}" for reason in missing]
    print("\n".join([*told, "", CAPTION.format(rounds=options.rounds)]))
    write(options, found, missing, subject)
    losses = [
        difference
        for model in found
        for difference in find_differences({r.title: r.losses for m, r in rows if m == model}, TOLERANCE)
    ]
    if losses:
        sys.exit("FAILED: " + "\nFAILED: ".join(losses))


def compare(model: str, options: Options, missing: list[str]) -> list[Result]:
    """Measures every variant that can be run. One that fails is left out, and `missing` gets the reason."""
    variants = [name for name in options.variants if VARIANTS[name].missing() is None]
    times: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in variants}
    counted: dict[str, int] = {}
    weighed: dict[str, int] = {}
    with tqdm(total=len(variants) * (options.rounds + 2), unit="pass", desc=model) as bar:

        def attempt(name: str, work: Any) -> list[Any] | None:
            bar.set_postfix_str(name)
            bar.update()
            try:
                return run_ranks(work, options.world)
            except RankFailed as failure:
                missing.append(f"{VARIANTS[name].title} failed on {model}: {failure}")
                print(f"\nMISSING: {missing[-1]}", file=sys.stderr)
                variants.remove(name)
                return None

        for _ in range(options.rounds):
            for name in [*variants]:
                told = attempt(name, partial(time_variant, name, model, options.steps))
                if told is not None:
                    times[name].append(told)
        for into, work in ((counted, count_variant), (weighed, weigh_variant)):
            for name in [*variants]:
                bytes_by_rank = attempt(name, partial(work, name, model))
                if bytes_by_rank is not None:
                    into[name] = max(bytes_by_rank)
    return [result_of(name, times[name], counted[name], weighed[name]) for name in variants]


def result_of(name: str, rounds: list[list[dict[str, Any]]], tensor_bytes: int, process_bytes: int) -> Result:
    cpu = [statistics.mean(rank["cpu_ms"] for rank in ranks) for ranks in rounds]
    wall = [max(rank["step_ms"] for rank in ranks) for ranks in rounds]
    return Result(
        variant=name,
        title=VARIANTS[name].title,
        stage=VARIANTS[name].stage,
        cpu_ms=statistics.median(cpu),
        step_ms=statistics.median(wall),
        tensor_bytes=tensor_bytes,
        process_bytes=process_bytes,
        losses=rounds[0][0]["losses"],
        cpu_rounds=cpu,
        step_rounds=wall,
    )


def table(results: Sequence[Result]) -> str:
    head = ("variant", "CPU ms", "step ms", "tensors", "process", "vs DDP", "last loss")
    base = results[0].cpu_ms if results else 1.0
    lines = [
        (
            result.title,
            f"{result.cpu_ms:.1f}",
            f"{result.step_ms:.1f}",
            f"{result.tensor_bytes / MIB:.1f}",
            f"{result.process_bytes / MIB:.0f}",
            f"{result.cpu_ms / base:.2f}",
            f"{result.losses[-1]:.4f}",
        )
        for result in results
    ]
    return align([head, *lines])


def ratios(model: str, results: Sequence[Result]) -> list[str]:
    """Every stage of zero relative to the best peer of the same stage, and to those that a figure is set for."""
    by_name = {result.variant: result for result in results}
    lines = []
    for result in results:
        if not result.variant.startswith("zero"):
            continue
        peers = [other for other in results if other.stage == result.stage and not other.variant.startswith("zero")]
        if peers:
            best = min(peers, key=lambda other: other.cpu_ms)
            least = min(peers, key=lambda other: other.process_bytes)
            lines.append(
                f"{result.title}: CPU time {_ratio(result.cpu_ms, best.cpu_ms)} of {best.title}'s, the best of its "
                f"stage; process {_ratio(result.process_bytes, least.process_bytes)} of {least.title}'s"
            )
    for (of, name, against), at_most in AT_MOST.items():
        if of == model and name in by_name and against in by_name:
            one, other = by_name[name], by_name[against]
            ratio = one.cpu_ms / other.cpu_ms
            verdict = "met" if ratio <= at_most else "NOT met"
            wall = _ratio(one.step_ms, other.step_ms)
            lines.append(f"{one.title} / {other.title}: CPU {ratio:.2f}, wall {wall}; at most {at_most:.2f}: {verdict}")
    return lines


def _ratio(one: float, other: float) -> str:
    return f"{one / other:.2f}" if other > 0 else "-"


def describe(options: Options) -> str:
    backend = "NCCL on CUDA" if torch.cuda.is_available() else "Gloo on CPU"
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return (
        f"{options.world} ranks, {backend}, one thread a rank, {os.cpu_count()} cores ({platform.machine()}){load}, "
        f"AdamW, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    )


def write(options: Options, found: Mapping[str, list[Result]], missing: Sequence[str], subject: str) -> None:
    # Every rank imports this file, and none needs matplotlib.
    from picture import draw_peers

    options.out.mkdir(parents=True, exist_ok=True)
    content = {
        "subject": subject,
        "world": options.world,
        "rounds": options.rounds,
        "steps": options.steps,
        "missing": list(missing),
        "models": {model: [asdict(result) for result in results] for model, results in found.items()},
    }
    (options.out / "peers.json").write_text(json.dumps(content, indent=2) + "\n")
    panels = {
        model: [(r.title, r.cpu_ms, r.process_bytes / MIB, r.variant.startswith("zero")) for r in results]
        for model, results in found.items()
    }
    draw_peers(options.out / "peers.png", panels, caption=subject)
    print(f"\nwrote {options.out / 'peers.json'} and {options.out / 'peers.png'}")


def read_options(arguments: list[str]) -> Options:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--world", type=int, metavar="N", default=2, help="ranks (default: %(default)s)")
    add("--models", nargs="+", choices=BLOCKS, default=list(BLOCKS), help="which models (default: all)")
    add(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=list(VARIANTS),
        metavar="NAME",
        help=f"of {', '.join(VARIANTS)}; ddp always runs",
    )
    add("--rounds", type=int, metavar="N", default=5, help="turns of each variant (default: %(default)s)")
    add("--steps", type=int, metavar="N", default=10, help="timed steps a turn (default: %(default)s)")
    add("--out", type=Path, metavar="DIR", default=OUT, help="folder of the results (default: %(default)s)")
    given = parser.parse_args(arguments)
    if min(given.world, given.rounds, given.steps) < 1:
        parser.error("--world, --rounds and --steps are numbers from 1 up")
    chosen = [name for name in VARIANTS if name == "ddp" or name in given.variants]
    return Options(given.world, given.models, chosen, given.rounds, given.steps, given.out)


if __name__ == "__main__":
    main()
