"""What offload keeps beside the numbers of training (tests/parity/test_axes.py): master weights, checkpoints,
errors on every rank."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import ranks
import zero
from assertions import same_where_the_cpu_steps
from runs import stage_2, take_step
from zoo import CASES

CASE = CASES["wide"]
adamw = partial(AdamW, lr=1e-2)


def step(pair: tuple[nn.Module, Any], rank: int, number: int) -> float:
    model, optimizer = pair
    dtype = next(model.parameters()).dtype
    (inputs,) = CASE.batch(rank, number).inputs
    return take_step(optimizer, model(inputs.to(dtype)).float().square().mean())


@pytest.mark.parametrize("where", ["cpu", "disk"])
@ranks.on(2)
def test_parameters_of_16_bits_are_stepped_as_float32(rank, world, tmp_path, where):
    """What is stepped is float32, unless another dtype is asked for."""
    offload = zero.CPUOffload() if where == "cpu" else zero.DiskOffload(tmp_path)
    pairs = [
        stage_2(CASE.model().bfloat16(), adamw, **options) for options in ({"offload": offload}, {"precision": "bf16"})
    ]
    for number in range(3):
        for pair in pairs:
            step(pair, rank, number)
        same_where_the_cpu_steps(*(zero.full_state_dict(model, to=None) for model, _ in pairs), f"step {number}")
    states = [zero.full_optimizer_state_dict(*pair, to=None)["state"] for pair in pairs]
    assert states[0][0]["master"].dtype is torch.float32
    same_where_the_cpu_steps(*states, "the full state")
    assert not list(tmp_path.iterdir()), "files have no names, and are gone with the processes"


@ranks.on(2)
def test_at_stage_3_an_optimizer_may_have_parameters_that_are_not_sharded(rank, world, tmp_path):
    """Its step is one step for them, and for its hooks, however many pieces of files it steps."""
    outside, steps = nn.Parameter(torch.ones(3)), list[int]()
    model = zero.FSDP(nn.Linear(5, 5), offload=zero.DiskOffload(tmp_path))
    optimizer = SGD([*model.parameters(), outside], lr=0.1, momentum=0.9)
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    for _ in range(3):
        take_step(optimizer, model(torch.ones(2, 5)).sum() + outside.sum())
    assert len(steps) == 3
    assert outside.tolist() == pytest.approx([1 - 0.1 * (1 + 1.9 + 2.71)] * 3)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2)])
@ranks.on(2)
def test_checkpoints_go_from_files_to_memory_and_back(rank, world, tmp_path, before, after):
    pairs = {
        before: zero.setup(CASE.model(), adamw, stage=before, offload=zero.DiskOffload(tmp_path / "shards")),
        after: zero.setup(CASE.model(), adamw, stage=after),
    }
    for source, target in ((before, after), (after, before)):
        step(pairs[source], rank, 0)
        zero.checkpoint.save(tmp_path / f"from {source}", *pairs[source])
        zero.checkpoint.load(tmp_path / f"from {source}", *pairs[target])
        for number in range(2, 4):
            losses = (torch.tensor(step(pair, rank, number)) for pair in pairs.values())
            same_where_the_cpu_steps(*losses, f"from {source}: loss {number}")


@pytest.mark.parametrize("ratio", [0, -1, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(ratio):
    with pytest.raises(ValueError, match="ratio="):
        zero.CPUOffload(ratio=ratio)


@pytest.mark.parametrize("stage", [2, 3])
@ranks.raises(2, ValueError, "no room", r"rank 1")
def test_a_directory_that_cannot_be_used_is_refused_on_every_rank(rank, world, tmp_path, stage):
    (tmp_path / "file").write_text("in the way")
    path = tmp_path / "file" if rank else tmp_path
    zero.setup(nn.Linear(3, 3), SGD, stage=stage, lr=0.1, offload=zero.DiskOffload(path))


@pytest.mark.parametrize(
    ("given", "words"),
    [(None, ("offload DiskOffload", "on the device")), ("cpu", ("offload='cpu'", "zero.CPUOffload", "rank 1"))],
)
@ranks.raises(2, ValueError)
def test_ranks_with_another_offload_or_one_that_is_none_are_refused_on_every_rank(rank, world, tmp_path, given, words):
    offload: Any = given if rank else zero.DiskOffload(tmp_path)
    zero.setup(nn.Linear(3, 3), SGD, stage=2, lr=0.1, offload=offload)
