"""Trainers that go on from checkpoints of which a file is missing, or that transformers' FSDP Trainer has saved."""

import re
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trainers import build, losses, same, weights

import ranks
from launched import launched

if find_spec("transformers") is None or find_spec("accelerate") is None:
    pytest.skip("needs transformers and accelerate", allow_module_level=True)

pytestmark = [
    pytest.mark.slow,
    # It is the device of ranks without a GPU.
    pytest.mark.filterwarnings("ignore:.pin_memory. argument is set as true:UserWarning"),
]

BY_NAME = "by name.bin"


def saving(folder: Path) -> Any:
    """transformers' own Trainer, which has saved after two steps of four, and the state also as with FSDP."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
    from transformers import TrainerCallback

    class AlsoByName(TrainerCallback):
        def on_save(self, _: Any, state: Any, *__: Any, model: Any, optimizer: Any, **___: Any) -> None:
            whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
            if state.global_step == 2 and dist.get_rank() == 0:
                torch.save(get_optimizer_state_dict(model, optimizer.optimizer, options=whole), folder / BY_NAME)

    trainer = build(0, str(folder), save_strategy="steps", save_steps=2)
    trainer.add_callback(AlsoByName())
    trainer.train()
    return trainer


def lacks(*names: str) -> Callable[[Path], None]:
    return lambda folder: [Path(folder, name).unlink() for name in names]  # type: ignore[return-value]


def of_fsdp(folder: Path) -> None:
    lacks("optimizer.pt")(folder)
    shutil.copy(folder.parent / "saved" / BY_NAME, folder / "optimizer.bin")


def of_fsdp_in_shards(folder: Path) -> None:
    lacks("optimizer.pt", "model.safetensors")(folder)
    for name in ("optimizer_0", "pytorch_model_fsdp_0"):
        Path(folder, name).mkdir()


def of_fsdp_but_weights(folder: Path) -> None:
    lacks("optimizer.pt")(folder)
    Path(folder, "optimizer_0").mkdir()


def of_another_model(folder: Path) -> None:
    lacks("optimizer.pt")(folder)
    state = torch.load(folder.parent / "saved" / BY_NAME, weights_only=True)
    state["param_groups"][0]["params"][0] = "another.weight"
    torch.save(state, folder / "optimizer.bin")


def torn(folder: Path) -> None:
    """Another one's shards are left out of the copy."""
    torch.save({"in": "zero"}, folder / "optimizer.pt")


GOES_ON = "goes on"
AS_ALONE = "as transformers alone"
FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "whole": (lambda folder: None, GOES_ON),
    "of FSDP": (of_fsdp, GOES_ON),
    "of FSDP, in shards": (of_fsdp_in_shards, "accelerate merge-weights .*pytorch_model_fsdp_0"),
    "of FSDP, optimizer in shards": (of_fsdp_but_weights, "FULL_STATE_DICT.*remove it and scheduler.pt"),
    "of FSDP, of another model": (of_another_model, "optimizer.bin.*another.weight"),
    "no optimizer": (lacks("optimizer.pt"), "scheduler.pt has no optimizer.pt beside it.*or remove it"),
    "no schedule": (lacks("scheduler.pt"), "optimizer.pt has no scheduler.pt beside it.*or remove it"),
    "neither": (lacks("optimizer.pt", "scheduler.pt"), AS_ALONE),
    "no generators": (lacks("rng_state_0.pth", "rng_state_1.pth"), AS_ALONE),
    "no weights": (lacks("model.safetensors"), "has no model.safetensors"),
    "shards elsewhere": (torn, "no zero with shards"),
}


@ranks.on(2, timeout=100)
def test_a_folder_goes_on_or_is_refused_on_every_rank_before_training(rank, world, tmp_path):
    with launched(rank, world):
        whole = saving(tmp_path / "saved")
        whole_losses, whole_weights = losses(whole)[2:], weights(whole)
    for kind, (change, wanted) in FOLDERS.items():
        folder, expected, expected_weights = tmp_path / kind, whole_losses, whole_weights
        dist.barrier()
        if rank == 0:
            shutil.copytree(tmp_path / "saved" / "checkpoint-2", folder)
            change(folder)
        dist.barrier()
        if wanted == AS_ALONE:
            with launched(rank, world):
                alone = build(0, str(tmp_path / "alone"))
                alone.train(resume_from_checkpoint=str(folder))
                expected, expected_weights = losses(alone)[2:], weights(alone)
        for stage in (1, 2, 3):
            with launched(rank, world), warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                trainer = build(stage, str(tmp_path / "again"))
                error = ranks.refusal(partial(trainer.train, resume_from_checkpoint=str(folder)))
                if wanted in (GOES_ON, AS_ALONE):
                    assert not error and losses(trainer)[2:] == expected, (kind, stage, error)
                    assert same(weights(trainer), expected_weights), (kind, stage)
                else:
                    assert re.search(wanted, error) and not trainer.state.log_history[2:], (kind, stage, error)
                anew = [str(one.message) for one in told if "begin anew" in str(one.message)]
                assert len(anew) == (kind == "neither"), (kind, stage, anew)
