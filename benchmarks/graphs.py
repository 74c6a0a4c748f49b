"""A settled training step (forward, backward, optimizer.step, zero_grad) as one CUDA graph, sharded by each or not.

One real rank of W over torch's fake process group, whose transfers take as long as on a wire (wires.py), in the graph,
too. With --hosts W all ranks are real, pose as hosts on however few GPUs there are, and send by NCCL.

    python benchmarks/graphs.py --world 8 --bandwidth 300 --tokens 2048

Each contestant has a fresh process, and trains twice on a stream of its own: WARM_UP steps, and then --steps more, by
the host or as replays of one graph. Both begin alike and compute deterministically, so that all losses, and at the end
all parameters and states that the optimizer has here, are to have the same bits. Prints milliseconds of a step,
medians, and of the host until it has launched one. Writes graphs.json, with the whole of what was raised. Without a GPU
nothing is recorded: steps are compared with steps.
"""

import argparse
import gc
import json
import os
import re
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import zero
from contestants import Settings, Trained, adam, add_options, fsdp2, stage_3, unsharded, with_oss
from launch import Rank, RankFailed, run_hosts, run_one_of
from measure import wait_for_device
from wires import Wires, describe
from zero.comm.streams import STEP_GRAPH

OUT = Path(__file__).parent / "out"
WARM_UP = 11
"""As many as DistributedDataParallel asks for. Of zero's forwards the 12th is one that looks for no writes, which reads
numbers from the device (zero/fsdp/schedule.py)."""


def stage_1(settings: Settings, rank: Rank) -> Trained:
    """Sums of gradients do not overlap over the fake group: its work has no future, for which DDP's own hook asks."""
    if not settings.bandwidth:
        return with_oss(1, settings, rank)
    model = DistributedDataParallel(settings.build(rank.device).bfloat16(), gradient_as_bucket_view=True)
    model.register_comm_hook(None, sum_at_once)
    optim = adam(settings, rank.device)
    return model, zero.OSS(model.parameters(), optim, partition="even", master_dtype=torch.float32)


def sum_at_once(_: object, bucket: dist.GradBucket) -> Future[Tensor]:
    dist.all_reduce(bucket.buffer())
    summed: Future[Tensor] = Future()
    summed.set_result(bucket.buffer())
    return summed


CONTESTANTS: dict[str, Callable[[Settings, Rank], Trained]] = {
    "nothing sharded": unsharded,
    "FSDP2": fsdp2,
    "zero stage 3": stage_3,
    "zero stage 3 kept": partial(stage_3, reshards=False),
    "zero stage 2": partial(with_oss, 2),
    "zero stage 1": stage_1,
}


# -------------------------------------------------------------------------------------------------------- measurements


@dataclass(frozen=True)
class Run:
    """Medians, the losses of all steps, and the bits at the end."""

    step_ms: float
    host_ms: float
    losses: list[float]
    bits: list[int]


def measure(title: str, settings: Settings, rank: Rank) -> dict[str, Any]:
    """Both Runs, as dictionaries, or what the second one raised."""
    warnings.simplefilter("ignore")
    compute_deterministically()
    wires = Wires(settings, rank.device) if settings.bandwidth else None
    with wires.patched() if wires else nullcontext():
        eager = train(title, settings, rank, recorded=False)
        gc.collect()
        try:
            return {"eager": asdict(eager), "replayed": asdict(train(title, settings, rank, recorded=True))}
        except Exception:
            return {"eager": asdict(eager), "failed": traceback.format_exc()}


def train(title: str, settings: Settings, rank: Rank, *, recorded: bool) -> Run:
    stream = torch.cuda.Stream() if rank.device.type == "cuda" else None
    with torch.cuda.stream(stream):
        loss, optimizer = CONTESTANTS[title](settings, rank)
        batch = settings.batch(rank.device)

        def step() -> Tensor:
            found = loss(*batch)
            found.backward()
            optimizer.step()
            optimizer.zero_grad()
            return found.detach()

        losses, times = [step().item() for _ in range(WARM_UP)], []
        run = record(step, stream) if recorded and stream is not None else step
        for _ in range(settings.steps):
            wait_for_device(rank.device)
            begin = time.perf_counter()
            found = run()
            launched = time.perf_counter() - begin
            wait_for_device(rank.device)
            times.append((1000 * (time.perf_counter() - begin), 1000 * launched))
            losses.append(found.item())
        step_ms, host_ms = (statistics.median(figures) for figures in zip(*times, strict=True))
        return Run(step_ms, host_ms, losses, bits_of(optimizer))


def record(step: Callable[[], Tensor], stream: torch.cuda.Stream) -> Callable[[], Tensor]:
    """Records a step, and returns what replays it."""
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as NCCL's watchdog, may ask for events meanwhile.
    with STEP_GRAPH, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


def compute_deterministically() -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def bits_of(optimizer: Optimizer) -> list[int]:
    """A number of the bits of each tensor that is stepped on this rank, and of its states."""
    inner: Optimizer = getattr(optimizer, "optim", optimizer)  # of OSS, which steps shards
    stepped = [param for group in inner.param_groups for param in group["params"]]
    states = [value for param in stepped for value in inner.state[param].values()]
    return [number_of(tensor) for tensor in (*stepped, *states) if isinstance(tensor, Tensor)]


def number_of(tensor: Tensor) -> int:
    own = tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach().as_subclass(Tensor)
    bits = own.flatten().view(torch.int32 if own.element_size() == 4 else torch.int16).long()
    return int((bits * (torch.arange(len(bits), device=bits.device) % 65521 + 1)).sum())


# ------------------------------------------------------------------------------------------------------- the command


def difference(eager: Run, replayed: Run) -> str:
    """In words."""
    for step, (one, other) in enumerate(zip(eager.losses, replayed.losses, strict=True)):
        if one != other:
            return f"loss {other!r} at step {step} of {len(eager.losses)}, eager {one!r}"
    different = sum(one != other for one, other in zip(eager.bits, replayed.bits, strict=True))
    return f"{different} of {len(eager.bits)} tensors differ" if different else "the same bits"


def reason(told: str) -> str:
    """What was raised first, in one line."""
    raised = re.search(r"^[\w.]+(?:Error|Exception)\b.*", told, re.MULTILINE)
    return (raised.group() if raised else told.strip().splitlines()[-1])[:300]


def compare(title: str, settings: Settings, launch: Callable[[Any], Any]) -> dict[str, Any]:
    """What both trainings came to, and prints a line of it at once."""
    try:
        found: dict[str, Any] = launch(partial(measure, title, settings))
    except RankFailed as failure:
        found = {"failed": str(failure)}
    runs = [Run(**found[how]) if how in found else None for how in ("eager", "replayed")]
    eager, replayed = runs
    figures = [getattr(run, figure, None) for figure in ("step_ms", "host_ms") for run in runs]
    told = difference(eager, replayed) if eager and replayed else f"FAILED: {reason(found['failed'])}"
    print(f"{title:18}", *(f"{'-' if one is None else f'{one:.2f}':>9}" for one in figures), "", told, flush=True)
    return found


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = partial(parser.add_argument, metavar="N", type=int)
    add("--world", default=8, help="ranks, of which one runs (default: %(default)s)")
    add("--hosts", default=0, help="ranks that all run, over NCCL, in place of --world")
    add("--bandwidth", metavar="GB/s", type=float, default=300.0, help="as of wires.py, or inf (default: %(default)s)")
    add_options(parser, CONTESTANTS, tokens=2048 if on_gpu else 256)
    add("--steps", default=8, help="timed steps (default: %(default)s)")
    add("--seconds", default=60, help="that a contestant may take (default: %(default)s)")
    add("--out", type=Path, metavar="DIR", default=OUT, help="folder of the results (default: %(default)s)")
    given = vars(parser.parse_args())
    hosts, seconds, only, out = (given.pop(name) for name in ("hosts", "seconds", "only", "out"))
    if hosts:
        given |= {"world": hosts, "bandwidth": 0.0}
    settings = Settings(**given, compile=False, rate=1e-4, capturable=True)
    launch = (lambda work: run_hosts(work, hosts, seconds=seconds)[0]) if hosts else None
    launch = launch or (lambda work: run_one_of(work, settings.world, seconds=seconds))
    if hosts:
        print(f"all {hosts} ranks are real, over NCCL, without wires:")
    print(f"{describe(settings)}\n\n{'':18} {'step ms':>9} {'replay':>9} {'host ms':>9} {'replay':>9}", flush=True)
    found = {title: compare(title, settings, launch) for title in only}
    out.mkdir(parents=True, exist_ok=True)
    (out / "graphs.json").write_text(json.dumps({"settings": asdict(settings), "contestants": found}, indent=2) + "\n")
    failed = {title: one["failed"] for title, one in found.items() if "failed" in one}
    if failed:
        sys.exit("".join(f"\nFAILED: {title}: {told[:3000]}\n" for title, told in failed.items()))


if __name__ == "__main__":
    main()
