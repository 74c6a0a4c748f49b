"""What the CPU's step costs with offload to the CPU; `peers.py --offload` shows whole steps beside FSDP2's.

The step: OSS with CPUOffload on one rank, fused AdamW over float32 masters of bfloat16 parameters. With "casts" it
begins with bfloat16 gradients, which become float32, and it always ends with parameters that are rounded from the
masters. Beside it, in turn: torch's fused AdamW over float32 tensors of the same sizes, and a copy of a large tensor.
A step is taken to move 28 bytes an element (parameter, gradient and two moments read; parameter and moments written),
a copy 8. All is as beside a GPU: nobody compares parameters with their masters, since a digest on the GPU tells that
they are unchanged.

    python benchmarks/offload.py --parameters 100e6 --threads 2

Prints medians over the turns, and medians of the ratios of times that were taken next to one another; writes
offload.json. Fails where a step with casts has less than 0.85 of the copy's bandwidth.
"""

import os
import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import AdamW

import zero
from launch import Launch, Rank
from loop import repeat
from report import Figures, failures, machine, parser_of, tabulate

AIM = 0.85
LONGEST = 2**20  # elements of a parameter
STEP_BYTES, COPY_BYTES = 28, 8  # an element
COPY, TORCH, STAGE_1, STAGE_2 = "copy", "torch's fused AdamW", "zero, with casts", "zero, float32 gradients"

adamw = partial(AdamW, lr=1e-4, fused=True)


class OffloadBesideGPU(zero.CPUOffload):
    """As beside a GPU, where a digest tells that nobody has written into the parameters."""

    def holds(self, shard: Tensor) -> bool:
        return True


def of_sizes(numel: int, dtype: torch.dtype) -> list[Tensor]:
    return [0.02 * torch.randn(len(part), dtype=dtype) for part in torch.empty(numel).split(LONGEST)]


def torch_step(numel: int) -> Callable[[], object]:
    params = [nn.Parameter(values) for values in of_sizes(numel, torch.float32)]
    for param, gradient in zip(params, of_sizes(numel, torch.float32), strict=True):
        param.grad = gradient
    return adamw(params).step


class Sum(nn.Module):
    """Its gradients are ones."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.values = nn.ParameterList(of_sizes(numel, torch.bfloat16))

    def forward(self) -> Tensor:
        return torch.stack([param.sum() for param in self.values]).sum()


def zero_step(numel: int, *, stage: int) -> Callable[[], object]:
    """At stage 1 gradients have the parameters' 16 bits. At stage 2 this rank's shards of them arrive as float32."""
    model = Sum(numel)
    optimizer = zero.OSS(model.parameters(), adamw, offload=OffloadBesideGPU())
    (model if stage == 1 else zero.ShardedDDP(model, optimizer))().backward()
    return optimizer.step


STEPS: dict[str, Callable[[int], Callable[[], object]]] = {
    COPY: lambda numel: partial(torch.zeros(numel).copy_, torch.ones(numel)),
    TORCH: torch_step,
    STAGE_1: partial(zero_step, stage=1),
    STAGE_2: partial(zero_step, stage=2),
}


Turn = dict[str, tuple[float, float]]
"""ms and CPU ms of each of STEPS."""


def measure_steps(numel: int, turns: int, rank: Rank) -> list[Turn]:
    steps = {title: make(numel) for title, make in STEPS.items()}
    return [{title: repeat(step, rank, times=1) for title, step in steps.items()} for _ in range(turns)]


def of_step(title: str, turns: list[Turn], numel: int) -> Figures:
    """ms, GB/s, and this as a fraction of the copy's bandwidth."""
    nbytes = COPY_BYTES if title == COPY else STEP_BYTES
    ms, cpu_ms = map(statistics.median, zip(*(turn[title] for turn in turns), strict=True))
    to_copy = statistics.median(nbytes / COPY_BYTES * turn[COPY][0] / turn[title][0] for turn in turns)
    return {"ms": ms, "GB/s": numel * nbytes / ms / 1e6, "/ copy": to_copy, "CPU ms": cpu_ms}


def main() -> None:
    sizes = {"parameters": (100e6, "that are stepped"), "threads": (os.cpu_count() or 1, "of the step")}
    given = parser_of(__doc__, **sizes, turns=(9, "timed steps of each")).parse_args()
    numel = int(given.parameters)
    subject = f"{numel:,} parameters, {given.threads} threads; {machine()}"
    launch = Launch(threads=given.threads)
    turns = launch.first(partial(measure_steps, numel, given.turns))
    jobs = {title: partial(of_step, title, turns, numel) for title in STEPS}
    rows, failed = tabulate(jobs, 1, given.out, "offload", subject)
    if (to_copy := rows[STAGE_1]["/ copy"]) < AIM:
        failed["the CPU's step"] = f"is to have {AIM} of the copy's bandwidth, and has {to_copy:.2f}"
    sys.exit(failures(failed))


if __name__ == "__main__":
    main()
