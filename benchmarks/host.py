"""What the host does for a unit in a settled step: CPU time of stages 2 and 3 beside FSDP2, and of the model alone.

One rank trains 100 units of 12 parameters each. The other ranks are torch's fake process group, and the tensors are so
small that computing with them takes little. What is left is what the host of a GPU does while the GPU computes. Every
parameter of a unit has 1,024 rows, so that nobody pads up to 1,024 ranks. Transfers take no time, and one copy of what
this rank has is for all others (fake.py).

    python benchmarks/host.py --worlds 8 1024

Every contestant runs in fresh processes, in turn, over and over. Prints the CPU time of a step divided by the units,
medians, and writes host8.json. Fails where stage 3 takes more than 0.8 of FSDP2.
"""

import statistics
import sys
from functools import partial

from torch.optim import SGD

from contestants import How, build
from fake import Wires, Wiring
from launch import Launch, Rank
from loop import median, take_step
from models import chain
from report import Figures, failures, machine, parser_of, tabulate

ROWS = 1024
AIM = 0.8
WARM_UP = 4
PHASES = ("forward", "backward", "optimizer", "step")
NAMES = ["alone", "fsdp2", "zero2", "zero3"]
NOTHING_LEARNED = How(partial(SGD, lr=0.0, foreach=True))
"""What the fake group sums up is not the ranks' gradients, and would grow to NaN."""


def measure(units: int, steps: int, name: str, rank: Rank) -> Figures:
    """Of a contestant, medians over the steps."""
    task = chain(units - 1, layers=3, width=ROWS, read=4, rows=1)  # and the root unit
    trained, batch = build(name, task, rank, NOTHING_LEARNED), task.batch(0, 0, rank.device)
    with Wires(Wiring(), rank.world, rank.device).patched():
        taken = [take_step(trained, batch, rank.device)[0] for _ in range(WARM_UP + steps)][WARM_UP:]
    phases = [statistics.median(phase) for phase in zip(*(step.cpu for step in taken), strict=True)]
    figures = zip(PHASES, (*phases, median(taken, lambda step: step.cpu_ms)), strict=True)
    return {phase: 1000 * ms / units for phase, ms in figures}


def main() -> None:
    numbers = {"units": (100, "units"), "steps": (20, "timed steps a turn"), "rounds": (3, "turns of each")}
    given = parser_of(__doc__, **numbers, worlds=([8, 1024], "ranks, of which one runs")).parse_args()
    missed = {}
    for world in given.worlds:
        launch = Launch(world, "fake")
        jobs = {name: partial(launch.first, partial(measure, given.units, given.steps, name)) for name in NAMES}
        subject = f"CPU us a unit of one rank of {world}, {given.units} units; {machine()}"
        rows, failed = tabulate(jobs, given.rounds, given.out, f"host{world}", subject)
        missed |= failed
        if "fsdp2" in rows and "zero3" in rows:
            ratio = rows["zero3"]["step"] / rows["fsdp2"]["step"]
            print(f"stage 3 takes {ratio:.2f} of FSDP2's time\n")
            if ratio > AIM:
                missed[f"{world} ranks"] = f"stage 3 is to take {AIM} of FSDP2's time, and takes {ratio:.2f}"
    sys.exit(failures(missed))


if __name__ == "__main__":
    main()
