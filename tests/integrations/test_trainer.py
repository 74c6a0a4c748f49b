"""Hugging Face's Trainer at stages 1, 2 and 3, against the Trainer itself, which is DDP."""

import re
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from trainers import build, gpt2, losses, same, weights

import matrix
import ranks
import zero
from launched import launched

if find_spec("transformers") is None or find_spec("accelerate") is None:
    pytest.skip("needs transformers and accelerate", allow_module_level=True)

STAGES = (1, 2, 3)
pytestmark = [
    pytest.mark.slow,
    # peft still asks transformers by the old name.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    # It is the device of ranks without a GPU.
    pytest.mark.filterwarnings("ignore:.pin_memory. argument is set as true:UserWarning"),
]


def norms(trainer: Any) -> Tensor:
    return torch.tensor([entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry])


@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": 0.5, "optim": "sgd"},  # Adam would enlarge rounding
        {"gradient_accumulation_steps": 2, "optim": "sgd"},
        {},
    ],
    ids=["clipping", "accumulating", "with Adam"],
)
@ranks.on(2, timeout=100)
def test_losses_weights_and_logs_are_those_of_ddp(rank, world, tmp_path, options):
    with launched(rank, world):
        expected = build(0, tmp_path, log_level="warning", **options)
        expected.train()
        expected_weights, evaluated = weights(expected), expected.evaluate()["eval_loss"]
    for stage in STAGES:
        with launched(rank, world):
            got = build(stage, tmp_path, **options)
            got.train()
            if "optim" in options:
                torch.testing.assert_close(weights(got), expected_weights, rtol=0, atol=1e-6)
            else:
                assert losses(got) == losses(expected)
                assert same(weights(got), expected_weights)
            assert torch.allclose(norms(got), norms(expected), atol=1e-5) and norms(got).min() > 0
            assert got.evaluate()["eval_loss"] == pytest.approx(evaluated, abs=1e-6)
            assert got.state.total_flos == expected.state.total_flos


@ranks.on(2, timeout=100)
def test_bf16_is_the_same_at_every_stage_and_close_to_autocast(rank, world, tmp_path):
    found = []
    for stage in (0, *STAGES):
        with launched(rank, world):
            got = build(stage, tmp_path, bf16=True, max_grad_norm=0.5)
            got.train()
            found.append([*losses(got), *norms(got).tolist(), got.evaluate()["eval_loss"]])
    assert found[1] == found[2] and found[3] == pytest.approx(found[2], rel=1e-6)
    assert found[1] == pytest.approx(found[0], rel=3e-2)


def held(stage: int, folder: str, **options: Any) -> float:
    """The share of the gradients' bytes that a rank holds between two micro-batches of a step."""
    from transformers import TrainerCallback

    shares = []

    class Count(TrainerCallback):
        def on_substep_end(self, *_: Any, model: nn.Module, optimizer: Any, **__: Any) -> None:
            shares.append(zero.report(model, optimizer.optimizer).gradients)

    trainer = build(stage, folder, gradient_accumulation_steps=2, max_steps=2, **options)
    trainer.add_callback(Count())
    trainer.train()
    assert len(shares) == 2
    return max(shares) / sum(param.nbytes for param in gpt2().parameters())


@ranks.on(2, timeout=100)
def test_accumulation_holds_shards_of_gradients_unless_asked_otherwise(rank, world, tmp_path):
    for stage, share in {1: 1.0, 2: 0.5, 3: 0.5}.items():
        asked = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": False}}}
        with launched(rank, world):
            assert held(stage, tmp_path) == pytest.approx(share, rel=0.01), stage
        with launched(rank, world):
            assert held(stage, tmp_path, **asked) == pytest.approx(1.0, rel=0.01), stage


FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"
GOES_ON = {(0, FULL): (1, 2), (1, FULL): (3,), (3, FULL): (0,), (2, SHARDED): (3,)}
"""What saves, and the stages that go on from there, in the suite."""
ALL = {(stage, FULL): (0, *STAGES) for stage in (0, *STAGES)} | {(stage, SHARDED): (2, 3) for stage in (2, 3)}


@pytest.mark.matrix
@ranks.on(2, timeout=100)
def test_checkpoints_go_on_bit_for_bit_at_any_stage_and_without_zero(rank, world, tmp_path):
    from transformers import GPT2LMHeadModel

    from zero.integrations.accelerate import ZeroPlugin

    with launched(rank, world):
        expected = build(0, f"{tmp_path}/expected")
        expected.train()
        expected_weights = weights(expected)
    for (stage, kind), others in (ALL if matrix.WHOLE else GOES_ON).items():
        place = f"{tmp_path}/{stage} {kind}"
        plugin = ZeroPlugin(stage=stage, state_dict_type=kind) if stage else 0
        with launched(rank, world):
            trainer = build(plugin, place, save_strategy="steps", save_steps=2)
            trainer.train()
            assert same(weights(trainer), expected_weights)
            trainer.save_model(f"{place}/final")
            torch.distributed.barrier()
            loaded = GPT2LMHeadModel.from_pretrained(f"{place}/final")
            assert same(dict(loaded.state_dict()), expected_weights)
        for other in others:
            with launched(rank, world):
                again = build(other, f"{tmp_path}/again")
                again.train(resume_from_checkpoint=f"{place}/checkpoint-2")
                assert losses(again)[2:] == losses(expected)[2:], (stage, other)
                assert same(weights(again), expected_weights), (stage, other)


@ranks.on(2, timeout=100)
def test_a_checkpoint_takes_the_place_of_one_of_another_kind(rank, world, tmp_path):
    from zero.integrations.accelerate import ZeroPlugin

    real = torch.save

    def fails(state: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        if Path(path).name == "optimizer.pt":
            raise OSError("the disk is full")
        real(state, path, *args, **kwargs)

    for kind, rate in ((SHARDED, 1e-2), (FULL, 1e-3)):
        plugin = ZeroPlugin(stage=2, state_dict_type=kind)
        make = partial(build, plugin, tmp_path, learning_rate=rate, save_strategy="steps", save_steps=2)
        with launched(rank, world), mock.patch("torch.save", fails):
            told = ranks.refusal(make().train)
            assert told.startswith("OSError") and "the disk is full" in told, told
            assert Path(tmp_path, "checkpoint-2", "zero").is_dir()
        with launched(rank, world):
            trainer = make()
            trainer.train()
            expected = weights(trainer)
    with launched(rank, world):
        again = build(plugin, tmp_path, learning_rate=rate)
        again.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-2")
        assert same(weights(again), expected)


def evaluated_first(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    with launched(rank, world):
        trainer = build(2, folder, max_steps=2)
        trainer.evaluate()
        trainer.train()
        return dict(trainer.model.state_dict())


def test_a_model_that_was_evaluated_first_is_trained_by_all_ranks(tmp_path):
    """transformers' own leaves DistributedDataParallel away then, and each rank trains by itself."""
    first, second = ranks.run(evaluated_first, args=(str(tmp_path),))
    assert same(first, second)


@ranks.on(2, timeout=100)
def test_a_loss_of_the_module_inside_is_averaged_at_stage_1(rank, world, tmp_path):
    import transformers

    from zero.integrations.transformers import ZeroTrainerMixin

    class Inside(transformers.Trainer):
        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(self.model, *args, **kwargs)

    found = []
    for kind in (transformers.Trainer, Inside):
        with launched(rank, world):
            trainer = build(1, tmp_path, kind=type("Mixed", (ZeroTrainerMixin, kind), {}))
            trainer.train()
            found.append(zero.full_state_dict(trainer.model_wrapped, to=None))
    assert all(map(torch.equal, found[0].values(), found[1].values()))


@matrix.only
@ranks.on(2, timeout=100)
def test_the_best_model_a_second_train_and_a_late_resume(rank, world, tmp_path):
    """What people do with a Trainer after train(), against DDP."""
    every_2 = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    found = []
    for stage in (0, 3):
        with launched(rank, world):
            trainer = build(stage, f"{tmp_path}/{stage}", max_grad_norm=0.5, **every_2, **best)
            trainer.train()
            first = weights(trainer)
            trainer.train()  # goes on from the best weights
            second = {**weights(trainer), "norms": norms(trainer)}
            trainer.train(resume_from_checkpoint=f"{tmp_path}/{stage}/checkpoint-2")
            found.append([first, second, weights(trainer)])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5)


@ranks.on(2, timeout=100)
def test_arguments_are_honoured_or_refused_on_every_rank(rank, world, tmp_path):
    from zero.integrations.accelerate import ZeroPlugin

    config = {"version": 2, "reshard_after_forward": False, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    with launched(rank, world):
        got = build(None, tmp_path, fsdp=True, fsdp_config={**config, "transformer_layer_cls_to_wrap": "GPT2Block"})
        got.train()
        assert isinstance(got.model_wrapped, zero.FSDP)
    with launched(rank, world, ACCELERATE_USE_FSDP="true", FSDP_SHARDING_STRATEGY="SHARD_GRAD_OP", FSDP_VERSION="1"):
        got = build(None, tmp_path)
        assert got.accelerator.zero_plugin == ZeroPlugin(3, sharding_strategy="SHARD_GRAD_OP")

    def of_fsdp(**config: Any) -> dict[str, Any]:
        return {"stage": None, "fsdp": True, "fsdp_config": config}

    refused: dict[str, dict[str, Any]] = {
        "auto_find_batch_size=True is not available": {"auto_find_batch_size": True},
        "bf16_full_eval=True is not available": {"bf16_full_eval": True, "stage": 3},
        "both say how to shard": {**of_fsdp(version=2), "stage": 2},
        "no stage to shard at was given": {"stage": None},
        "gradient_clipping is 1.0": {"stage": ZeroPlugin(stage=2, gradient_clipping=1.0)},
        "given a FSDP": {"model": lambda: zero.FSDP(gpt2())},
        "fsdp_config: xla=True is not available": of_fsdp(xla=True),
    }
    for told, options in refused.items():
        with launched(rank, world):
            error = ranks.refusal(partial(build, **{"stage": 2, "folder": tmp_path, **options}))
        assert error.startswith("ValueError") and told in error, (told, error)


# Trainers that go on from checkpoints of which a file is missing, or that transformers' FSDP Trainer has saved.


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
    of_fsdp_but_weights(folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    lacks("model.safetensors")(folder)
    dcp.save({"model": weights}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)


def of_fsdp_but_weights(folder: Path) -> None:
    lacks("optimizer.pt")(folder)
    state = torch.load(folder.parent / "saved" / BY_NAME, weights_only=True)
    dcp.save({"optimizer": state}, checkpoint_id=folder / "optimizer_0", no_dist=True)


def of_another_model(folder: Path) -> None:
    lacks("optimizer.pt")(folder)
    state = torch.load(folder.parent / "saved" / BY_NAME, weights_only=True)
    state["param_groups"][0]["params"][0] = "another.weight"
    torch.save(state, folder / "optimizer.bin")


def torn(folder: Path) -> None:
    """Another one's shards are left out of the copy."""
    torch.save({"in": "zero"}, folder / "optimizer.pt")


CONTINUES = "goes on"
AS_ALONE = "as transformers alone"
FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "whole": (lambda folder: None, CONTINUES),
    "of FSDP": (of_fsdp, CONTINUES),
    "of FSDP, in shards": (of_fsdp_in_shards, CONTINUES),
    "of FSDP, optimizer in shards": (of_fsdp_but_weights, CONTINUES),
    "of FSDP, of another model": (of_another_model, "than it was saved with, such as another.weight"),
    "no optimizer": (lacks("optimizer.pt"), "scheduler.pt has no optimizer.pt beside it.*or remove it"),
    "no schedule": (lacks("scheduler.pt"), "optimizer.pt has no scheduler.pt beside it.*or remove it"),
    "neither": (lacks("optimizer.pt", "scheduler.pt"), AS_ALONE),
    "no generators": (lacks("rng_state_0.pth", "rng_state_1.pth"), AS_ALONE),
    "generators of another version": (lambda folder: Path(folder, "rng_state_1.pth").write_bytes(b""), "EOFError"),
    "no weights": (lacks("model.safetensors"), "has no model.safetensors"),
    "shards elsewhere": (torn, "no zero with shards"),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
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
                if wanted in (CONTINUES, AS_ALONE):
                    assert not error and losses(trainer)[2:] == expected, (kind, stage, error)
                    assert same(weights(trainer), expected_weights), (kind, stage)
                else:
                    assert re.search(wanted, error) and not trainer.state.log_history[2:], (kind, stage, error)
                anew = [str(one.message) for one in told if "begin anew" in str(one.message)]
                assert len(anew) == (kind == "neither"), (kind, stage, anew)


# Trainers that save and load the module inside by themselves, as that of sentence-transformers does.


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
