"""Hugging Face's Trainer at stages 1, 2 and 3, against the Trainer itself, which is DDP."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import matrix
import ranks
import zero
from launched import launched

if find_spec("transformers") is None or find_spec("accelerate") is None:
    pytest.skip("needs transformers and accelerate", allow_module_level=True)

STAGES = (1, 2, 3)
VOCABULARY = 61
QUIET = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
pytestmark = [
    # peft still asks transformers by the old name.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    # It is the device of ranks without a GPU.
    pytest.mark.filterwarnings("ignore:.pin_memory. argument is set as true:UserWarning"),
]


def gpt2(seed: int = 5) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2))


def examples(count: int = 32) -> list[dict[str, Tensor]]:
    tokens = torch.randint(VOCABULARY, (count, 10), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": row, "labels": row} for row in tokens]


def build(stage: Any, folder: str, *, model: Callable[[], nn.Module] = gpt2, **options: Any) -> Any:
    """The Trainer as its users build it, at stage 0 transformers' own; stage: also a ZeroPlugin, or None."""
    import transformers

    from zero.integrations.transformers import Trainer

    args = transformers.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        **{"max_steps": 4, "max_grad_norm": 0.0, **QUIET, **options},
    )
    given = {"model": model(), "args": args, "train_dataset": examples(), "eval_dataset": examples(6)}
    return transformers.Trainer(**given) if stage == 0 else Trainer(**given, zero_plugin=stage)


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def norms(trainer: Any) -> Tensor:
    return torch.tensor([entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry])


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in zero.full_state_dict(trainer.model_wrapped).items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@ranks.on(2, timeout=100)
def test_losses_weights_and_logs_are_those_of_ddp(rank: int, world: int, tmp_path: Path) -> None:
    wrong = []
    ways: dict[str, dict[str, Any]] = {
        "plainly": {},
        "clipping": {"max_grad_norm": 0.5, "optim": "sgd"},  # Adam would enlarge rounding
        "accumulating": {"gradient_accumulation_steps": 2},
        "in bf16": {"bf16": True},
    }
    for how, options in ways.items():
        with launched(rank, world):
            expected = build(0, tmp_path, log_level="warning", **options)
            expected.train()
            expected_weights, evaluated = weights(expected), expected.evaluate()["eval_loss"]
        for stage in STAGES:
            with launched(rank, world):
                got = build(stage, tmp_path, **options)
                got.train()
                exact = losses(got) == losses(expected) and same(weights(got), expected_weights)
                close = all(
                    torch.allclose(weights(got)[name], expected_weights[name], atol=1e-6) for name in expected_weights
                )
                told = {
                    "weights": exact or (close and how == "clipping"),
                    "norms": torch.allclose(norms(got), norms(expected), atol=1e-5) and norms(got).min() > 0,
                    "evaluation": abs(got.evaluate()["eval_loss"] - evaluated) < 1e-6,
                    "operations": got.state.total_flos == expected.state.total_flos,
                }
                wrong += [f"{name} at stage {stage}, {how}" for name, right in told.items() if not right]
    assert wrong == []


@pytest.mark.matrix
@ranks.on(2, timeout=100)
def test_checkpoints_go_on_bit_for_bit_at_any_stage_and_without_zero(rank: int, world: int, tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    from zero.integrations.accelerate import ZeroPlugin

    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    with launched(rank, world):
        expected = build(0, f"{tmp_path}/0", **saving)
        expected.train()
        expected_weights = weights(expected)
    sharded = {stage: ZeroPlugin(stage=stage, state_dict_type="SHARDED_STATE_DICT") for stage in (2, 3)}
    places = {
        "0": 0,
        **{str(stage): stage for stage in STAGES},
        **{f"sharded{stage}": one for stage, one in sharded.items()},
    }
    wrong = []
    for place, plugin in places.items():
        if place != "0":
            with launched(rank, world):
                trainer = build(plugin, f"{tmp_path}/{place}", **saving)
                trainer.train()
                if not same(weights(trainer), expected_weights):
                    wrong.append(f"{place} itself")
                trainer.save_model(f"{tmp_path}/{place}/final")
                torch.distributed.barrier()
                loaded = GPT2LMHeadModel.from_pretrained(f"{tmp_path}/{place}/final")
                if not same(dict(loaded.state_dict()), expected_weights):
                    wrong.append(f"{place} by from_pretrained")
        stage, others = int(place[-1]), STAGES if place.startswith("sharded") else (0, *STAGES)
        for other in others if matrix.WHOLE else {stage, others[-1 - others.index(stage)]}:
            with launched(rank, world):
                again = build(other, f"{tmp_path}/again", **{**saving, "save_strategy": "no"})
                again.train(resume_from_checkpoint=f"{tmp_path}/{place}/checkpoint-2")
                if losses(again)[2:] != losses(expected)[2:] or not same(weights(again), expected_weights):
                    wrong.append(f"{place} at stage {other}")
    assert wrong == []


def evaluated_first(rank: int, world: int, folder: str) -> list[dict[str, Tensor]]:
    found = []
    for stage in STAGES:
        with launched(rank, world):
            trainer = build(stage, folder, max_steps=2)
            trainer.evaluate()
            trainer.train()
            found.append(weights(trainer) if stage == 3 else dict(trainer.model.state_dict()))
    return found


def test_a_model_that_was_evaluated_first_is_trained_by_all_ranks(tmp_path: Path) -> None:
    """transformers' own leaves DistributedDataParallel away then, and each rank trains by itself."""
    first, second = ranks.run(evaluated_first, args=(str(tmp_path),))
    assert all(same(one, first[0]) for one in [*first, *second])


@ranks.on(2, timeout=100)
def test_the_best_model_a_second_train_and_a_late_resume(rank: int, world: int, tmp_path: Path) -> None:
    """What people do with a Trainer after train(), against DDP."""
    wrong, best = [], {}
    evaluating, saving = {"eval_strategy": "steps", "eval_steps": 2}, {"save_strategy": "steps", "save_steps": 2}
    options = {"max_grad_norm": 0.5, **evaluating, **saving}
    for stage in (0, *STAGES):
        with launched(rank, world):
            trainer = build(
                stage, f"{tmp_path}/{stage}", **options, load_best_model_at_end=True, metric_for_best_model="loss"
            )
            trainer.train()
            first = weights(trainer)
            trainer.train()  # goes on from the best weights
            best[stage] = [first, weights(trainer), norms(trainer)]
            # As in Hugging Face's documentation.
            if trainer.is_fsdp_enabled:
                trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
            trainer.save_model(f"{tmp_path}/{stage}/final")
            trainer.train(resume_from_checkpoint=f"{tmp_path}/{stage}/checkpoint-2")
            best[stage].append(weights(trainer))
        for number, (one, other) in enumerate(zip(best[stage], best[0], strict=True)):
            if isinstance(one, dict):
                right = all(torch.allclose(one[name], other[name], atol=1e-5) for name in other)
            else:
                right = torch.allclose(torch.as_tensor(one), torch.as_tensor(other), atol=1e-5)
            if not right:
                wrong.append(f"{number} at stage {stage}")
    assert wrong == []


def lora() -> Any:
    import peft

    base = gpt2()
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=2, init_lora_weights=False, target_modules=["c_attn"], fan_in_fan_out=True
    )
    torch.manual_seed(1)
    return peft.get_peft_model(base, config)


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
@ranks.on(2, timeout=100)
def test_lora_by_peft_is_trained_saved_and_resumed(rank: int, world: int, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    wrong, expected = [], {}
    saving = {"save_strategy": "steps", "save_steps": 2}
    for stage in (0, *STAGES):
        place = f"{tmp_path}/{stage}"
        with launched(rank, world):
            trainer = build(stage, place, model=lora, **saving)
            trainer.train()
            trainer.save_model(f"{place}/final")
            torch.distributed.barrier()
            adapter = load_file(f"{place}/final/adapter_model.safetensors")
            found = {"losses": torch.tensor(losses(trainer)), **weights(trainer)}
            found |= {f"saved {name}": value for name, value in adapter.items()}
            expected = expected or found
            if not same(found, expected):
                wrong.append(f"stage {stage}")
    for stage in (0, *STAGES):
        with launched(rank, world):
            again = build(stage, f"{tmp_path}/again", model=lora)
            again.train(resume_from_checkpoint=f"{tmp_path}/{3 - stage}/checkpoint-2")
            if not all(torch.equal(value, expected[name]) for name, value in weights(again).items()):
                wrong.append(f"resumed at stage {stage}")
    assert wrong == []


def of_deepspeed(stage: int, **options: Any) -> Any:
    """What configurations in the documentation of transformers look like."""
    from zero.integrations.accelerate import ZeroPlugin

    names = ("lr", "betas", "eps", "weight_decay")
    warmup = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}
    adamw = {"type": "AdamW", "params": {**dict.fromkeys(names, "auto"), **options}}
    schedule = {"type": "WarmupDecayLR", "params": {**warmup, "warmup_type": "linear"}}
    given = {"optimizer": adamw, "scheduler": schedule, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"}
    return ZeroPlugin.from_json({"zero_optimization": {"stage": stage}, "train_batch_size": "auto", **given})


@ranks.on(2, timeout=100)
def test_configurations_of_deepspeed_are_filled_from_the_arguments(rank: int, world: int, tmp_path: Path) -> None:
    arguments = {"weight_decay": 0.1, "adam_beta2": 0.9, "warmup_steps": 2, "max_steps": 6}
    with launched(rank, world):
        plain = build(0, tmp_path, **arguments)
        plain.optimizer = torch.optim.AdamW(plain.model.parameters(), lr=1e-2, betas=(0.9, 0.9), weight_decay=0.1)
        rates = [0.0, 0.0, 0.5, 1.0, 0.75, 0.5, 0.25]  # relative, of one step after another
        plain.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(plain.optimizer, rates.__getitem__)
        plain.train()
        expected = weights(plain)
    narrow = []
    for stage in STAGES:
        with launched(rank, world):
            trainer = build(of_deepspeed(stage), tmp_path, **arguments)
            trainer.train()
            assert losses(trainer) == losses(plain)
            assert same(weights(trainer), expected)
        with launched(rank, world):
            trainer = build(of_deepspeed(stage), f"{tmp_path}/{stage}", bf16=True, **arguments)
            trainer.train()
            assert {param.dtype for param in trainer.model.parameters()} == {
                torch.float32 if stage == 3 else torch.bfloat16
            }
            narrow.append([*losses(trainer), trainer.evaluate()["eval_loss"]])
    by_stage = torch.tensor(narrow)
    assert torch.equal(by_stage[1], by_stage[2])
    assert torch.allclose(by_stage[0], by_stage[1], rtol=1e-3)  # DDP rounds averages to 16 bits
    assert torch.allclose(by_stage[:, :-1], torch.tensor(losses(plain)), rtol=0.02)
    with launched(rank, world):
        trainer = build(of_deepspeed(2, lr=0.5), tmp_path, **arguments)
        assert "lr is 0.5 in the configuration of zero, but 0.01" in ranks.refusal(trainer.train)


@ranks.on(2, timeout=100)
def test_predict_with_generate(rank: int, world: int, tmp_path: Path) -> None:
    """A T5 that is trained and then generates, texts of other lengths on each rank."""
    import transformers

    from zero.integrations.transformers import Seq2SeqTrainer

    found = {}
    for stage in (0, *STAGES):
        with launched(rank, world):
            torch.manual_seed(0)
            config = transformers.T5Config(
                vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, decoder_start_token_id=0
            )
            args = transformers.Seq2SeqTrainingArguments(
                output_dir=tmp_path,
                predict_with_generate=True,
                generation_max_length=9,
                **{**QUIET, "max_steps": 3, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2},
            )
            kinds = {0: transformers.Seq2SeqTrainer}
            given = {
                "model": transformers.T5ForConditionalGeneration(config),
                "args": args,
                "train_dataset": examples(),
            }
            extra = {"zero_plugin": stage} if stage else {}
            trainer = kinds.get(stage, Seq2SeqTrainer)(**given, **extra)
            trainer.train()
            found[stage] = [*losses(trainer), trainer.predict(examples(6)).predictions.tolist()]
    assert all(found[stage] == found[0] for stage in STAGES)


@ranks.on(2)
def test_a_model_that_rank_0_loads_and_that_ranks_generate_by(rank: int, world: int, tmp_path: Path) -> None:
    """`from_pretrained` as the launcher asks for it by default; then texts of other lengths on each rank."""
    import transformers

    from zero.integrations.accelerate import Accelerator

    if rank == 0:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
        )
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    torch.distributed.barrier()
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    tokens = examples(2)[rank]["input_ids"][None]
    right = []
    for stage in (None, 2):
        asked = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
        with launched(rank, world, **asked):
            accelerator = Accelerator(cpu=True, zero_plugin=stage)
            model = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
            model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
            right.append(same(zero.full_state_dict(model), dict(plain.state_dict())))
            right.append(bool(model(input_ids=tokens).logits.equal(plain(input_ids=tokens).logits)))
            length = {"max_new_tokens": 2 + 3 * rank, "do_sample": False, "pad_token_id": 0}
            texts = [one.generate(tokens, **length) for one in (accelerator.unwrap_model(model), plain)]
            right.append(texts[0].equal(texts[1]))
    assert all(right), right


def tokenizer() -> Any:
    import tokenizers
    import transformers

    words = {f"w{number}": number for number in range(VOCABULARY - 1)} | {"<end>": VOCABULARY - 1}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<end>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>", pad_token="<end>")


@pytest.mark.skipif(find_spec("trl") is None, reason="needs trl")
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")  # TRL's default
@ranks.on(2, timeout=100)
def test_trls_sft_trainer_by_the_mixin(rank: int, world: int, tmp_path: Path) -> None:
    """TRL's SFTTrainer with the mixin, against itself without."""
    import datasets
    import trl

    from zero.integrations.transformers import ZeroTrainerMixin

    class SFTTrainer(ZeroTrainerMixin, trl.SFTTrainer):
        """As a user writes it."""

    found = []
    for stage in (0, *STAGES):
        with launched(rank, world):
            args = trl.SFTConfig(
                output_dir=tmp_path,
                max_length=None,
                per_device_train_batch_size=2,
                **{**QUIET, "max_steps": 3, "max_grad_norm": 0.0},
            )
            dataset = datasets.Dataset.from_list([{"input_ids": one["input_ids"].tolist()} for one in examples(16)])
            given = {"model": gpt2(), "args": args, "train_dataset": dataset, "processing_class": tokenizer()}
            trainer = SFTTrainer(**given, zero_plugin=stage) if stage else trl.SFTTrainer(**given)
            trainer.train()
            found.append((losses(trainer), weights(trainer)))
    found = [losses == found[0][0] and same(one, found[0][1]) for losses, one in found]
    assert all(found), found


@ranks.on(2, timeout=100)
def test_arguments_are_honoured_or_refused_on_every_rank(rank: int, world: int, tmp_path: Path) -> None:
    from zero.integrations.accelerate import ZeroPlugin

    with launched(rank, world):
        expected = build(0, tmp_path)
        expected.train()
        expected_weights = weights(expected)
    for config in (
        {"version": 2, "reshard_after_forward": False},
        {"transformer_layer_cls_to_wrap": "GPT2Block", "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 500, "fsdp_activation_checkpointing": True},
    ):
        with launched(rank, world):
            got = build(None, tmp_path, fsdp=True, fsdp_config=dict(config))
            got.train()
            assert isinstance(got.model_wrapped, zero.FSDP)
            assert losses(got) == losses(expected)
            assert same(weights(got), expected_weights)
    with launched(rank, world, ACCELERATE_USE_FSDP="true", FSDP_SHARDING_STRATEGY="SHARD_GRAD_OP", FSDP_VERSION="1"):
        got = build(None, tmp_path)
        assert got.accelerator.zero_plugin == ZeroPlugin(stage=3, sharding_strategy="SHARD_GRAD_OP")

    def trying(stage: Any = 2, **options: Any) -> str:
        with launched(rank, world):
            return ranks.refusal(lambda: build(stage, tmp_path, **options))

    found = {
        "auto_find_batch_size=True is not available": trying(auto_find_batch_size=True),
        "both say how to shard": trying(fsdp=True, fsdp_config={"version": 2}),
        "no stage to shard at was given": trying(None),
        "gradient_accumulation_steps is 2": trying(ZeroPlugin(stage=2, gradient_accumulation_steps=2)),
        "gradient_clipping is 1.0": trying(ZeroPlugin(stage=2, gradient_clipping=1.0)),
        "mixed_precision is 'bf16'": trying(ZeroPlugin(stage=2, mixed_precision="bf16")),
        "given a FSDP": trying(model=lambda: zero.FSDP(gpt2())),
        "fsdp_config: xla=True is not available": trying(None, fsdp=True, fsdp_config={"xla": True}),
        "activation_checkpointing_offload=True": trying(
            None, fsdp=True, fsdp_config={"activation_checkpointing_offload": True}
        ),
    }
    for expected, error in found.items():
        assert error.startswith("ValueError") and expected in error, (expected, error)
