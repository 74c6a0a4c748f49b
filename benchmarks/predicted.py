"""How long a step takes by zero.plan, beside steps that are run: the GPT of stages.py at every stage, on the CPU.

    python benchmarks/predicted.py --world 2 4

Measures this machine first (benchmarks/calibrate.py), or takes a file of before (--hardware FILE). Then all
stages are run in turn, each time in fresh processes, and the medians of the CPU time of a rank and step are compared.
On the CPU nothing overlaps, so that a step is the sum of what it computes and sends.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import zero
from calibrate import calibrate
from choices import OPTIMIZERS, STAGES
from gpt import Block, draw_batch, read_text
from launch import RankFailed, run_ranks
from measure import SEED, Settings, build_model, time_steps
from report import align
from zero.plan import Hardware, Options, Plan, as_hardware

AIM = 0.2


def main() -> None:
    given = read_options(sys.argv[1:])
    hardware, note = (as_hardware(given.hardware), str(given.hardware)) if given.hardware else calibrate()
    print(f"{note}\n")
    settings = Settings(given.steps, given.layers, given.width, "adam", read_text())
    lines = [["ranks", "stage", "predicted ms", "of it transfers", "measured CPU ms", "predicted / measured"]]
    off = []
    for world in given.world:
        plan = predict(settings, world, hardware)
        measured = measure(settings, world, given.rounds)
        for name, cpu_ms in measured.items():
            one = plan.timing(STAGES[name].number)
            ratio = one.step_ms / cpu_ms
            off.append(abs(ratio - 1))
            line = [one.step_ms, one.exposed_ms, cpu_ms]
            lines.append([str(world), one.stage, *(f"{ms:.1f}" for ms in line), f"{ratio:.2f}"])
    print(align(lines))
    print(f"\nat most {max(off):.0%} off; the aim is {AIM:.0%}")


def predict(settings: Settings, world: int, hardware: Hardware) -> Plan:
    choice = OPTIMIZERS[settings.optim]
    return zero.plan(
        build_model(settings, torch.device("meta")),
        world_size=world,
        optimizer=partial(choice.type, **choice.arguments),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        batch=draw_batch(settings.text, seed=SEED, step=0, rank=0),
        options=Options(one_host=True),
        stages=["0", "1", "2", "3"],
        hardware=hardware,
    )


def measure(settings: Settings, world: int, rounds: int) -> dict[str, float]:
    """By stage, the CPU ms of a rank and step."""
    found: dict[str, list[float]] = {name: [] for name in STAGES}
    for _ in range(rounds):
        for name, taken in found.items():
            told = run_ranks(partial(time_steps, settings, name), world)
            taken.append(statistics.mean(rank["cpu_ms"] for rank in told))
    return {name: statistics.median(taken) for name, taken in found.items()}


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--world", type=int, nargs="+", metavar="N", default=[2, 4], help="ranks (default: 2 4)")
    add("--rounds", type=int, metavar="N", default=3, help="runs of each stage (default: %(default)s)")
    add("--steps", type=int, metavar="N", default=12, help="training steps of a run (default: %(default)s)")
    add("--layers", type=int, metavar="N", default=6, help="blocks of the GPT (default: %(default)s)")
    add("--width", type=int, metavar="N", default=384, help="numbers a token (default: %(default)s)")
    add("--hardware", type=Path, metavar="FILE", help="measured before, as TOML")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    try:
        main()
    except RankFailed as failure:
        sys.exit(f"FAILED: {failure}")
