"""Gradients changed between backward and step: what scales each rank's by itself is noticed, all else let through."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import ranks
import zero
from sidebyside import data, sgd

WIDTH = 16


def train(rank: int, world: int, change: Callable[[zero.FSDP, int], object], partition: str = "even") -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    model = zero.FSDP(nn.Sequential(*blocks, nn.Linear(WIDTH, 5)), partition=partition)
    optimizer = sgd(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        model(data(4, WIDTH, rank=rank, step=step)).square().mean().backward()
        change(model, rank)
        optimizer.step()


def clip_parts(model: zero.FSDP, rank: int) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def clip_parts_on_one_rank(model: zero.FSDP, rank: int) -> None:
    if rank:
        clip_parts(model, rank)


@pytest.mark.parametrize(
    ("change", "partition"),
    [(clip_parts, "even"), (clip_parts, "whole"), (clip_parts_on_one_rank, "even")],
)
def test_clipping_each_ranks_part_by_its_own_norm_is_refused_on_every_rank(change, partition):
    words = ["scaled differently", r"clip_grad_norm_\(max_norm\) of the FSDP"]
    ranks.expect_error(train, 2, RuntimeError, *words, args=(change, partition), timeout=15)


def clip_all(model: zero.FSDP, rank: int) -> None:
    model.clip_grad_norm_(1e-3)


def scale_alike(model: zero.FSDP, rank: int) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.div_(1024)


def clip_values(model: zero.FSDP, rank: int) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def normalise_each(model: zero.FSDP, rank: int) -> None:
    for param in model.parameters():
        if param.grad is not None and param.grad.numel():
            param.grad.div_(param.grad.norm())


def replace(model: zero.FSDP, rank: int) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad = param.grad * (1 + rank)


def add_noise(model: zero.FSDP, rank: int) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad += 0.01 * torch.randn_like(param.grad)


OWN = [clip_all, scale_alike, clip_values, add_noise]


@pytest.mark.parametrize(
    ("change", "partition"),
    [*((change, "even") for change in OWN), *((change, "whole") for change in (*OWN, normalise_each, replace))],
)
def test_other_changes_are_the_users_own(change, partition):
    ranks.run(train, args=(change, partition))


@pytest.mark.parametrize("change", [normalise_each, replace])
def test_a_parameter_that_is_cut_must_be_scaled_by_one_number(change):
    ranks.expect_error(train, 2, RuntimeError, "scaled differently", args=(change, "even"), timeout=15)
