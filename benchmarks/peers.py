"""Trains the same model by DDP, by its peers and by zero, side by side, and shows what each takes and holds.

Every measurement is made in fresh processes of one thread a rank, the variants in turn, over and over; what counts is
the median. Times, bytes of tensors, and the process's own peak are taken in passes of their own. Beside them ranks that
each train alone show what computing takes by itself. Prints tables, writes peers.json and peers.png, and fails if
losses differ from DDP's or a stage of zero does not run. A peer that is missing or does not run is named.
"""

import argparse
import gc
import importlib.metadata
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from accounting import measure_process_peak, memory_of, return_freed_blocks_at_once
from comparison import CAPTION, Result, goals, table
from launch import Rank, RankFailed, backend_of, describe_device, run_ranks
from measure import average_over_ranks, name_transport, read_cpu_seconds, wait_for_device
from report import find_differences, processor
from rivals import VARIANTS, Trained, build
from tasks import TASKS

OUT = Path(__file__).parent / "out"
WARM_UP = 3
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 2e-2}  # of losses; peers add up in other orders

Times = dict[str, Any]


# -------------------------------------------------------------------------------------------------- on a rank


def start(variant: str, task: str, rank: Rank) -> Trained:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return build(variant, TASKS[task], rank)


def run_step(trained: Trained, task: str, step: int, rank: Rank) -> Tensor:
    loss = trained.loss(*TASKS[task].batch(step, rank))
    trained.backward(loss)
    trained.update()
    return loss.detach()


def time_variant(variant: str, task: str, steps: int, rank: Rank) -> Times:
    trained = start(variant, task, rank)
    losses = [run_step(trained, task, step, rank) for step in range(WARM_UP)]
    wait_for_device(rank.device)
    begin_cpu, seconds = read_cpu_seconds(), []
    for step in range(WARM_UP, WARM_UP + steps):
        begin = time.perf_counter()
        losses.append(run_step(trained, task, step, rank))
        wait_for_device(rank.device)
        seconds.append(time.perf_counter() - begin)
    cpu_seconds = read_cpu_seconds() - begin_cpu
    return {
        "cpu_ms": 1000 * cpu_seconds / steps,
        "step_ms": 1000 * statistics.median(seconds),
        "losses": average_over_ranks(losses, rank.world),
        "transport": name_transport(rank) if variant.startswith("zero") else backend_of(rank.world),
    }


def count_variant(variant: str, task: str, rank: Rank) -> int:
    _, peak = count_settled(variant, task, rank)
    return peak


def count_settled(variant: str, task: str, rank: Rank) -> tuple[Trained, int]:
    """After a few steps, and bytes of tensors at the peak of the last."""
    with memory_of(rank.device) as memory:
        trained = start(variant, task, rank)
        for step in range(WARM_UP):
            run_step(trained, task, step, rank)
        memory.reset_peak()
        run_step(trained, task, WARM_UP, rank)
        return trained, memory.peak()


def weigh_variant(variant: str, task: str, rank: Rank) -> int:
    """By how many bytes the process grew at most. It is told how to treat freed blocks before it allocates any.

    On a GPU: what CUDA's allocator has taken of it, which it does not give back.
    """
    return_freed_blocks_at_once()
    run_step(start(variant, "one", rank), "one", 0, rank)  # what is imported and set up once
    gc.collect()
    before = peak_of_process(rank.device)
    trained = start(variant, task, rank)
    for step in range(WARM_UP):
        run_step(trained, task, step, rank)
    return peak_of_process(rank.device) - before


def peak_of_process(device: torch.device) -> int:
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else measure_process_peak()


# --------------------------------------------------------------------------------------------------- over all


@dataclass(frozen=True)
class Options:
    world: int
    tasks: list[str]
    variants: list[str]
    rounds: int
    steps: int
    out: Path


def main() -> None:
    options = read_options(sys.argv[1:])
    missing = {name: reason for name in options.variants if (reason := VARIANTS[name].missing())}
    subject = describe(options)  # before the load is this run's own
    transports: dict[str, str] = {}
    found = {task: compare(task, options, missing, transports) for task in options.tasks}
    subject += "; " + ", ".join(f"{who} by {transport}" for who, transport in transports.items())
    told = [subject]
    for task, results in found.items():
        told.append(f"\n{describe_task(task)}\n{table(results)}")
    told += ["", CAPTION.format(rounds=options.rounds), "", goals(found)]
    told += [f"MISSING: {VARIANTS[name].title}: {reason}" for name, reason in missing.items()]
    print("\n".join(told))
    write(options, found, missing, subject)
    failed = [f"{VARIANTS[name].title}: {reason}" for name, reason in missing.items() if name.startswith("zero")]
    for task, results in found.items():
        losses = {result.title: result.losses for result in results if VARIANTS[result.variant].together}
        failed += [f"{task}: {told}" for told in find_differences(losses, TOLERANCES[TASKS[task].dtype])]
    if failed:
        sys.exit("FAILED: " + "\nFAILED: ".join(failed))


def compare(task: str, options: Options, missing: dict[str, str], transports: dict[str, str]) -> list[Result]:
    """Measures every variant that can be run. One that fails is left out, and `missing` gets the reason. `transports`
    gets those by which zero and the others send."""
    variants = [name for name in options.variants if name not in missing]
    times: dict[str, list[list[Times]]] = {name: [] for name in variants}
    counted: dict[str, int] = {}
    weighed: dict[str, int] = {}
    with tqdm(total=len(variants) * (options.rounds + 2), unit="pass", desc=task) as bar:

        def attempt(name: str, work: Any) -> list[Any] | None:
            bar.set_postfix_str(name)
            bar.update()
            try:
                return run_ranks(work, options.world)
            except RankFailed as failure:
                if name == "ddp":
                    sys.exit(f"FAILED: plain DDP, which all others are compared with: {failure}")
                missing[name] = f"failed on {task}: {str(failure).strip().splitlines()[-1]}"
                print(f"\n{VARIANTS[name].title} failed on {task}: {failure}", file=sys.stderr)
                variants.remove(name)
                return None

        for _ in range(options.rounds):
            for name in [*variants]:
                told = attempt(name, partial(time_variant, name, task, options.steps))
                if told is not None:
                    times[name].append(told)
                    transports["zero" if name.startswith("zero") else "the others"] = told[0]["transport"]
        for into, work in ((counted, count_variant), (weighed, weigh_variant)):
            for name in [*variants]:
                bytes_by_rank = attempt(name, partial(work, name, task))
                if bytes_by_rank is not None:
                    into[name] = max(bytes_by_rank)
    return [result_of(name, times[name], counted[name], weighed[name]) for name in variants]


def result_of(name: str, rounds: list[list[Times]], tensor_bytes: int, process_bytes: int) -> Result:
    return Result(
        variant=name,
        title=VARIANTS[name].title,
        stage=VARIANTS[name].stage,
        cpu_rounds=[statistics.mean(rank["cpu_ms"] for rank in ranks) for ranks in rounds],
        step_rounds=[max(rank["step_ms"] for rank in ranks) for ranks in rounds],
        tensor_bytes=tensor_bytes,
        process_bytes=process_bytes,
        losses=rounds[0][0]["losses"],
    )


def describe(options: Options) -> str:
    ranks = "1 rank" if options.world == 1 else f"{options.world} ranks"
    machine = f"{describe_device(options.world)}, one thread a rank, {os.cpu_count()} cores of {processor()}"
    packages = [f"{name} {installed}" for name in ("torch", "fairscale", "deepspeed") if (installed := version(name))]
    load = f", load before {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{ranks}, {machine}; AdamW; {', '.join(packages)}; {time.strftime('%d %B %Y').lstrip('0')}{load}"


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_task(task: str) -> str:
    model = TASKS[task].build(torch.device("meta"))
    parameters = [*model.parameters()]
    dtype = str(parameters[0].dtype).removeprefix("torch.")
    return f"{task}: {sum(param.numel() for param in parameters):,} parameters in {len(parameters)} tensors, {dtype}"


def write(options: Options, found: Mapping[str, Sequence[Result]], missing: Mapping[str, str], subject: str) -> None:
    # Every rank imports this file, and none needs matplotlib.
    from redraw import redraw

    options.out.mkdir(parents=True, exist_ok=True)
    content = {
        "subject": subject,
        "world": options.world,
        "rounds": options.rounds,
        "steps": options.steps,
        "missing": dict(missing),
        "tasks": {task: [result.as_json() for result in results] for task, results in found.items()},
    }
    name = "peers" if options.world == 2 else f"peers{options.world}"
    (options.out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    redraw(options.out / f"{name}.json")
    print(f"\nwrote {options.out / name}.json and {options.out / name}.png")


def read_options(arguments: list[str]) -> Options:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--world", type=int, metavar="N", default=2, help="ranks (default: %(default)s)")
    add("--tasks", nargs="+", choices=TASKS, default=["gpt", "tiny"], help="which models (default: gpt tiny)")
    add(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=list(VARIANTS),
        metavar="NAME",
        help=f"of {', '.join(VARIANTS)}; ddp always runs",
    )
    add("--rounds", type=int, metavar="N", default=3, help="turns of each variant (default: %(default)s)")
    add("--steps", type=int, metavar="N", default=6, help="timed steps a turn (default: %(default)s)")
    add("--between-hosts", action="store_true", help="ranks of zero read nothing from one another, as on several hosts")
    add("--out", type=Path, metavar="DIR", default=OUT, help="folder of the results (default: %(default)s)")
    given = parser.parse_args(arguments)
    if min(given.world, given.rounds, given.steps) < 1:
        parser.error("--world, --rounds and --steps are numbers from 1 up")
    chosen = [name for name in VARIANTS if name == "ddp" or name in given.variants]
    if given.between_hosts:
        os.environ["ZERO_HOST_MEMORY"] = "0"  # which the ranks inherit
    return Options(given.world, given.tasks, chosen, given.rounds, given.steps, given.out)


if __name__ == "__main__":
    main()
