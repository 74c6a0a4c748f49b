"""Averages of weights that Lightning's callbacks keep, at stage 3: shards, laid out as the shards of the model.

An average of each element depends on that element alone, so the averages of the shards are the shards of the averages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

from zero.comm import Comm
from zero.comm.together import alike
from zero.fsdp import FSDP
from zero.full_state import full_state_dict

_CURRENT = "current_model_state"  # WeightAveraging's, of weights in a checkpoint whose "state_dict" has averages


class ShardedAverage(FSDP):
    """An average of a model's weights. Its `state_dict` is full on rank 0, and empty elsewhere, as the model's is."""

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", **kwargs: Any) -> Any:
        """Collective."""
        found = {} if destination is None else destination
        found.update({prefix + name: value for name, value in full_state_dict(self, to=0).items()})
        return found


def averaging(trainer: Any) -> list[Any]:
    """The callbacks of a Trainer that average weights, also EMAWeightAveraging."""
    return [one for one in trainer.callbacks if isinstance(one, WeightAveraging | StochasticWeightAveraging)]


def shard_averages(trainer: Any, model: FSDP, options: Mapping[str, Any]) -> None:
    """Collective. Shards the averages of callbacks, which hold full copies of the plain module, by the options of the
    model's FSDP. Raises ValueError for averages elsewhere, and where options shard a copy otherwise than the model."""
    root = trainer.strategy.root_device
    for callback in averaging(trainer):
        of_weights = isinstance(callback, WeightAveraging)
        holder, name = (callback._average_model, "module") if of_weights else (callback, "_average_model")
        average = ShardedAverage(getattr(holder, name), **{"device_id": root, **options})
        setattr(holder, name, average)
        there = callback._device is None or torch.device(callback._device).type == root.type
        same = [one.shape for one in model.parameters()] == [one.shape for one in average.parameters()]
        with alike([Comm()], f"the averages of {type(callback).__name__}"):
            if not there or not same:
                raise ValueError(
                    "at stage 3 pass device=None, and name classes of modules in FSDP's options, not single modules."
                )


def refuse_directories(trainer: Any) -> None:
    """Raises ValueError for WeightAveraging where checkpoints are directories, which hold the weights once."""
    for one in averaging(trainer):
        if isinstance(one, WeightAveraging):
            raise ValueError(f"{type(one).__name__} saves two sets of weights. Use checkpoint='full'.")


def weights_to_load(checkpoint: Any, module: pl.LightningModule, model: Any) -> Mapping[str, Any]:
    """The model's weights in a checkpoint, where WeightAveraging has put averages in their place. At stage 3 it would
    later load the model's into the plain module, which holds shards: that is given its own tensors instead."""
    averaged = isinstance(model, FSDP) and any(one._average_model is not None for one in averaging(module.trainer))
    weights: Mapping[str, Any] = checkpoint[_CURRENT if averaged and _CURRENT in checkpoint else "state_dict"]
    if weights is not checkpoint["state_dict"]:
        checkpoint[_CURRENT] = module.state_dict(keep_vars=True)
    return weights
