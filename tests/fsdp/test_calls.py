"""How many functions of zero a unit costs on its way from shard to full, and its gradients on theirs to the owner.

Checks and features are left out: their lists are empty. On the second way the next unit's gather begins as well. The
bounds are those of Gloo between hosts, on a CPU: they may fall.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import ranks
import zero
from transports import between_hosts
from zero.fsdp import events

PACKAGE = f"{Path(zero.__file__).parent}{os.sep}"
UNSHARD, REDUCE = ("_pre_forward", "fsdp/schedule.py"), ("post_backward", "fsdp/backward.py")
"""Where the two ways begin."""


class Calls:
    """The functions of zero that are called while one that is told runs. It ends with the function in `until`."""

    def __init__(self, first: tuple[str, str], until: str) -> None:
        self._first, self._until = first, until
        self._depth = 0
        self.found: list[str] = []

    def note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return
        here = code.co_name, code.co_filename.removeprefix(PACKAGE)
        if event == "call" and (self._depth or here == self._first) and not self.ended:
            self._depth += 1
            if not here[0].startswith("<"):  # a comprehension
                self.found.append(f"{here[1]} {code.co_qualname}")
        elif event == "return" and here == self._first:
            self._depth = 0

    @property
    def ended(self) -> bool:
        return bool(self.found) and self.found[-1].endswith(self._until)


def calls(rank: int, world: int) -> tuple[list[str], list[str]]:
    with between_hosts(), mock.patch.object(events, "makers", []), mock.patch("zero.fsdp.model.makers", []):
        layers = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        model = zero.FSDP(layers, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        for _ in range(3):
            ways = Calls(UNSHARD, "ShardGroup._bind"), Calls(REDUCE, "UnitGradients.receive")
            inputs = torch.ones(3, 4, requires_grad=True) * 1  # as of a module before

            def both(*args: Any, ways: Any = ways) -> None:
                for way in ways:
                    way.note(*args)

            hidden = model.module[0](inputs)
            sys.setprofile(ways[0].note)
            loss = model.module[1](hidden).sum()
            sys.setprofile(ways[1].note)
            loss.backward()
            sys.setprofile(None)
    return ways[0].found, ways[1].found


def test_a_unit_is_unsharded_and_its_gradients_reduced_by_few_functions():
    unshard, reduce = ranks.run(calls)[0]
    assert unshard[-1].endswith("ShardGroup._bind") and reduce[-1].endswith("UnitGradients.receive")
    assert len({*unshard}) <= 54, unshard
    assert len({*reduce}) <= 89, reduce
