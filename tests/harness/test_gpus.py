"""What `make gpu` rests on, without a GPU."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch

import gpus


@pytest.fixture
def two_gpus(monkeypatch):
    """As if this machine had two. Returns what is called of torch to choose among them."""
    chosen = mock.Mock()
    monkeypatch.setattr(gpus, "ON", True)
    monkeypatch.setattr(gpus, "DEVICE", "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.set_device)
    monkeypatch.setattr(torch, "set_default_device", chosen.set_default_device)
    with mock.patch.dict(os.environ):
        yield chosen


def test_ranks_take_gpus_in_turns_and_more_ranks_than_gpus_pose_as_hosts(two_gpus):
    gpus.take(3)
    assert two_gpus.mock_calls == [mock.call.set_device(1), mock.call.set_default_device("cuda:1")]
    assert os.environ["LOCAL_RANK"] == "1"
    assert [gpus.shared(world) for world in (1, 2, 3)] == [False, False, True]
    gpus.pose_as_a_host()
    assert str(os.getpid()) in os.environ["NCCL_HOSTID"]
    assert (os.environ["NCCL_SOCKET_IFNAME"], os.environ["NCCL_IB_DISABLE"]) == ("lo", "1")


def test_without_a_gpu_the_tests_say_so(two_gpus, monkeypatch):
    assert gpus.problem() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "finds no GPU on this machine" in str(gpus.problem())
    monkeypatch.setattr(gpus, "DEVICE", "tpu")
    assert "choose cpu or cuda" in str(gpus.problem())


@pytest.mark.skipif(gpus.ON, reason="runs on a GPU")
def test_without_the_switch_nothing_changes():
    before = torch.get_default_device()
    gpus.take(1)
    assert torch.get_default_device() == before
    assert (gpus.BACKEND, gpus.PATIENCE, gpus.shared(100), gpus.problem()) == ("gloo", 1, False, None)
    assert torch.equal(torch.rand(3, generator=gpus.generator(5)), torch.rand(3, generator=torch.manual_seed(5)))
