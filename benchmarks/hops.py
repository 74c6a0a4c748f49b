"""What a comparison of what ranks do takes over Gloo, by their number: two of them wait for hosts in a settled step.

    python benchmarks/hops.py --worlds 2 4 8 16

Gloo's all-gather is a ring, of a hop for each further rank; from 9 ranks on there are several of up to 8 (levels in
zero/comm/transport.py). All ranks are on this machine, where each needs a core of its own for the figures to mean
anything; those of several hosts are longer by what their network takes.

Prints medians of microseconds of a comparison, by the clock and of CPU, and by hop; writes hops.json.
"""

import os
import statistics
import sys
import time
from functools import partial

from launch import Launch, Rank
from report import Figures, failures, machine, parser_of, tabulate
from zero.comm import Comm
from zero.comm.transport import levels

WARM_UP = 50


def measure(times: int, rank: Rank) -> Figures:
    os.environ["ZERO_HOST_MEMORY"] = "0"
    comm = Comm()
    channel, wall, cpu = comm.channel("a comparison"), [], []
    for _ in range(WARM_UP + times):
        begun, used = time.perf_counter(), time.thread_time()
        comm.agree(channel)
        wall.append(time.perf_counter() - begun)
        cpu.append(time.thread_time() - used)
    hops = sum(len(level) - 1 for level in levels(rank.rank, rank.world))
    took, used = (1e6 * statistics.median(one[WARM_UP:]) for one in (wall, cpu))
    return {"us": took, "CPU us": used, "hops": hops, "us a hop": took / hops}


def main() -> None:
    numbers = {"times": (500, "comparisons"), "rounds": (3, "turns of each")}
    given = parser_of(__doc__, **numbers, worlds=([2, 4, 8, 16], "ranks")).parse_args()
    jobs = {f"{world} ranks": partial(Launch(world).first, partial(measure, given.times)) for world in given.worlds}
    _, failed = tabulate(jobs, given.rounds, given.out, "hops", f"comparisons over Gloo, {machine()}")
    sys.exit(failures(failed))


if __name__ == "__main__":
    main()
