"""Trains the same small GPT at every stage and shows what each keeps in memory, sends and takes.

Every stage runs twice, each time in fresh processes with the same data and seed: once to count bytes, once to take
the time. Prints a table, writes stages.json and stages.png, and fails if a stage's losses differ from DDP's: with two
ranks on the CPU, in any bit.
"""

import os
import sys
from functools import partial

import torch
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import zero
from comparison import COLUMNS, Figure, caption, compare, mib, other_losses, table, transports
from contestants import How
from launch import Launch, backend_of
from models import Task, gpt
from pictures import Panel, draw
from report import MIB, failures, machine, parser_of, write

STAGES = ("ddp", "zero1", "zero2", "zero3")
SHOWN = [
    *("params", "grads", "optim", "tensors", "predicted", "process", "sent", "calls"),
    *("step ms", "CPU ms", "first loss", "last loss"),
]
SEGMENTS = {
    "parameters": mib(lambda weight: weight.parameters),
    "gradients": mib(lambda weight: weight.gradients),
    "optimizer state": mib(lambda weight: weight.optimizer),
    "activations, buffers": mib(lambda one: one.tensors - one.parameters - one.gradients - one.optimizer),
}


def main() -> None:
    sizes = {"layers": (6, "blocks of the GPT"), "width": (384, "numbers a token")}
    world = torch.cuda.device_count() or 2
    parser = parser_of(__doc__, world=(world, "ranks"), steps=(20, "timed steps"), rounds=(1, "turns"), **sizes)
    given = parser.parse_args()
    how, task = How(), gpt(given.layers, given.width, tied=True)
    predicted = planned(task, how, given.world)
    column = ("tensors by zero.plan, before anything was run", 1, predicted)
    columns = {name: COLUMNS.get(name, column) for name in SHOWN}
    results, failed = compare(STAGES, task, how, Launch(given.world), rounds=given.rounds, steps=given.steps)
    if results:
        # More ranks may add up gradients in another order than DDP does, and CUDA's kernels from run to run.
        same_bits = given.world <= 2 and not torch.cuda.is_available()
        failed |= other_losses(results, 0 if same_bits else 1e-4)
        by = transports(results, backend_of(given.world))
        subject = f"GPT of {task}, {given.world} ranks, {by}; AdamW; {machine()}"
        print(f"{subject}\n\n{table(results, columns)}\n\n{caption(columns)}")
        content = {"subject": subject, "stages": [result.as_json() for result in results]}
        title = "Peak memory of a training step at each stage (lower is better)"
        panel = Panel("MiB on the rank that needs most; dashed: the peak by zero.plan", SEGMENTS, predicted)
        write(given.out, "stages", content, partial(draw, {"GPT": results}, [panel], title, subject))
    sys.exit(failures(failed))


def planned(task: Task, how: How, world: int) -> Figure:
    """MiB that a stage should take at its peak. Runs nothing."""
    plan = zero.plan(
        task.build("meta"),
        world_size=world,
        optimizer=how.optim,
        auto_wrap_policy=ModuleWrapPolicy({task.block}),
        batch=task.batch(0, 0, torch.device("cpu")),
        backend="nccl" if torch.cuda.is_available() else "gloo",
        one_host=os.environ.get("ZERO_HOST_MEMORY") != "0",
    )
    return lambda one, _: plan.cost(one.stage).peak / MIB


if __name__ == "__main__":
    main()
