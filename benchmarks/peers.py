"""Trains the same models by DDP, by zero at every stage, and by others, and shows what each takes and holds.

Every contestant runs in fresh processes of one thread a rank, in turn, over and over; what counts is the median. Time
and bytes are measured in passes of their own. "alone" is one process that computes a rank's batch on one core and
sends nothing: the floor, from which the distance of each is shown. Prints tables, writes peers.json and peers.png, and
fails if losses differ from DDP's or a stage of zero does not run. A peer that is missing or does not run is named.

    python benchmarks/peers.py --contestants zero2 zero3 fsdp2 --link 1gbit

With --link each rank has a network namespace of its own, and sends at that rate, perhaps with a delay (links.py).
ZERO_HOST_MEMORY=0 in the environment has zero send by Gloo between ranks of one host, too.
"""

import sys
from functools import partial

import torch

from comparison import COLUMNS, caption, compare, mib, other_losses, table, transports
from contestants import CONTESTANTS, How
from launch import Launch, backend_of
from models import TASKS
from pictures import Panel, draw
from report import add_names, failures, machine, parser_of, write

SHOWN = [
    *("CPU ms", "above alone", "/ alone", "/ DDP", "/ peer", "step ms", "step / DDP"),
    *("tensors", "process", "sent", "calls", "last loss"),
]
PANELS = [
    Panel("CPU ms a step", {"": lambda one, _: one.cpu_ms}),
    Panel("memory of the process, MiB", {"": mib(lambda weight: weight.process)}),
]


def main() -> None:
    numbers = {"world": (2, "ranks"), "threads": (1, "of each"), "rounds": (3, "turns of each")}
    parser = parser_of(__doc__, **numbers, steps=(6, "timed steps a turn"))
    add_names(parser, "--model", [*TASKS], ["gpt", "layers"])
    add_names(parser, "--contestants", [*CONTESTANTS])
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, with float32 masters")
    parser.add_argument("--offload", action="store_true", help="shards and optimizer state are stored on the CPU")
    parser.add_argument("--link", metavar="RATE[,DELAY]", help="between ranks, such as 1gbit or 100mbit,5ms")
    given = parser.parse_args()
    how = How(dtype=torch.bfloat16 if given.bf16 else torch.float32, offload=given.offload)
    chosen = [name for name in CONTESTANTS if name in ("alone", "ddp", *given.contestants)]
    launch = Launch(given.world, threads=given.threads, link=given.link)
    variant = ", in bfloat16" * given.bf16 + ", offloaded" * given.offload
    link = f" over links of {given.link}" if given.link else ""
    subject = f"{given.world} ranks{link}, of {given.threads} threads, AdamW{variant}; {machine()}"
    columns, found, failed = {name: COLUMNS[name] for name in SHOWN}, {}, {}
    for model in given.model:
        task = TASKS[model]
        found[model], missing = compare(chosen, task, how, launch, rounds=given.rounds, steps=given.steps)
        by = transports(found[model], backend_of(given.world))
        print(f"\n{model}: {task}; {by}\n{table(found[model], columns)}")
        # Peers add up in other orders.
        wrong = other_losses(found[model], 2e-2 if how.half else 1e-3)
        wrong |= {title: told for title, told in missing.items() if title.startswith("zero")}
        failed |= {f"{title} on {model}": told for title, told in wrong.items()}
        for title, told in missing.items():
            print(f"MISSING: {title}: {told.splitlines()[-1]}")
    print(f"\n{caption(columns)}\n\n{subject}")
    content = {name: [result.as_json() for result in results] for name, results in found.items()}
    name = "peers" if given.world == 2 else f"peers{given.world}"
    title = "CPU time and memory of a training step, zero beside others of the same stage (lower is better)"
    write(given.out, name, {"subject": subject, "models": content}, partial(draw, found, PANELS, title, subject))
    sys.exit(failures(failed))


if __name__ == "__main__":
    main()
