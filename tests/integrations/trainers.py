"""Hugging Face's Trainer as its users build it, for tests."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zero

VOCABULARY = 61
QUIET = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}


def gpt2(seed: int = 5) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2))


def examples(count: int = 32) -> list[dict[str, Tensor]]:
    tokens = torch.randint(VOCABULARY, (count, 10), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": row, "labels": row} for row in tokens]


def build(stage: Any, folder: str, *, model: Callable[[], nn.Module] = gpt2, kind: Any = None, **options: Any) -> Any:
    """The Trainer as its users build it, at stage 0 transformers' own; stage: also a ZeroPlugin, or None. kind: the
    class to build of."""
    import transformers

    from zero.integrations.transformers import Trainer

    args = transformers.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=2,
        **{"learning_rate": 1e-2, "max_steps": 4, "max_grad_norm": 0.0, **QUIET, **options},
    )
    given = {"model": model(), "args": args, "train_dataset": examples(), "eval_dataset": examples(6)}
    return (kind or transformers.Trainer)(**given) if stage == 0 else (kind or Trainer)(**given, zero_plugin=stage)


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in zero.full_state_dict(trainer.model_wrapped, to=None).items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
