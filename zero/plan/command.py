"""The command line of the planner."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zero
from zero.fsdp import MixedPrecision
from zero.plan.chrome_trace import write_trace
from zero.plan.gpt import GPT, batch_of, gpt_of
from zero.plan.largest import largest
from zero.plan.planner import plan
from zero.plan.ratio import smallest_ratio
from zero.plan.rehearsal import misfit
from zero.plan.result import Plan, aligned
from zero.plan.sizes import Options
from zero.plan.stages import STAGES
from zero.plan.timeline import PREFETCHES

PRECISIONS = {
    "float32": (torch.float32, MixedPrecision()),
    "bfloat16": (torch.bfloat16, MixedPrecision()),
    "mixed": (torch.float32, MixedPrecision(param_dtype=torch.bfloat16)),
}
COUNTS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def main(arguments: Sequence[str] | None = None) -> None:
    given = _read(arguments)
    try:
        if given.largest:
            print(_largest(given))
        else:
            _show(given, *_planned(given))
    except (ValueError, RuntimeError, OSError) as error:
        sys.exit(f"zero.plan: {error}")


def _planned(given: argparse.Namespace) -> tuple[Plan, str]:
    """The plan, and what it is of."""
    dtype, _ = PRECISIONS[given.precision]
    if given.model:
        model = _built(given.model)
        model = model.to(dtype) if isinstance(model, nn.Module) else model
    else:
        model = gpt_of(given.parameters, given.layers, dtype)
    if given.tokens and isinstance(model, GPT):
        given.batch, given.tokens = batch_of(given.tokens), None
    more = {**_options(given, given.offload), "hardware": given.hardware, "tokens": given.tokens}
    offloaded = ""
    if given.offload == 0:
        (world,) = given.world
        stage = given.stage or "2"
        ratio, result = smallest_ratio(model, world_size=world, host_memory=given.host_memory, stage=stage, **more)
        offloaded = f", {ratio:.0%} of it offloaded (CPUOffload(ratio={ratio}))"
    else:
        result = plan(model, world_size=given.world, stages=given.stage and [given.stage], **more)
    title = f"{result.parameters:,} parameters{offloaded}"
    if isinstance(model, GPT):
        title += f" ({model.shape})"
    return result, title


def _options(given: argparse.Namespace, ratio: float | None) -> dict[str, Any]:
    """Arguments of a plan. ratio: the share that is offloaded; None for none, 0 for one that is to be found."""
    options = Options(
        partition=given.partition,
        precision=PRECISIONS[given.precision][1],
        backend=given.backend,
        one_host=given.one_host,
        offload=None if ratio is None else zero.CPUOffload(ratio=ratio or 1.0),
    )
    return {
        "optimizer": _optimizer(given.optimizer),
        "memory": given.memory,
        "batch": given.batch,
        "prefetch": PREFETCHES[given.prefetch],
        "options": options,
    }


def _largest(given: argparse.Namespace) -> str:
    """A table of the largest GPT at each stage, without offload and with all offloaded."""
    (world,) = given.world
    given.batch = batch_of(given.tokens) if given.tokens else None

    def found(stage: str, ratio: float | None) -> str:
        sized = partial(gpt_of, layers=given.layers, dtype=PRECISIONS[given.precision][0])
        host = given.host_memory if ratio else None
        try:
            fitting = largest(sized, world_size=world, host_memory=host, stage=stage, **_options(given, ratio))
        except ValueError:
            return "-"
        return f"{fitting.parameters:,}"

    stages = [given.stage] if given.stage else STAGES
    rows = [[stage, found(stage, None), found(stage, 1.0) if stage != "0" else "-"] for stage in stages]
    return aligned([["stage", "parameters", "offloaded"], *rows])


def _show(given: argparse.Namespace, result: Plan, title: str) -> None:
    if given.trace:
        write_trace(result, given.trace)
    if given.json:
        print(result.to_json())
        return
    missing = "--batch" if given.model else "--tokens"
    without = "" if result.activations else f"; activations not counted ({missing})"
    print(f"{title}, {given.optimizer}, {given.precision}; {result.unit} a rank and step{without}\n")
    print(result.table() + "\n")
    if result.timings:
        print(f"steps on {given.hardware}\n\n{result.times()}\n")
    for world in result.worlds:
        print(result.why(world))


def _read(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m zero.plan", description="What every stage would cost a rank, and which to take.", allow_abbrev=False
    )
    add = parser.add_argument
    how = "a function that builds the model"
    add("model", nargs="?", metavar="MODULE:FACTORY", help=f"{how}, called on the meta device")
    how = "instead of a model: a GPT of so many parameters, such as 350M, 7B or 7e9 ..."
    add("--parameters", type=_count, metavar="N", help=how)
    add("--layers", type=int, metavar="N", help="... of so many blocks (default: by its size)")
    add("--world", type=_worlds, metavar="N,N", default=[8], help="numbers of ranks (default: 8)")
    add("--memory", type=_size, metavar="SIZE", help="what a rank has, such as 80GiB")
    how = "of torch.optim, or MODULE:CLASS for one of your own"
    add("--optimizer", default="AdamW", metavar="NAME", help=f"{how} (default: AdamW)")
    how = "parameters in float32, in bfloat16, or computed in bfloat16 with float32 masters (mixed)"
    add("--precision", choices=PRECISIONS, default="float32", help=f"{how} (default: %(default)s)")
    add("--partition", choices=("auto", "even", "whole"), default="auto", help="where parameters are cut")
    how = "how far ahead FSDP gathers units, and how many are in flight at once"
    add("--prefetch", choices=PREFETCHES, default="default", help=f"{how} (default: %(default)s)")
    add("--backend", choices=("nccl", "gloo"), default="nccl", help="of the process group (default: %(default)s)")
    how = "with gloo: all ranks run on one Linux host, and read one another's memory"
    add("--one-host", action="store_true", help=how)
    how = "stages from 1 on with what is stepped in the memory of the host; RATIO: a share of it up to 1, or"
    how += " 'least': what has to be there for stage 2, or --stage, to fit into --memory"
    add("--offload", nargs="?", type=_share, const=1.0, metavar="RATIO", help=how)
    how = "of the host that a rank has, for --offload least and --largest"
    add("--host-memory", type=_size, metavar="SIZE", help=how)
    add("--stage", choices=STAGES, help="plan only this one")
    how = "instead of a model: find the largest GPT that fits into --memory at each stage, with and without offload"
    add("--largest", action="store_true", help=how)
    how = "measure a step's activations: the forward's arguments, such as 2x1024:int64,2x1024:int64"
    add("--batch", type=_batch, metavar="SHAPE:DTYPE,...", help=how)
    add("--json", action="store_true", help="print JSON")
    add("--hardware", metavar="NAME", help="time steps, too: h100-8, a100-8, cpu, or a TOML file")
    how = "of a rank's step. With --parameters its activations are measured; otherwise it is timed without a batch"
    add("--tokens", type=int, metavar="N", help=how)
    how = "write when what is computed and sent, as Chrome trace events, for ui.perfetto.dev"
    add("--trace", type=Path, metavar="FILE", help=how)
    given = parser.parse_args(arguments)
    if sum((given.model is not None, given.parameters is not None, given.largest)) != 1:
        parser.error("give either a model, as module:factory, or --parameters, or --largest")
    if given.largest and (given.memory is None or len(given.world) > 1):
        parser.error("--largest needs --memory, and one number of ranks")
    if given.offload == 0 and (given.memory is None or len(given.world) > 1):
        parser.error("--offload least needs --memory, and one number of ranks")
    if given.host_memory is not None and given.offload != 0 and not given.largest:
        parser.error("--host-memory is for --offload least and --largest")
    return given


def _share(text: str) -> float:
    """0 for the least that has to be offloaded."""
    try:
        return 0.0 if text == "least" else zero.CPUOffload(ratio=float(text)).ratio
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a share above 0, up to 1, nor 'least'") from None


def _named(text: str) -> Any:
    module, _, name = text.partition(":")
    if not module or not name:
        raise ValueError(f"{text!r} is not of the form package.module:name.")
    try:
        return attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{text!r} was not found: {error}.") from error


def _built(text: str) -> Any:
    factory = _named(text)
    if not callable(factory):
        raise ValueError(f"{text!r} is a {type(factory).__name__}, not a function that builds a model.")
    if problem := misfit(factory):
        raise ValueError(f"{text!r} takes arguments ({problem}). Name a function that builds the model without.")
    with torch.device("meta"):
        return factory()


def _optimizer(text: str) -> Any:
    if ":" in text:
        return _named(text)
    base = torch.optim.Optimizer
    known = sorted(n for n, o in vars(torch.optim).items() if isinstance(o, type) and issubclass(o, base) and o != base)
    if text not in known:
        raise ValueError(f"{text!r} is no optimizer of torch.optim: {', '.join(known)}. Or write MODULE:CLASS.")
    return getattr(torch.optim, text)


def _worlds(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _count(text: str) -> float:
    match = re.fullmatch(r"([0-9.]+(?:[eE]\+?[0-9]+)?)([KMBT]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of parameters; write it like 350M, 1.3B or 7e9")
    return float(match[1]) * COUNTS[match[2]]


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9.]+)\s*([A-Za-z]*)", text)
    if match is None or match[2] not in UNITS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; write it like 80GiB, with one of {', '.join(filter(None, UNITS))}"
        )
    return round(float(match[1]) * UNITS[match[2]])


def _batch(text: str) -> list[Tensor]:
    tensors = []
    for one in text.split(","):
        shape, _, name = one.partition(":")
        dtype = getattr(torch, name or "float32", None)
        if not isinstance(dtype, torch.dtype) or not re.fullmatch(r"\d+(x\d+)*", shape):
            raise argparse.ArgumentTypeError(f"{one!r} is no tensor; write its shape and dtype, such as 2x1024:int64")
        tensors.append(torch.empty([int(n) for n in shape.split("x")], dtype=dtype, device="meta"))
    return tensors
