"""python -m zero.checkpoint export | inspect"""

from __future__ import annotations

import argparse
import re
import sys

import torch

from zero.checkpoint import storage
from zero.checkpoint.export import SHARD_SIZE, export
from zero.checkpoint.files import Source
from zero.checkpoint.format import all_of, decode, under
from zero.checkpoint.storage import Place, place

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m zero.checkpoint")
    commands = parser.add_subparsers(dest="command", required=True)
    out = commands.add_parser("export", help="write it for other libraries")
    out.add_argument("path", metavar="DIR", help="a run's directory (its latest checkpoint), or one checkpoint's")
    out.add_argument("out", metavar="OUT", help="directory to write to")
    size = "such as 5GB, the default"
    libraries = "files of Hugging Face's libraries, or of torch.distributed.checkpoint with the optimizers' state"
    out.add_argument("--to", choices=("hf", "dcp"), default="hf", help=libraries)
    out.add_argument("--max-shard-size", type=_size, default=SHARD_SIZE, metavar="SIZE", help=size)
    out.add_argument("--dtype", choices=_DTYPES, help="as stored by default")
    show = commands.add_parser("inspect", help="print what is inside")
    show.add_argument("path", metavar="DIR")
    show.add_argument("--tensors", action="store_true", help="every tensor")
    show.add_argument("--check", action="store_true", help="compare all checksums")
    options = parser.parse_args(arguments)
    try:
        if options.command == "inspect":
            _inspect(place(options.path), tensors=options.tensors, check=options.check)
        else:
            size, dtype = options.max_shard_size, _DTYPES.get(options.dtype)
            for file in export(options.path, options.out, to=options.to, max_shard_size=size, dtype=dtype):
                print(file)
    except (ValueError, OSError, ImportError) as error:  # ImportError: the URL's driver is not installed
        print(f"{options.command}: {error}", file=sys.stderr)
        return 1
    return 0


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if match is None or match[2].upper() not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size. Write it as 5GB or 500MiB.")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _inspect(path: Place, *, tensors: bool, check: bool) -> None:
    found = storage.resolve(path)
    with Source(found) as source:
        index = source.index
        by, using, at = (index.saved.get(key) for key in ("by", "torch", "at"))
        told = f", {at}, by zero {by} and torch {using}" if index.saved else ""
        print(f"{found}: saved at stage {index.stage} on {index.world} ranks{told}")
        for kind in ["model", "master", "optimizer"]:
            of_kind = [entry.geometry for entry in under(f"{kind}/", index.tensors).values()]
            elements, nbytes = sum(one.numel for one in of_kind), sum(one.numel * one.dtype.itemsize for one in of_kind)
            print(f"  {kind}: {len(of_kind)} tensors, {elements:,} elements, {nbytes:,} bytes")
        if index.left_out:
            elements = sum(one.numel for one in index.left_out.values())
            print(f"  left out: {len(index.left_out)} frozen parameters, {elements:,} elements")
        for name, stored_as in index.tied.items():
            print(f"  tied: {name} is {stored_as}")
        for optimizer in index.optimizers:
            for number, group in enumerate(optimizer["groups"]):
                options = ", ".join(f"{key}={value}" for key, value in decode(group["options"]).items())
                print(f"  {optimizer['kind']}, group {number}: {len(group['params'])} parameters, {options}")
        extra = sorted({*index.extra, *(key for one in index.extra_by_rank for key in one)})
        print(f"  extra: {', '.join(extra) or 'none'}")
        for path_in, entry in index.tensors.items() if tensors else ():
            print(f"  {path_in}: {entry.geometry}, {len(entry.shards)} shards")
        for name, full in index.left_out.items() if tensors else ():
            print(f"  model/{name}: {full}, left out")
        if check:
            source.check(((entry, all_of(entry.geometry)) for entry in index.tensors.values()), shown=True)
            print("  every byte is as it was written")


if __name__ == "__main__":
    sys.exit(main())
