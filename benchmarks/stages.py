"""Trains the same small GPT at every stage and shows what each keeps in memory, sends and takes.

Every stage runs twice, each time in fresh processes with the same data and seed: once to count bytes, once to take
the time. Prints a table, writes stages.json and stages.png, and fails if a stage's losses differ from DDP's.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from choices import OPTIMIZERS, STAGES
from gpt import read_text
from launch import RankFailed, backend_of, describe_device, run_ranks
from measure import ACCOUNTED_STEPS, WARM_UP, Settings, account_step, plan_stages, time_steps
from report import MIB, Row, find_differences, format_table, write_json

OUT = Path(__file__).parent / "out"
# On more ranks the stages may add up gradients in another order than DDP does, and CUDA's kernels may add
# up theirs in another order from run to run.
TOLERANCE = 1e-4

CAPTION = """\
MiB and ms, on the rank that needs most; CPU ms and losses are means over the ranks.
params, grads, optim  at rest, between the backward pass and the optimizer's step
peak                  the most bytes of tensors alive at once in a step, counted exactly
predicted             the same by zero.plan, before anything was run
process               the peak of the whole process with Python and torch, in the pass that counts (freed blocks
                      returned to the system at once)
sent                  a rank and step; DDP's own all-reduce by its formula, 2 (W - 1) / W of the gradients
step ms, CPU ms       the median step of the pass that takes the time, and all threads' CPU time a step"""


@dataclass(frozen=True)
class Options:
    """The command line, checked."""

    world: int
    stages: list[str]
    out: Path
    settings: Settings


def main() -> None:
    options = read_options(sys.argv[1:])
    try:
        rows, model, transport = run(options)
    except RankFailed as failure:
        sys.exit(f"FAILED: {failure}")
    parameters, device = model["parameters"], describe_device(options.world)
    ranks = "1 rank"
    if options.world > 1:
        ranks = f"{options.world} ranks over {transport} (DDP over {backend_of(options.world)})"
    subject = (
        f"GPT of {parameters:,} parameters ({model['parameters_bytes'] / MIB:.1f} MiB), {ranks}, {device}, "
        f"{options.settings.optim}, torch {torch.__version__}"
    )
    print(f"{subject}\n\n{format_table(rows)}\n\n{CAPTION}")
    write_results(options.out, rows, world=options.world, parameters=parameters, subject=subject)
    # Two ranks have only one order to add two gradients in.
    same_bits = options.world <= 2 and not torch.cuda.is_available()
    differences = find_differences({row.stage: row.losses for row in rows}, tolerance=0 if same_bits else TOLERANCE)
    if differences:
        sys.exit("FAILED: " + "\nFAILED: ".join(differences))


def run(options: Options) -> tuple[list[Row], dict[str, int], str]:
    """A row a stage, the sizes of the model, and by which transport zero sends."""
    total = len(options.stages) * (ACCOUNTED_STEPS + options.settings.steps)
    with tqdm(total=total, unit="step", desc="plan") as bar:
        plan, model = plan_stages(options.settings, options.world)
        rows, transport = [], ""
        for stage in options.stages:
            bar.set_description(stage)
            row, transport = run_stage(stage, options, plan.cost(STAGES[stage].number).peak, bar.update)
            rows.append(row)
    return rows, model, transport


def run_stage(stage: str, options: Options, predicted: int, on_step: Callable[[], object]) -> tuple[Row, str]:
    accounts = run_ranks(partial(account_step, options.settings, stage), options.world, on_step)
    times = run_ranks(partial(time_steps, options.settings, stage), options.world, on_step)
    row = Row(
        stage=stage,
        **{key: max(account[key] for account in accounts) for key in accounts[0]},
        predicted_peak_bytes=predicted,
        sent_bytes_per_step=max(rank["sent_bytes_per_step"] for rank in times),
        step_ms=max(rank["step_ms"] for rank in times),
        cpu_ms=sum(rank["cpu_ms"] for rank in times) / options.world,
        losses=times[0]["losses"],
    )
    return row, times[0]["transport"]


def write_results(out: Path, rows: list[Row], *, world: int, parameters: int, subject: str) -> None:
    # Every rank imports this file, and none needs matplotlib.
    from redraw import redraw

    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "stages.json", rows, world=world, parameters=parameters, subject=subject)
    redraw(out / "stages.json")
    print(f"\nwrote {out / 'stages.json'} and {out / 'stages.png'}")


def read_options(arguments: list[str]) -> Options:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--world", type=positive, metavar="N", help="ranks (default: one a GPU, or 2 on the CPU)")
    add("--steps", type=positive, metavar="N", default=20, help="training steps a stage (default: %(default)s)")
    add("--layers", type=positive, metavar="N", default=6, help="blocks of the GPT (default: %(default)s)")
    add("--width", type=positive, metavar="N", default=384, help="numbers a token (default: %(default)s)")
    stages_help = f"which of {', '.join(STAGES)}; ddp always runs, to compare the others with (default: all)"
    add("--stages", nargs="+", metavar="STAGE", default=list(STAGES), help=stages_help)
    add("--optim", choices=OPTIMIZERS, default="adam", help="optimizer (default: %(default)s)")
    add("--text", type=Path, metavar="FILE", help="train on its bytes (default: Python's standard library)")
    add("--out", type=Path, metavar="DIR", default=OUT, help="folder of the results (default: %(default)s)")
    given = parser.parse_args(arguments)

    gpus = torch.cuda.device_count()
    world = given.world or gpus or 2
    stages = [stage for listed in given.stages for stage in listed.split(",")]
    unknown = [stage for stage in stages if stage not in STAGES]
    if unknown:
        parser.error(f"argument --stages: no stage is named {', '.join(unknown)}; there are {', '.join(STAGES)}")
    if given.steps <= WARM_UP:
        parser.error(f"argument --steps: {given.steps} leaves nothing to time after {WARM_UP} steps of warm-up")
    try:
        text = read_text(given.text)
    except (OSError, ValueError) as error:
        parser.error(f"argument --text: {error}")
    return Options(
        world=world,
        stages=[stage for stage in STAGES if stage == "ddp" or stage in stages],
        out=given.out,
        settings=Settings(given.steps, given.layers, given.width, given.optim, text),
    )


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


if __name__ == "__main__":
    main()
