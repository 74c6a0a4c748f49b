"""What the checks cost: CPU time of a step of the small GPT with and without them, by stage and transport.

With and without take turns within one training, step by step, in the order with, without, without, with, so that both
meet the same machine. Without them `zero` is patched from here: it has no switch for that, and must have none, because
they are what keeps ranks that differ from going on. Compared are

    ranks        that they come to the same operation, in every gather, backward and step
    gradients    that they are reduced, dense, and scaled alike on all ranks
    parameters   that they lie where they were put, and are those that were given
    errors       that they name what was waited for

Prints a table, and writes checks.json. Fails if stages or transports have other losses than DDP.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tqdm import tqdm

import zero.fsdp.unit
import zero.oss.gradients
import zero.oss.optimizer
import zero.sdp.bucket
from gpt import read_text
from launch import Rank, run_ranks
from measure import WARM_UP, Settings, Training
from zero.comm import Comm
from zero.comm.order import Order
from zero.fsdp.guard import Guard
from zero.oss import OSS
from zero.oss.joining import Joining
from zero.oss.scaling import Scaling
from zero.sdp.reducer import Reducer

OUT = Path(__file__).parent / "out"
WORLD = 2
TRANSPORTS = {"host memory": {}, "gloo": {"ZERO_HOST_MEMORY": "0"}}
ORDER = (True, False, False, True)
AIM = 2.0  # percent

_gather, _reduce = Comm.gather, Comm.reduce
_nothing = nullcontext()


def _gather_unseen(comm: Comm, full: Any, bounds: Any, channel: Any) -> Any:
    return _gather(comm, full, bounds, None)


def _reduce_unseen(comm: Comm, messages: Any, *, times: float = 1, into: Any = None, channel: Any = None) -> Any:
    return _reduce(comm, messages, times=times, into=into)


def _none(*args: Any, **kwargs: Any) -> None:
    return None


PATCHES: list[tuple[Any, str, Any]] = [
    (Comm, "agree", _none),
    (Comm, "announce", _none),
    (Comm, "gather", _gather_unseen),
    (Comm, "reduce", _reduce_unseen),
    (Order, "refuse_others", _none),
    (Order, "transfer", lambda *_: _nothing),
    (Scaling, "remember", _none),
    (Scaling, "compare", _none),
    (Guard, "before_step", lambda guard, optimizer, closure: closure),
    (Guard, "after_step", _none),
    (Guard, "refuse_strays", _none),
    (OSS, "_refuse_strays", _none),
    (OSS, "_refuse_edits", _none),
    (OSS, "_refuse_replaced", _none),
    (Joining, "before_step", _none),
    (Reducer, "_refuse_replaced", _none),
    (zero.oss.optimizer, "refuse_unreduced", _none),
    (zero.oss.gradients, "refuse_sparse", _none),
    (zero.sdp.bucket, "refuse_sparse", _none),
    (zero.fsdp.unit.Unit, "refuse_incomplete", _none),
]


@contextmanager
def without_checks() -> Iterator[None]:
    with ExitStack() as stack:
        for holder, name, instead in PATCHES:
            stack.enter_context(mock.patch.object(holder, name, instead))
        yield


@dataclass(frozen=True)
class Row:
    """CPU ms of a step and rank, medians. cost: of the checks, in percent; low, high: the quartiles of single pairs."""

    stage: str
    transport: str
    with_checks: float
    without: float
    cost: float
    low: float
    high: float


def measure(settings: Settings, stage: str, transport: str, rank: Rank) -> dict[str, Any]:
    """CPU seconds of every step with and without, and the losses."""
    found: dict[bool, list[float]] = {True: [], False: []}
    with mock.patch.dict(os.environ, TRANSPORTS[transport]):
        training = Training(settings, stage, rank)
        losses = [training.step(step).item() for step in range(WARM_UP)]
        for step in range(WARM_UP, settings.steps):
            checks = ORDER[(step - WARM_UP) % len(ORDER)]
            context: AbstractContextManager[None] = nullcontext() if checks else without_checks()
            with context:
                begin = time.process_time()
                loss = training.step(step)
                found[checks].append(time.process_time() - begin)
            losses.append(loss.item())
    return {"with": found[True], "without": found[False], "losses": losses}


def run(settings: Settings) -> tuple[list[Row], bool]:
    """The rows, and whether all had the same losses."""
    rows, losses = [], []
    with tqdm(total=settings.steps * len(TRANSPORTS) * 3, unit="step") as bar:
        for stage in ("oss", "sdp", "fsdp"):
            for transport in TRANSPORTS:
                bar.set_description(f"{stage}, {transport}")
                told = run_ranks(partial(measure, settings, stage, transport), WORLD, bar.update)
                rows.append(row(stage, transport, told))
                losses.append([one["losses"] for one in told])
    plain = run_ranks(partial(measure, settings, "ddp", "gloo"), WORLD)
    return rows, all(each == [one["losses"] for one in plain] for each in losses)


def row(stage: str, transport: str, told: list[dict[str, Any]]) -> Row:
    # Of both ranks together: what one does not do the other may wait for.
    with_checks = [sum(pair) / WORLD for pair in zip(*(one["with"] for one in told), strict=True)]
    without = [sum(pair) / WORLD for pair in zip(*(one["without"] for one in told), strict=True)]
    pairs = [100 * (a / b - 1) for a, b in zip(with_checks, without, strict=True)]
    low, middle, high = statistics.quantiles(pairs, n=4)
    return Row(
        stage,
        transport,
        1000 * statistics.median(with_checks),
        1000 * statistics.median(without),
        middle,
        low,
        high,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"--pairs": 40, "--layers": 6, "--width": 384}.items():
        parser.add_argument(name, type=int, default=default)
    options = parser.parse_args()
    steps = WARM_UP + 2 * options.pairs
    settings = Settings(steps=steps, layers=options.layers, width=options.width, optim="adam", text=read_text())
    rows, same = run(settings)
    print(f"{WORLD} ranks, {options.pairs} pairs of steps, torch {torch.__version__}\n")
    print("stage  transport    with    without  checks  quartiles of pairs")
    for one in rows:
        print(
            f"{one.stage:5}  {one.transport:11}  {one.with_checks:6.1f}  {one.without:7.1f}  {one.cost:+5.1f}%  "
            f"{one.low:+.1f}% to {one.high:+.1f}%"
        )
    OUT.mkdir(exist_ok=True)
    (OUT / "checks.json").write_text(json.dumps([asdict(one) for one in rows], indent=1))
    missed = [f"{one.stage} by {one.transport}" for one in rows if one.cost > AIM]
    print(f"\nThe aim is {AIM:g}%: " + (f"missed by {', '.join(missed)}" if missed else "met"))
    if not same:
        sys.exit("FAILED: the losses are not DDP's")


if __name__ == "__main__":
    main()
