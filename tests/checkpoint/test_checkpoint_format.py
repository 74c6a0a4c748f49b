"""What the index tells, and what it may have that this version does not know."""

import re
import time
from datetime import datetime

import pytest
import torch
from saved import change_index, differences, tiny, train, with_adam

import zero
from commands import command


def later(told):
    """As a later zero may write it."""
    told["mesh"] = {"dims": [2, 2]}
    for table in ("tensors", "files"):
        for entry in told[table].values():
            entry["compressed"] = False
    for entry in told["tensors"].values():
        entry["shards"] = [{**shard, "sum": 7} for shard in entry["shards"]]
    for optimizer in told["optimizers"]:
        optimizer["fused"] = True
        optimizer["groups"] = [{**group, "name": "decayed"} for group in optimizer["groups"]]


@pytest.mark.parametrize("resign", [True, False])
def test_entries_that_are_not_known_are_left_out_under_the_digest(resign, tmp_path):
    model, optimizer = with_adam(tiny())
    expected = train(model, optimizer)
    saved = zero.checkpoint.save(tmp_path, model, optimizer, extra={"step": 1}).path
    change_index(saved, later, resign=resign)
    other, stepped = with_adam(tiny())
    if not resign:
        with pytest.raises(zero.checkpoint.CheckpointError, match=r"index\.json .*altered"):
            zero.checkpoint.load(tmp_path, other, stepped)
        return
    assert zero.checkpoint.load(tmp_path, other, stepped) == {"step": 1}
    assert not differences(expected, dict(other.state_dict()))
    assert command("zero.checkpoint", "inspect", tmp_path, "--check") == 0


def test_the_index_says_which_versions_wrote_it_and_when(tmp_path, capsys):
    before = time.time()
    zero.checkpoint.save(tmp_path, tiny())
    command("zero.checkpoint", "inspect", tmp_path)
    found = re.search(
        rf"at stage 0 on 1 ranks, (\S+), by zero {zero.__version__} and torch {re.escape(torch.__version__)}$",
        capsys.readouterr().out.splitlines()[0],
    )
    assert before - 1 < datetime.fromisoformat(found[1]).timestamp() < time.time() + 1


def test_an_index_that_does_not_say_who_wrote_it_is_read(tmp_path, capsys):
    saved = zero.checkpoint.save(tmp_path, tiny()).path
    change_index(saved, lambda told: told.pop("saved"))
    zero.checkpoint.load(tmp_path, tiny())
    command("zero.checkpoint", "inspect", tmp_path)
    assert capsys.readouterr().out.splitlines()[0] == f"{saved}: saved at stage 0 on 1 ranks"
