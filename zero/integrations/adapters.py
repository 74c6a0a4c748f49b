"""Adapters of peft in a model whose parameters are sharded: which weights peft saves, and what it needs besides them.

peft chooses among all weights of a model by name, asks modules for the names of theirs, and runs prompt encoders. So it
is given the chosen weights alone, names without values, and full prompt encoders.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zero._torch.tensors import WithoutMemory
from zero.fsdp import FSDP
from zero.fsdp.full_weights import naming
from zero.fsdp.model import models_of


def has_adapters(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")


@contextmanager
def saving(model: nn.Module, *, rank0_only: bool) -> Iterator[None]:
    """Collective. In this context peft saves adapters, if it is given their weights. rank0_only: on rank 0 alone."""
    sharded = [one for one, _ in models_of(model)]
    encoders = getattr(model, "prompt_encoder", None)
    with ExitStack() as stack:
        if sharded and isinstance(encoders, nn.Module):
            full = FSDP.summon_full_params(encoders, writeback=False, rank0_only=rank0_only, offload_to_cpu=True)
            stack.enter_context(full)
        stack.enter_context(naming(sharded))
        stack.enter_context(torch.no_grad())
        yield


def saved_names(model: Any) -> Sequence[str]:
    """Within `saving`: the names of the weights whose values peft asks for to save the adapters of a model."""
    import peft

    asked: set[str] = set()
    weights = {
        name: _Asked.named(name, value, asked) if isinstance(value, Tensor) else value
        for name, value in model.state_dict().items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns again as it saves
        for adapter in model.peft_config:
            kept = peft.get_peft_model_state_dict(model, state_dict={**weights}, adapter_name=adapter)
            asked.update(value.key for value in kept.values() if isinstance(value, _Asked))
    return [name for name in weights if name in asked]


class _Asked(WithoutMemory):
    """Stands for a weight, and notes its name once its value is asked for, which is zero."""

    key: str
    asked: set[str]

    @classmethod
    def named(cls, name: str, like: Tensor, asked: set[str]) -> _Asked:
        made = cls.like(like, device=torch.device("cpu"))
        made.key, made.asked = name, asked
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*map(_zeros, args), **{name: _zeros(value) for name, value in (kwargs or {}).items()})


def _zeros(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_zeros, value))
    if not isinstance(value, _Asked):
        return value
    value.asked.add(value.key)
    return torch.zeros((), dtype=value.dtype, device="cpu").expand(value.shape)
