"""The command line of the planner."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from zero.fsdp import MixedPrecision
from zero.offload import CPUOffload
from zero.plan.gpt import GPT, LENGTH, batch_of, gpt_of
from zero.plan.planner import plan
from zero.plan.rehearsal import misfit
from zero.plan.result import Plan
from zero.plan.sizes import Options
from zero.plan.stages import STAGES

PRECISIONS = {
    "float32": (torch.float32, MixedPrecision()),
    "bfloat16": (torch.bfloat16, MixedPrecision()),
    "mixed": (torch.float32, MixedPrecision(param_dtype=torch.bfloat16)),
}
PREFETCHES = {"memory-first": 1, "default": None, "speed-first": 3}
COUNTS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def main(arguments: Sequence[str] | None = None) -> None:
    given = _read(arguments)
    try:
        _show(given, *_planned(given))
    except (ValueError, RuntimeError) as error:
        sys.exit(f"zero.plan: {error}")


def _planned(given: argparse.Namespace) -> tuple[Plan, str]:
    """The plan, and what it is of."""
    dtype, precision = PRECISIONS[given.precision]
    if given.model:
        model = _built(given.model)
        model = model.to(dtype) if isinstance(model, nn.Module) else model
    else:
        model = gpt_of(given.parameters, given.layers, dtype)
    options = Options(
        partition=given.partition,
        precision=precision,
        backend=given.backend,
        one_host=given.one_host,
        offload=None if given.offload is None else CPUOffload(ratio=given.offload),
    )
    result = plan(
        model,
        world_size=given.world,
        optimizer=_optimizer(given.optimizer),
        memory=given.memory,
        batch=batch_of(given.tokens) if given.tokens else given.batch,
        prefetch=PREFETCHES[given.prefetch],
        options=options,
        stages=given.stage and [given.stage],
    )
    title = f"{result.parameters:,} parameters"
    return result, f"{title} ({model.shape})" if isinstance(model, GPT) else title


def _show(given: argparse.Namespace, result: Plan, title: str) -> None:
    if given.json:
        print(result.to_json())
        return
    counted = f"{given.tokens:,} tokens a rank (--tokens)" if given.tokens else "activations not counted (--batch)"
    counted = "" if given.batch else f"; {counted}"
    print(f"{title}, {given.optimizer}, {given.precision}; {result.unit} a rank and step{counted}\n")
    print(result.table() + "\n")
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
    add("--tokens", type=_positive, metavar="N", help=f"... whose step has so many tokens a rank (default: {LENGTH})")
    how = "measure the model's activations: the forward's arguments, such as 2x1024:int64,2x1024:int64"
    add("--batch", type=_batch, metavar="SHAPE:DTYPE,...", help=how)
    add("--world", type=_worlds, metavar="N,N", default=[8], help="numbers of ranks (default: 8)")
    add("--memory", type=_size, metavar="SIZE", help="what a rank has, such as 80GiB")
    how = "of torch.optim, or MODULE:CLASS for one of your own"
    add("--optimizer", default="AdamW", metavar="NAME", help=f"{how} (default: AdamW)")
    how = "parameters in float32, in bfloat16, or computed in bfloat16 with float32 masters (mixed)"
    add("--precision", choices=PRECISIONS, default="float32", help=f"{how} (default: %(default)s)")
    add("--partition", choices=("auto", "even", "whole"), default="auto", help="where parameters are cut")
    how = "how far ahead FSDP gathers units, and how many are in flight at once"
    add("--prefetch", choices=PREFETCHES, default="default", help=f"{how} (default: %(default)s)")
    how = "of the process group: on GPUs, or on CPUs (default: %(default)s)"
    add("--backend", choices=("nccl", "gloo"), default=Options.backend, help=how)
    how = "with gloo: all ranks run on one Linux host, and read one another's memory"
    add("--one-host", action="store_true", help=how)
    how = "what is stepped at stages from 1 on, or this share of it, is in the memory of the host (default: all)"
    add("--offload", nargs="?", type=_share, const=1.0, metavar="RATIO", help=how)
    add("--stage", choices=STAGES, help="plan only this one")
    add("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    if (given.model is None) == (given.parameters is None):
        parser.error("give either a model, as module:factory, or --parameters")
    if given.model is not None and given.tokens:
        parser.error("--tokens are of --parameters; give a model's forward its arguments by --batch")
    if given.parameters is not None and given.batch:
        parser.error("--batch is of a model; with --parameters give --tokens")
    if given.parameters is not None:
        given.tokens = given.tokens or LENGTH
    return given


def _share(text: str) -> float:
    try:
        return CPUOffload(ratio=float(text)).ratio
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no share above 0, up to 1") from None


def _positive(text: str) -> int:
    if not re.fullmatch(r"0*[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 up")
    return int(text)


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
