"""Adapters of peft in the Trainer: trained, saved and loaded at every stage as by transformers alone."""

from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor
from trainers import build, examples, gpt2, losses, same, weights

import ranks
import zero
from assertions import close
from launched import launched

if not all(map(find_spec, ("transformers", "accelerate", "peft"))):
    pytest.skip("needs transformers, accelerate and peft", allow_module_level=True)

pytestmark = [
    pytest.mark.slow,
    # peft still asks transformers by the old name.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    # It is the device of ranks without a GPU.
    pytest.mark.filterwarnings("ignore:.pin_memory. argument is set as true:UserWarning"),
]


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


@ranks.on(2, timeout=100)
def test_lora_by_peft_is_trained_saved_and_resumed(rank, world, tmp_path):
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


def refused_by_transformers() -> bool:
    """A new transformers may ask for a peft that is not out."""
    from transformers.integrations.peft import MIN_PEFT_VERSION

    return Version(version("peft")) < Version(MIN_PEFT_VERSION)


ADDED = pytest.mark.skipif(refused_by_transformers(), reason="transformers refuses this peft")


@pytest.mark.parametrize("kind", [pytest.param(one, marks=[ADDED] * (one == "added")) for one in ADAPTERS])
@ranks.on(2, timeout=100)
def test_an_adapter_is_saved_as_under_ddp_byte_for_byte(rank, world, tmp_path, kind):
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


@ranks.on(2, timeout=100)
def test_an_adapter_is_saved_by_hand_at_any_stage(rank, world, tmp_path):
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
        weights = zero.full_state_dict(
            model, to=None
        )  # of stage 3, where a module that is asked for its own has shards
        told = ranks.refusal(partial(plain.save_pretrained, place / "shards", state_dict=weights))
        assert ("RuntimeError" in told) == (kind == "modules to save"), told


@ranks.on(2, timeout=100)
def test_what_reads_gradients_of_an_adapter_has_the_weights_of_stage_1(rank, world, tmp_path):
    from transformers import TrainerCallback

    class Allocate(TrainerCallback):
        def on_pre_optimizer_step(self, _: Any, state: Any, __: Any, *, model: Any, **___: Any) -> None:
            model.base_model.update_and_allocate(state.global_step)

    found = []
    for stage in (1, 2, 3):
        with launched(rank, world):
            trainer = build(stage, tmp_path, model=partial(ADAPTERS["AdaLoRA"], tfinal=1, deltaT=1))
            trainer.add_callback(Allocate())
            trainer.train()
            found.append(zero.full_state_dict(trainer.model_wrapped, to=None))
    for other in found[1:]:
        assert all(close(other[name], value, 1e-6) for name, value in found[0].items())
