"""How many functions of zero a unit costs on its way from shard to full, and its gradients on theirs to the owner.

Checks and features are left out: their lists are empty. The second way launches the reduction of
one unit, and finishes that of the unit before. The bounds are what Gloo between hosts takes on a CPU: lower them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType
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
    """The functions of zero that the last call of one function runs. until: the last one that counts."""

    def __init__(self, first: tuple[str, str], until: str = "none") -> None:
        self._first, self._until = first, until
        self._frame: FrameType | None = None
        self.found: list[str] = []

    def note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return
        here = code.co_name, code.co_filename.removeprefix(PACKAGE)
        if event == "call" and here == self._first and self._frame is None:
            self._frame = frame
            self.found.clear()
        if event == "call" and self._frame is not None and not here[0].startswith("<") and not self._ended:
            self.found.append(f"{here[1]} {code.co_qualname}")
        elif event == "return" and frame is self._frame:
            self._frame = None

    @property
    def _ended(self) -> bool:
        return bool(self.found) and self.found[-1].endswith(self._until)


def calls(rank: int, world: int) -> tuple[list[str], list[str]]:
    """Of the step with fewest: where the other rank is late, more functions wait."""
    with between_hosts(), mock.patch.object(events, "model_events", []), mock.patch("zero.fsdp.model.model_events", []):
        layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
        model = zero.FSDP(layers, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        steps = []
        for _ in range(5):
            ways = Calls(UNSHARD, "ShardGroup._bind"), Calls(REDUCE)
            inputs = torch.ones(3, 4, requires_grad=True) * 1  # as of a module before
            model.zero_grad()
            sys.setprofile(ways[0].note)
            loss = model(inputs).sum()
            sys.setprofile(ways[1].note)
            loss.backward()
            sys.setprofile(None)
            steps.append((ways[0].found, ways[1].found))
    return min(steps[2:], key=lambda found: len({*found[0]}) + len({*found[1]}))


def test_a_unit_is_unsharded_and_its_gradients_reduced_by_few_functions():
    unshard, reduce = ranks.run(calls)[0]
    assert unshard[-1].endswith("ShardGroup._bind") and any(name.endswith("GradBucket._add") for name in reduce)
    assert len({*unshard}) <= 28, unshard
    assert len({*reduce}) <= 49, reduce
