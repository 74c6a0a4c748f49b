"""Copies beside the computing: what is ordered after what."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from streams import noted_streams
from zero.oss import lane

CPU = torch.device("cpu")


@pytest.fixture
def streams() -> Any:
    with noted_streams() as streams:
        yield streams


def test_what_is_launched_in_a_lane_comes_after_what_was_computed_and_before_what_is_computed_after_join(streams):
    used = lane.lane_of(CPU)
    with used:
        streams.note("copy")
    streams.note("product")
    used.join()
    streams.note("sum")
    assert streams.notes == [
        "lane after computing",
        "copy in lane",
        "product in computing",
        "computing after lane",
        "sum in computing",
    ]


def test_the_host_waits_once_for_what_it_is_brought(streams):
    used = lane.lane_of(CPU)
    used.wait()
    assert streams.notes == []
    with mock.patch.object(Tensor, "record_stream", create=True) as record_stream:
        brought = used.bring(torch.ones(3), torch.zeros(3))
    assert [call.args[0].name for call in record_stream.call_args_list] == ["lane"]
    used.wait()
    used.wait()
    assert streams.notes == ["lane after computing", "event in lane", "host waits"]
    assert brought.tolist() == [1, 1, 1]


def test_on_the_cpu_copies_are_made_at_once():
    used = lane.lane_of(CPU)
    with used:
        copy = torch.ones(2).clone()
    used.join()
    used.wait()
    assert copy.tolist() == [1, 1]
    assert lane.lane_of(CPU) is used
