"""Hugging Face's Trainer at stages 1, 2 and 3, against the Trainer itself, which is DDP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainers import build, examples, gpt2

import matrix
import ranks
import zero
from launched import launched

if find_spec("transformers") is None or find_spec("accelerate") is None:
    pytest.skip("needs transformers and accelerate", allow_module_level=True)

STAGES = (1, 2, 3)
pytestmark = [
    # peft still asks transformers by the old name.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    # It is the device of ranks without a GPU.
    pytest.mark.filterwarnings("ignore:.pin_memory. argument is set as true:UserWarning"),
]


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def norms(trainer: Any) -> Tensor:
    return torch.tensor([entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry])


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in zero.full_state_dict(trainer.model_wrapped).items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": 0.5, "optim": "sgd"},  # Adam would enlarge rounding
        {"gradient_accumulation_steps": 2, "optim": "sgd"},
        {"bf16": True},
    ],
    ids=["clipping", "accumulating", "in bf16"],
)
@ranks.on(2, timeout=100)
def test_losses_weights_and_logs_are_those_of_ddp(
    rank: int, world: int, tmp_path: Path, options: dict[str, Any]
) -> None:
    from zero.integrations.transformers_report import MemoryCallback

    with launched(rank, world):
        expected = build(0, tmp_path, log_level="warning", **options)
        expected.train()
        expected_weights, evaluated = weights(expected), expected.evaluate()["eval_loss"]
    for stage in STAGES:
        with launched(rank, world):
            got, callback = build(stage, tmp_path, **options), MemoryCallback(every=2)
            got.add_callback(callback)
            got.train()
            if "optim" in options:
                torch.testing.assert_close(weights(got), expected_weights, rtol=0, atol=1e-6)
            else:
                assert losses(got) == losses(expected)
                assert same(weights(got), expected_weights)
            assert torch.allclose(norms(got), norms(expected), atol=1e-5) and norms(got).min() > 0
            assert got.evaluate()["eval_loss"] == pytest.approx(evaluated, abs=1e-6)
            assert got.state.total_flos == expected.state.total_flos
            callback.on_log(None, got.state, None, logs=(logs := {"loss": 1.0}))
            assert callback.report.stage == str(stage) and logs["zero/gradients_bytes"] > 0


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


@pytest.mark.slow
@ranks.on(2, timeout=100)
def test_accumulation_holds_shards_of_gradients_unless_asked_otherwise(rank: int, world: int, tmp_path: Path) -> None:
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


@pytest.mark.slow
@pytest.mark.matrix
@ranks.on(2, timeout=100)
def test_checkpoints_go_on_bit_for_bit_at_any_stage_and_without_zero(rank: int, world: int, tmp_path: Path) -> None:
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


@pytest.mark.slow
@ranks.on(2, timeout=100)
def test_a_checkpoint_takes_the_place_of_one_of_another_kind(rank: int, world: int, tmp_path: Path) -> None:
    from zero.integrations.accelerate import ZeroPlugin

    for kind, rate in ((SHARDED, 1e-2), (FULL, 1e-3)):
        plugin = ZeroPlugin(stage=2, state_dict_type=kind)
        with launched(rank, world):
            trainer = build(plugin, tmp_path, learning_rate=rate, save_strategy="steps", save_steps=2)
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


@pytest.mark.slow
def test_a_model_that_was_evaluated_first_is_trained_by_all_ranks(tmp_path: Path) -> None:
    """transformers' own leaves DistributedDataParallel away then, and each rank trains by itself."""
    first, second = ranks.run(evaluated_first, args=(str(tmp_path),))
    assert same(first, second)


@matrix.only
@ranks.on(2, timeout=100)
def test_the_best_model_a_second_train_and_a_late_resume(rank: int, world: int, tmp_path: Path) -> None:
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


OF_ATTENTION = {"target_modules": ["c_attn"], "fan_in_fan_out": True, "init_lora_weights": False}
WITH_A_MODULE = {"r": 2, **OF_ATTENTION, "modules_to_save": ["ln_f"]}


def adapted(kind: str, **options: Any) -> Any:
    import peft

    base = gpt2()
    torch.manual_seed(1)
    return peft.get_peft_model(base, getattr(peft, kind)(task_type="CAUSAL_LM", **options))


def lora() -> Any:
    return adapted("LoraConfig", r=2, **OF_ATTENTION)


def added() -> Any:
    """An adapter in the model of transformers itself."""
    import peft

    base = gpt2()
    torch.manual_seed(1)
    base.add_adapter(peft.LoraConfig(task_type="CAUSAL_LM", **WITH_A_MODULE))
    return base


def two() -> Any:
    """Of which one is frozen, and saved in a folder of its own."""
    import peft

    model = lora()
    model.add_adapter("other", peft.LoraConfig(task_type="CAUSAL_LM", r=3, **OF_ATTENTION))
    return model


ADAPTERS: dict[str, Callable[[], Any]] = {
    "added": added,
    "two": two,
    "embeddings": partial(adapted, "LoraConfig", target_modules=["wte"], init_lora_weights=False, bias="all"),
    "modules to save": partial(adapted, "LoraConfig", **WITH_A_MODULE),
    "prompts": partial(adapted, "PromptTuningConfig", num_virtual_tokens=3),
    "encoded prompts": partial(adapted, "PromptEncoderConfig", num_virtual_tokens=3, encoder_hidden_size=8),
    "AdaLoRA": partial(adapted, "AdaLoraConfig", **OF_ATTENTION, init_r=4, target_r=2, total_step=4),
}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
@ranks.on(2, timeout=100)
def test_lora_by_peft_is_trained_saved_and_resumed(rank: int, world: int, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    expected: dict[str, Tensor] = {}
    for stage in (0, 3):
        place = f"{tmp_path}/{stage}"
        with launched(rank, world):
            trainer = build(stage, place, model=lora, save_strategy="steps", save_steps=2)
            trainer.train()
            trainer.save_model(f"{place}/final")
            torch.distributed.barrier()
            adapter = load_file(f"{place}/final/adapter_model.safetensors")
            found = {"losses": torch.tensor(losses(trainer)), **weights(trainer)}
            found |= {f"saved {name}": value for name, value in adapter.items()}
            expected = expected or found
            assert same(found, expected), stage
    trainer.state.best_model_checkpoint = f"{place}/checkpoint-2"
    trainer._load_best_model()  # into the sharded model
    best = load_file(f"{place}/checkpoint-2/adapter_model.safetensors")
    found = {name.replace(".default.", "."): value for name, value in weights(trainer).items()}
    assert not same(best, adapter) and all(torch.equal(found[name], value) for name, value in best.items())
    with launched(rank, world):
        again = build(2, f"{tmp_path}/again", model=lora)
        again.train(resume_from_checkpoint=f"{tmp_path}/3/checkpoint-2")
        assert all(torch.equal(value, expected[name]) for name, value in weights(again).items())


def written(folder: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted(folder.rglob("adapter_model.safetensors"))]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
@pytest.mark.parametrize("kind", ADAPTERS)
@ranks.on(2, timeout=100)
def test_an_adapter_is_saved_as_under_ddp_byte_for_byte(rank: int, world: int, tmp_path: Path, kind: str) -> None:
    found = {}
    for stage in (0, 2, 3):
        place = Path(tmp_path, str(stage))
        resumes = stage == 3 and kind not in ("added", "encoded prompts")  # which the Trainer itself cannot
        for resumed in [None, f"{place}/checkpoint-2"][: 1 + resumes]:
            with launched(rank, world):
                trainer = build(stage, place, model=ADAPTERS[kind], save_strategy="steps", save_steps=2)
                trainer.train(resume_from_checkpoint=resumed)
                trainer.save_model(place / "final")
                torch.distributed.barrier()
                found[stage, resumed] = [losses(trainer), *map(written, (place / "checkpoint-2", place / "final"))]
                if resumed:
                    trainer._load_from_checkpoint(resumed)  # into the sharded model
                    trainer.save_model(place / "again")
                    torch.distributed.barrier()
                    assert written(place / "again") == written(place / "checkpoint-2")
    assert all(one == found[0, None] for one in found.values())


@pytest.mark.slow
@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
@ranks.on(2, timeout=100)
def test_an_adapter_is_saved_by_hand_at_any_stage(rank: int, world: int, tmp_path: Path) -> None:
    tokens = torch.stack([one["input_ids"] for one in examples(4)])[rank::2]
    for kind in ("modules to save", "prompts"):
        found = []
        for stage in (0, 1, 2, 3):
            plain, place = ADAPTERS[kind](), Path(tmp_path, f"{kind} {stage}")
            model, optimizer = zero.setup(plain, torch.optim.SGD, stage=stage, lr=0.1)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            full = zero.FSDP.summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True)
            with torch.no_grad(), full:
                if rank == 0:
                    plain.save_pretrained(place)
            torch.distributed.barrier()
            found.append((place / "adapter_model.safetensors").read_bytes())
        assert found == found[:1] * 4
        weights = zero.full_state_dict(model)  # of stage 3, where a module that is asked for its own has shards
        told = ranks.refusal(partial(plain.save_pretrained, place / "shards", state_dict=weights))
        assert ("RuntimeError" in told) == (kind == "modules to save"), told


@pytest.mark.slow
@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
@ranks.on(2, timeout=100)
def test_what_reads_gradients_of_an_adapter_is_refused_on_every_rank(rank: int, world: int, tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class Allocate(TrainerCallback):
        def on_pre_optimizer_step(self, _: Any, state: Any, __: Any, *, model: Any, **___: Any) -> None:
            model.base_model.update_and_allocate(state.global_step)

    for stage in (2, 3):
        with launched(rank, world):
            trainer = build(stage, tmp_path, model=partial(ADAPTERS["AdaLoRA"], tfinal=1, deltaT=1))
            trainer.add_callback(Allocate())
            told = ranks.refusal(trainer.train)
        assert told.startswith("RuntimeError") and "lora_A.default" in told, told


@pytest.mark.slow
@ranks.on(2, timeout=100)
def test_arguments_are_honoured_or_refused_on_every_rank(rank: int, world: int, tmp_path: Path) -> None:
    from zero.integrations.accelerate import ZeroPlugin

    config = {"version": 2, "reshard_after_forward": False, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    with launched(rank, world):
        got = build(None, tmp_path, fsdp=True, fsdp_config={**config, "transformer_layer_cls_to_wrap": "GPT2Block"})
        got.train()
        assert isinstance(got.model_wrapped, zero.FSDP)
        assert not got.accelerator.zero_plugin.autocast  # as version 2, which is the Trainer's default, too
    with launched(rank, world, ACCELERATE_USE_FSDP="true", FSDP_SHARDING_STRATEGY="SHARD_GRAD_OP", FSDP_VERSION="1"):
        got = build(None, tmp_path)
        assert got.accelerator.zero_plugin == ZeroPlugin(
            3, sharding_strategy="SHARD_GRAD_OP", mixed_precision_policy="auto"
        )

    def of_fsdp(**config: Any) -> dict[str, Any]:
        return {"stage": None, "fsdp": True, "fsdp_config": config}

    refused: dict[str, dict[str, Any]] = {
        "auto_find_batch_size=True is not available": {"auto_find_batch_size": True},
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
