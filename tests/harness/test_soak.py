"""Training for long: nothing grows, and the losses stay those of DistributedDataParallel.

Meanwhile a checkpoint is written behind training. `make soak` sets ZERO_SOAK=3000, the number of steps, and shows what
was found.
"""

import gc
import os
import sys
import threading
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import ranks
import zero
from transports import TRANSPORTS, by
from zoo import GPT, DecoderBlock

STEPS = int(os.environ.get("ZERO_SOAK", "60"))
SETTLED, SAVE_EVERY = (200, 100) if STEPS > 1000 else (45, 15)
WORLD = 2
GROWTH = 0.015
"""Of resident memory, at most, after the steps in which it settles. Over Gloo a process grows once by 2.5 MB, at some
time: 0.9 % of this one."""

CASES = [(stage, transport) for stage in (1, 2, 3) for transport in TRANSPORTS]
if STEPS <= 1000:
    CASES = [(3, "host memory")]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")]


class Sample(NamedTuple):
    """What a process holds: bytes of memory; handles, threads, hooks and tensors of a graph; objects."""

    resident: int
    counts: tuple[int, int, int, int]
    objects: int


def sample(model: nn.Module) -> Sample:
    gc.collect()
    objects, threads = gc.get_objects(), threading.active_count()
    graph = sum(one.grad_fn is not None for one in objects if isinstance(one, Tensor))
    hooks = sum(len(held) for module in model.modules() for name, held in vars(module).items() if "_hooks" in name)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Sample(resident, (len(os.listdir("/proc/self/fd")), threads, hooks, graph), len(objects))


def soak(rank: int, world: int, stage: int, transport: str, folder: Path) -> tuple[list[float], list[Sample]]:
    """The losses of all steps, and samples from the step on in which all has settled."""
    torch.manual_seed(0)
    with by(transport):
        policy = ModuleWrapPolicy({DecoderBlock})
        model, optimizer = zero.setup(GPT(), torch.optim.AdamW, stage=stage, auto_wrap_policy=policy, lr=1e-4)
        losses, samples, saving = [], [], None
        for step in range(STEPS):
            tokens = torch.randint(61, (4, 12), generator=torch.Generator().manual_seed(world * step + rank))
            optimizer.zero_grad()
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            del logits, loss
            if (step + 1) % SAVE_EVERY == 0:
                if saving is not None:
                    saving.wait()
                if step + 1 >= SETTLED:
                    samples.append(sample(model))
                saving = zero.checkpoint.save(folder, model, optimizer, keep=2, wait=False) if stage else None
        if saving is not None:
            saving.wait()
    return losses, samples


@cache
def expected() -> list[list[float]]:
    """The losses of DistributedDataParallel, by rank."""
    return [losses for losses, _ in ranks.run(soak, WORLD, (0, TRANSPORTS[0], Path()), timeout=580)]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("stage", "transport"), CASES)
def test_nothing_grows_and_the_losses_stay_those_of_distributed_data_parallel(stage, transport, tmp_path):
    found = ranks.run(soak, WORLD, (stage, transport, tmp_path / "run"), timeout=580, fresh=True)
    for rank, (losses, samples) in enumerate(found):
        first, last = samples[0], samples[-1]
        if STEPS > 1000:
            growth = last.resident / first.resident - 1
            print(f"\nstage {stage}, {transport}, rank {rank}: {growth:+.2%}, {first} -> {last}", end="")
        assert losses == expected()[rank]
        assert last.resident <= first.resident * (1 + GROWTH), samples
        assert last.counts == first.counts, samples
        assert last.objects <= first.objects + 50, samples
