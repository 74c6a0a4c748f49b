"""What offload to the CPU costs: the step on the CPU, and on a GPU whole steps at stages 1 to 3 beside FSDP2's.

The step: OSS with CPUOffload on one rank, fused AdamW over float32 masters of bfloat16 parameters. With "casts" it
begins with bfloat16 gradients, which become float32, and it always ends with parameters that are rounded from the
masters. Beside it, in turn: torch's fused AdamW over float32 tensors of the same sizes, and a copy of a large tensor.
A step is taken to move 28 bytes an element (parameter, gradient and two moments read; parameter and moments written),
a copy 8. All is as beside a GPU: nobody compares parameters with their masters, since a digest on the GPU tells that
they are unchanged.

    python benchmarks/offload.py --parameters 100e6 --threads 2

Prints medians over the turns, and medians of the ratios of times that were taken next to one another; writes
offload.json. Fails where a step with casts has less than 0.85 of the copy's bandwidth. Without a GPU only this runs.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

import zero
from contestants import Settings
from gpt import CONTEXT
from launch import Rank, RankFailed, run_ranks
from measure import read_cpu_seconds
from offloaded import CONTESTANTS, measure_training
from report import MIB, align, processor

OUT = Path(__file__).parent / "out"
AIM = 0.85
LONGEST = 2**20  # elements of a parameter
STEP_BYTES, COPY_BYTES = 28, 8  # an element
COPY, TORCH, STAGE_1, STAGE_2 = "copy", "torch's fused AdamW", "zero, with casts", "zero, float32 gradients"

adamw = partial(AdamW, lr=1e-4, fused=True)


class OffloadBesideGPU(zero.CPUOffload):
    """As beside a GPU, where a digest tells that nobody has written into the parameters."""

    def holds(self, shard: Tensor) -> bool:
        return True


# --------------------------------------------------------------------------------------------- the step on the CPU


def of_sizes(numel: int, dtype: torch.dtype) -> list[Tensor]:
    return [0.02 * torch.randn(len(part), dtype=dtype) for part in torch.empty(numel).split(LONGEST)]


def copying(numel: int) -> Callable[[], object]:
    source, to = torch.ones(numel), torch.zeros(numel)
    return partial(to.copy_, source)


def torch_step(numel: int) -> Callable[[], object]:
    params = [nn.Parameter(values) for values in of_sizes(numel, torch.float32)]
    for param, gradient in zip(params, of_sizes(numel, torch.float32), strict=True):
        param.grad = gradient
    return adamw(params).step


def zero_step(numel: int, *, stage: int) -> Callable[[], object]:
    """At stage 1 gradients have the parameters' 16 bits. At stage 2 this rank's shards of them arrive as float32."""
    model = nn.ParameterList(of_sizes(numel, torch.bfloat16))
    optimizer = zero.OSS(model.parameters(), adamw, offload=OffloadBesideGPU())
    if stage == 2:
        zero.ShardedDDP(model, optimizer)
    dtype = torch.bfloat16 if stage == 1 else torch.float32
    for param, gradient in zip(model.parameters(), of_sizes(numel, dtype), strict=True):
        (param if stage == 1 else optimizer.part(param)).grad = gradient
    if stage == 2:
        optimizer.gradients.show((param, "it") for param in model.parameters())  # as a backward does at its end
    return optimizer.step


STEPS: dict[str, Callable[[int], Callable[[], object]]] = {
    COPY: copying,
    TORCH: torch_step,
    STAGE_1: partial(zero_step, stage=1),
    STAGE_2: partial(zero_step, stage=2),
}


def measure_steps(numel: int, threads: int, turns: int, rank: Rank) -> dict[str, list[list[float]]]:
    """Milliseconds and milliseconds of the processors of each of STEPS, in the order of the turns."""
    torch.set_num_threads(threads)
    steps = {title: make(numel) for title, make in STEPS.items()}
    taken: dict[str, list[list[float]]] = {title: [] for title in steps}
    for turn in range(-1, turns):  # the first warms up
        for title, step in steps.items():
            begin, begin_cpu = time.perf_counter(), read_cpu_seconds()
            step()
            if turn >= 0:
                taken[title].append([1000 * (time.perf_counter() - begin), 1000 * (read_cpu_seconds() - begin_cpu)])
    return taken


def compare_steps(taken: dict[str, list[list[float]]], numel: int) -> dict[str, dict[str, float]]:
    """Of each of STEPS: ms, GB/s, and this as a fraction of the copy's bandwidth, also by the processors' time."""
    found = {}
    for title, times in taken.items():
        nbytes = COPY_BYTES if title == COPY else STEP_BYTES
        ratios = [
            [nbytes / COPY_BYTES * copy_ms / ms for ms, copy_ms in zip(own, of_copy, strict=True)]
            for own, of_copy in zip(times, taken[COPY], strict=True)
        ]
        ms, cpu_ms = map(statistics.median, zip(*times, strict=True))
        to_copy, to_copy_cpu = map(statistics.median, zip(*ratios, strict=True))
        found[title] = {
            "ms": ms,
            "gb_s": numel * nbytes / ms / 1e6,
            "to_copy": to_copy,
            "cpu_ms": cpu_ms,
            "to_copy_cpu": to_copy_cpu,
        }
    return found


# ------------------------------------------------------------------------------------------------------- the command


def table_of_steps(found: dict[str, dict[str, float]]) -> str:
    head = ("", "ms", "GB/s", "/ copy", "CPU ms", "/ copy")
    lines = [
        (
            title,
            *(f"{of['ms']:.1f}", f"{of['gb_s']:.2f}", f"{of['to_copy']:.2f}"),
            *(f"{of['cpu_ms']:.1f}", f"{of['to_copy_cpu']:.2f}"),
        )
        for title, of in found.items()
    ]
    return align([head, *lines])


def table_of_training(found: dict[str, dict[str, float]]) -> str:
    head = ("", "forward + backward ms", "step ms", "down B", "up B", "peak MiB", "host B")
    lines = [
        (
            title,
            *(f"{of[figure]:.1f}" for figure in ("backward_ms", "step_ms")),
            *(f"{of[figure]:.2f}" for figure in ("down", "up")),
            f"{of['peak'] / MIB:.0f}",
            f"{of['host']:.1f}",
        )
        for title, of in found.items()
    ]
    return align([head, *lines])


def train(settings: Settings, threads: int) -> tuple[dict[str, dict[str, float]], list[str]]:
    """What each contestant took on the GPU, and which failed."""
    found, failed = {}, []
    for title in CONTESTANTS:
        try:
            found[title] = run_ranks(partial(measure_training, title, settings, threads=threads), 1)[0]
        except RankFailed as failure:
            failed.append(f"{title}: {failure}")
    return found, failed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = partial(parser.add_argument, metavar="N", type=int)
    parser.add_argument("--parameters", type=float, metavar="N", default=100e6, help="that are stepped on the CPU")
    add("--threads", default=os.cpu_count(), help="of the CPU's steps (default: %(default)s)")
    add("--turns", default=9, help="timed steps of each (default: %(default)s)")
    add("--layers", default=18, help="blocks of the GPT that a GPU trains (default: %(default)s)")
    add("--width", default=2048, help="of the GPT (default: %(default)s)")
    add("--tokens", default=8192, help=f"of its batch, a multiple of {CONTEXT} (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", default=OUT, help="folder of the results")
    given = parser.parse_args()
    if given.tokens % CONTEXT or min(given.parameters, given.threads, given.turns, given.tokens) < 1:
        parser.error(f"--tokens is a multiple of {CONTEXT}; --parameters, --threads and --turns are numbers from 1 up")
    numel = int(given.parameters)
    subject = (
        f"{numel:,} parameters, {given.threads} threads of {processor()} (load {os.getloadavg()[0]:.1f}), "
        f"torch {torch.__version__}, {time.strftime('%d %B %Y').lstrip('0')}"
    )
    taken: dict[str, list[list[float]]] = run_ranks(partial(measure_steps, numel, given.threads, given.turns), 1)[0]
    steps = compare_steps(taken, numel)
    print(f"{subject}\n\n{table_of_steps(steps)}\n")
    content: dict[str, Any] = {"subject": subject, "steps": steps, "taken_ms": taken}
    failed = []
    if steps[STAGE_1]["to_copy"] < AIM:
        failed = [f"the CPU's step is to have {AIM} of the copy's bandwidth, and has {steps[STAGE_1]['to_copy']:.2f}"]
    if torch.cuda.is_available():
        sizes = {"tokens": given.tokens, "layers": given.layers, "width": given.width, "steps": given.turns}
        settings = Settings(world=1, bandwidth=0.0, compile=False, reduce_dtype="float32", **sizes)
        content["gpu"] = torch.cuda.get_device_name()
        content["training"], not_trained = train(settings, given.threads)
        failed += not_trained
        print(f"GPT of {given.layers} blocks of {given.width}, {given.tokens} tokens, {content['gpu']}; B: bytes an")
        print(f"element of this rank\n\n{table_of_training(content['training'])}\n")
    else:
        print("There is no GPU: nothing was trained beside FSDP2.")
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "offload.json").write_text(json.dumps(content, indent=2) + "\n")
    print(f"wrote {given.out / 'offload.json'}")
    if failed:
        sys.exit("".join(f"FAILED: {told}\n" for told in failed))


if __name__ == "__main__":
    main()
