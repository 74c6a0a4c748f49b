"""The scripts of docs/examples, run in the process of a test as torchrun would have started it."""

import os
import sys
from typing import Any
from unittest import mock

import torch.distributed as dist

from processes import ROOT

EXAMPLES = ROOT / "docs" / "examples"


def run_example(name: str, *arguments: object, written: str = "", instead: str = "") -> dict[str, Any]:
    """The names that a script has when it ends. A rank has a process group before; without one there is none.

    written, instead: replaced in its text.
    """
    started = {}
    if dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
        started = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
    source = (EXAMPLES / f"{name}.py").read_text()
    assert written in source
    names: dict[str, Any] = {"__name__": "__main__"}
    with (
        mock.patch.dict(os.environ, {key: str(value) for key, value in started.items()}),
        mock.patch.object(sys, "argv", [name, *map(str, arguments)]),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        exec(compile(source.replace(written, instead), name, "exec"), names)
    return names
