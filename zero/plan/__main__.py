"""`python -m zero.plan`: the command line of the planner."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from functools import partial
from pkgutil import resolve_name
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero.offload import CPUOffload
from zero.plan.gpt import GPT, LENGTH, batch_of, gpt_of
from zero.plan.planner import plan
from zero.plan.rehearsal import refuse_misfit
from zero.plan.result import UNITS, number_in

PRECISIONS: dict[str, tuple[torch.dtype, Literal["bf16"] | None]] = {
    "fp32": (torch.float32, None),
    "bf16": (torch.float32, "bf16"),
    "pure-bf16": (torch.bfloat16, None),
}
COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m zero.plan", description="What every stage would cost a rank, and which to take.", allow_abbrev=False
    )
    add = parser.add_argument
    add("model", nargs="?", metavar="MODULE:FACTORY", help="a function that builds it, called on the meta device")
    a_gpt = "instead of a model: a GPT of so many parameters, such as 350M, 7B or 7e9 ..."
    add("--parameters", type=partial(_in, COUNTS), metavar="N", help=a_gpt)
    add("--layers", type=_count, metavar="N", help="... of so many blocks (default: by its size)")
    add("--tokens", type=_count, metavar="N", help=f"... whose step has so many tokens a rank (default: {LENGTH})")
    arguments = "the forward's arguments, to measure activations, such as 2x1024:int64,2x1024:int64"
    add("--batch", type=_batch, metavar="SHAPE:DTYPE,...", help=arguments)
    ranks = "numbers of ranks (default: 8)"
    add("--world", type=lambda text: [*map(int, text.split(","))], metavar="N,N", default=[8], help=ranks)
    add("--memory", type=partial(_in, UNITS), metavar="SIZE", help="what a rank has, such as 80GiB")
    one = "of torch.optim, or MODULE:CLASS for one of your own (default: AdamW)"
    add("--optimizer", default="AdamW", metavar="NAME", help=one)
    dtypes = "as of zero.setup (default: fp32); pure-bf16 has no masters: all that is stored is in bfloat16"
    add("--precision", choices=PRECISIONS, default="fp32", help=dtypes)
    share = "what is stepped at stages from 1 on, or this share of it, is in the memory of the host (default: all)"
    add("--offload", nargs="?", type=float, const=1.0, metavar="RATIO", help=share)
    given = parser.parse_args()
    if (given.model is None) == (given.parameters is None):
        parser.error("give either a model, as module:factory, or --parameters")
    if given.tokens if given.model else given.batch:
        parser.error("--tokens are of --parameters, and --batch is of a model: its forward's arguments")
    if given.model and given.layers:
        parser.error("--layers are of --parameters: a model has its own")
    dtype, precision = PRECISIONS[given.precision]
    if given.model:
        counted = "" if given.batch else "; activations not counted (--batch)"
    elif given.tokens:
        counted = f"; {batch_of(given.tokens)[0].numel():,} tokens a rank"
    else:
        counted = f"; {LENGTH:,} tokens a rank are assumed (--tokens)"
    try:
        if given.model:
            factory = _named(given.model)
            try:
                refuse_misfit(factory)
            except TypeError as error:
                raise ValueError(
                    f"{given.model!r} takes arguments ({error}). Name a function that builds the model without."
                ) from error
            with torch.device("meta"):
                model = factory()
        else:
            model = gpt_of(given.parameters, given.layers, dtype)
        own = ":" in given.optimizer
        optimizer: Any = _named(given.optimizer) if own else getattr(torch.optim, given.optimizer, None)
        known = isinstance(optimizer, type) and issubclass(optimizer, Optimizer) and optimizer is not Optimizer
        if not own and not known:
            raise ValueError(
                f"{given.optimizer!r} is no optimizer of torch.optim. Write one of its names, or MODULE:CLASS."
            )
        result = plan(
            model.to(dtype) if isinstance(model, nn.Module) else model,
            world_size=given.world,
            optimizer=optimizer,
            precision=precision,
            memory=given.memory and round(given.memory),
            batch=given.batch if given.model else batch_of(given.tokens or LENGTH),
            offload=None if given.offload is None else CPUOffload(ratio=given.offload),
        )
    except (ValueError, RuntimeError) as error:
        sys.exit(f"zero.plan: {error}")
    shape = f" ({model.shape})" if isinstance(model, GPT) else ""
    title = f"{result.parameters:,} parameters{shape}, {given.optimizer}, {given.precision}"
    print(f"{title}\n{result.unit} a rank and step{counted}\n")
    print(result.table() + "\n", *(textwrap.fill(result.why(world), 100) for world in result.worlds), sep="\n")


def _named(text: str) -> Any:
    try:
        return resolve_name(text)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{text!r} was not found as package.module:name: {error}.") from error


def _in(units: dict[str, float], text: str) -> float:
    try:
        return number_in(units, text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 up")
    return int(text)


def _batch(text: str) -> list[Tensor]:
    tensors = []
    for one in text.split(","):
        shape, _, name = one.partition(":")
        dtype = getattr(torch, name or "float32", None)
        if not isinstance(dtype, torch.dtype) or not re.fullmatch(r"\d+(x\d+)*", shape):
            raise argparse.ArgumentTypeError(f"{one!r} is no tensor; write its shape and dtype, such as 2x1024:int64")
        tensors.append(torch.empty([*map(int, shape.split("x"))], dtype=dtype, device="meta"))
    return tensors


if __name__ == "__main__":
    main()
