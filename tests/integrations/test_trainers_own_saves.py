"""Trainers that save and load the module inside by themselves, as that of sentence-transformers does."""

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from trainers import build, gpt2, losses, same, weights

import ranks
from launched import launched

if find_spec("transformers") is None or find_spec("accelerate") is None:
    pytest.skip("needs transformers and accelerate", allow_module_level=True)

pytestmark = [
    pytest.mark.slow,
    # It is the device of ranks without a GPU.
    pytest.mark.filterwarnings("ignore:.pin_memory. argument is set as true:UserWarning"),
]


class Around(nn.Module):
    """As a SentenceTransformer: what it saves has other names than it has itself."""

    _keys_to_ignore_on_save = None

    def __init__(self) -> None:
        super().__init__()
        self.first = gpt2()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        found = self.first(input_ids=input_ids, labels=labels)
        return {"loss": found.loss * self.scale.mean(), "logits": found.logits}


def own_trainer() -> Any:
    import transformers

    class OwnTrainer(transformers.Trainer):
        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            if self.args.should_save:
                self.model.first.save_pretrained(output_dir)
                torch.save({"scale": self.model.scale.detach()}, Path(output_dir, "scale.pt"))

        def _load_from_checkpoint(self, checkpoint_path: str) -> None:
            loaded = type(self.model.first).from_pretrained(checkpoint_path)
            self.model.first.load_state_dict(loaded.state_dict())
            with torch.no_grad():
                self.model.scale.copy_(torch.load(Path(checkpoint_path, "scale.pt"), weights_only=True)["scale"])

        def _load_best_model(self) -> None:
            self._load_from_checkpoint(self.state.best_model_checkpoint)

    return OwnTrainer


def passes_on() -> Any:
    import transformers

    class PassesOn(transformers.Trainer):
        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            super()._save(output_dir, state_dict=state_dict)
            if self.args.should_save:
                Path(output_dir, "note.txt").write_text("saved")

    return PassesOn


def at(stage: int, base: Any, folder: Path, **options: Any) -> Any:
    from zero.integrations.transformers import ZeroTrainerMixin

    mixed = type(base.__name__, (ZeroTrainerMixin, base), {})
    return build(stage, str(folder), kind=mixed if stage else base, save_strategy="steps", save_steps=2, **options)


KINDS = {"its own": (own_trainer, Around), "passes on": (passes_on, gpt2)}


@pytest.mark.parametrize("kind", KINDS)
@ranks.on(2, timeout=100)
def test_it_saves_and_goes_on_as_alone(rank, world, tmp_path, kind):
    made, model = KINDS[kind]
    base, every_2 = made(), {"eval_strategy": "steps", "eval_steps": 2}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True, **every_2}
    found = []
    for stage in (0, 1, 2, 3):
        place = tmp_path / str(stage)
        with launched(rank, world):
            trainer = at(stage, base, place, model=model, **best)
            trainer.train()
            trainer.save_model(str(place / "final"))
            dist.barrier()
            files = {file: (place / file).read_bytes() for file in names(place)}
            assert len(files) == (6 if kind == "its own" else 3)
        with launched(rank, world):
            again = at(stage, base, tmp_path / "again", model=model)
            again.train(resume_from_checkpoint=str(place / "checkpoint-2"))
            found.append([files, losses(trainer), weights(trainer), losses(again), weights(again)])
        assert found[-1][:2] == found[0][:2] and found[-1][3] == found[0][3], stage
        assert all(same(found[-1][one], found[0][one]) for one in (2, 4)), stage
        assert losses(again)[2:] == losses(trainer)[2:4]


def names(folder: Path) -> list[str]:
    """The files with weights."""
    found = (file for one in ("model.safetensors", "scale.pt") for file in folder.rglob(one))
    return sorted(str(file.relative_to(folder)) for file in found)


@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(2, timeout=100)
def test_where_it_cannot_write_every_rank_raises(rank, world, tmp_path, stage):
    with launched(rank, world):
        trainer = at(stage, own_trainer(), tmp_path, model=Around)
        trainer.train()
        expected = weights(trainer)
        if rank == 0:
            Path(tmp_path, "a file").write_text("in the way")
        error = ranks.refusal(partial(trainer.save_model, str(tmp_path / "a file" / "inside")))
        assert error, error
        assert same(weights(trainer), expected)
