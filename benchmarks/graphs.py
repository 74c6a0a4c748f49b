"""A settled training step (forward, backward, optimizer.step, zero_grad) as one CUDA graph, sharded by each or not.

One real rank of W over torch's fake process group, whose transfers take as long as on a wire (fake.py), in the graph,
too. With --hosts W all ranks are real, pose as hosts on however few GPUs there are, and send by NCCL.

    python benchmarks/graphs.py --world 8 --bandwidth 300 --tokens 2048

Each contestant has a fresh process, and trains twice on a stream of its own: WARM_UP steps, and then --steps more, by
the host or as replays of one graph. Both begin alike and compute deterministically, so that all losses are to have the
same bits. Prints milliseconds of a step, medians, and of the host until it has launched one, and writes graphs.json.
Without a GPU nothing is recorded: steps are compared with steps.
"""

import gc
import os
import sys
import warnings
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from contestants import CONTESTANTS, How, Trained, build
from fake import Wires, Wiring
from launch import Launch, Rank
from loop import Step, median, take_step
from models import Task
from report import Figures, failures, tabulate
from wires import asked, describe, gpu_parser
from zero.comm.streams import STEP_GRAPH

WARM_UP = 11
"""As many as DistributedDataParallel asks for. Of zero's forwards the 12th is one that looks for no writes, which reads
numbers from the device (zero/fsdp/model.py)."""
NAMES = ["alone", "fsdp2", "zero3", "zero3kept", "zero2", "zero1"]


class Replayed(Trained):
    """A step that is recorded at once. Its replay is launched where others run forward."""

    def __init__(self, trained: Trained, batch: tuple[Tensor, ...], stream: torch.cuda.Stream) -> None:
        self.graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog, may ask for events meanwhile.
        with STEP_GRAPH, torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            self.recorded = trained.loss(*batch)
            trained.backward(self.recorded)
            trained.update()

    def loss(self, *batch: Tensor) -> Tensor:
        self.graph.replay()
        return self.recorded

    def backward(self, loss: Tensor) -> None: ...

    def update(self) -> None: ...


def measure(name: str, task: Task, how: How, wiring: Wiring | None, steps: int, rank: Rank) -> Figures:
    warnings.simplefilter("ignore")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    with Wires(wiring, rank.world, rank.device).patched() if wiring else nullcontext():
        eager, losses = train(name, task, how, steps, rank, recorded=False)
        gc.collect()
        replayed, same = train(name, task, how, steps, rank, recorded=True)
    return {
        "step ms": median(eager, lambda step: step.wall_ms),
        "replayed": median(replayed, lambda step: step.wall_ms),
        "host ms": median(eager, lambda step: step.launched),
        "replay launched": median(replayed, lambda step: step.launched),
        "replays have": "the same bits" if losses == same else "other losses",
    }


def train(name: str, task: Task, how: How, steps: int, rank: Rank, *, recorded: bool) -> tuple[list[Step], list[float]]:
    """The steps that were timed, and the losses of all."""
    stream = torch.cuda.Stream() if rank.device.type == "cuda" else None
    with torch.cuda.stream(stream):
        trained, batch = build(name, task, rank, how), task.batch(0, rank.rank, rank.device)
        losses, taken = [], []
        for number in range(WARM_UP + steps):
            if number == WARM_UP and recorded and stream is not None:
                trained = Replayed(trained, batch, stream)
            step, loss = take_step(trained, batch, rank.device)
            losses.append(loss.item())
            taken.append(step)
        return taken[WARM_UP:], losses


def main() -> None:
    numbers = {"hosts": (0, "ranks that all run, over NCCL, in place of --world"), "steps": (8, "timed steps")}
    numbers |= {"seconds": (60, "that a contestant may take")}
    given = gpu_parser(__doc__, NAMES, NAMES, tokens=2048, **numbers).parse_args()
    task, how, told = asked(given, rate=1e-4)
    launch = Launch(given.hosts or given.world, "hosts" if given.hosts else "fake", seconds=given.seconds)
    wiring = None if given.hosts else Wiring(given.bandwidth)
    where = describe(wiring, given.world) if wiring else f"all {given.hosts} ranks are real, without wires"
    jobs = {
        CONTESTANTS[name].title: partial(launch.first, partial(measure, name, task, how, wiring, given.steps))
        for name in given.only
    }
    _, failed = tabulate(jobs, 1, given.out, "graphs", f"{where}, {told}")
    sys.exit(failures(failed))


if __name__ == "__main__":
    main()
