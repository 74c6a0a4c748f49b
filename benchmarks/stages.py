"""Trains the same small GPT at every stage and shows what each keeps in memory, sends and takes.

Every stage runs twice, each time in fresh processes with the same data and seed: once to count bytes, once to take
the time. Prints a table, writes stages.json and stages.png, and fails if a stage's losses differ from DDP's: with two
ranks on the CPU, in any bit.
"""

import os
import sys
from functools import partial
from pathlib import Path

import torch
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import zero
from comparison import COLUMNS, Result, caption, compare, other_losses, table, transports
from contestants import How
from launch import Launch, backend_of
from models import Task, gpt
from report import MIB, failures, machine, parser_of, write
from zero.plan import Plan

STAGES = ("ddp", "zero1", "zero2", "zero3")
SHOWN = [
    *("params", "grads", "optim", "tensors", "predicted", "process", "sent", "calls"),
    *("step ms", "CPU ms", "first loss", "last loss"),
]


def main() -> None:
    sizes = {"layers": (6, "blocks of the GPT"), "width": (384, "numbers a token")}
    world = torch.cuda.device_count() or 2
    parser = parser_of(__doc__, world=(world, "ranks"), steps=(20, "timed steps"), rounds=(1, "turns"), **sizes)
    given = parser.parse_args()
    how, task = How(), gpt(given.layers, given.width, tied=True)
    plan = planned(task, how, given.world)
    predicted = ("tensors by zero.plan, before anything was run", 1, lambda one, _: plan.cost(one.stage).peak / MIB)
    columns = {name: COLUMNS.get(name, predicted) for name in SHOWN}
    results, failed = compare(STAGES, task, how, Launch(given.world), rounds=given.rounds, steps=given.steps)
    if results:
        # More ranks may add up gradients in another order than DDP does, and CUDA's kernels from run to run.
        same_bits = given.world <= 2 and not torch.cuda.is_available()
        failed |= other_losses(results, 0 if same_bits else 1e-4)
        by = transports(results, backend_of(given.world))
        subject = f"GPT of {task}, {given.world} ranks, {by}; AdamW; {machine()}"
        print(f"{subject}\n\n{table(results, columns)}\n\n{caption(columns)}")
        content = {"subject": subject, "stages": [result.as_json() for result in results]}
        write(given.out, "stages", content, partial(draw, results, plan, subject))
    sys.exit(failures(failed))


def planned(task: Task, how: How, world: int) -> Plan:
    """What the stages should cost. Runs nothing."""
    return zero.plan(
        task.build("meta"),
        world_size=world,
        optimizer=how.optim,
        auto_wrap_policy=ModuleWrapPolicy({task.block}),
        batch=task.batch(0, 0, torch.device("cpu")),
        backend="nccl" if torch.cuda.is_available() else "gloo",
        one_host=os.environ.get("ZERO_HOST_MEMORY") != "0",
    )


def draw(results: list[Result], plan: Plan, subject: str, file: Path) -> None:
    # Every rank imports this file, and none needs matplotlib.
    from pictures import Panel, draw_panels

    kept = {}
    for result in results:
        weight = result.weight
        resting = (weight.parameters, weight.gradients, weight.optimizer)
        kept[result.title] = [size / MIB for size in (*resting, weight.tensors - sum(resting))]
    predicted = {result.title: plan.cost(result.stage).peak / MIB for result in results}
    segments = ["parameters", "gradients", "optimizer state", "activations, buffers"]
    panel = Panel("MiB on the rank that needs most; dashed: the peak by zero.plan", kept, segments, predicted)
    title = "Peak memory of a training step at each stage (lower is better)"
    draw_panels(file, [panel], {result.title: "" for result in results}, title=title, caption=subject)


if __name__ == "__main__":
    main()
