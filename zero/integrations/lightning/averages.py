"""Averages of weights that Lightning's callbacks keep, at stage 3: shards, laid out as the shards of the model.

An average of each element depends on that element alone, so the averages of the shards are the shards of the averages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

from zero.fsdp import FSDP
from zero.fsdp.fsdp import running_model
from zero.full_state import full_state_dict

# Where WeightAveraging keeps the weights of the model in a checkpoint, whose "state_dict" has their averages.
_CURRENT = "current_model_state"


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


def shard_averages(trainer: pl.Trainer, model: FSDP, options: Mapping[str, Any]) -> None:
    """Collective. Shards the averages of callbacks, which hold full copies of the plain module.

    options: those of the model's FSDP. Raises ValueError, on every rank, for averages on another device than the model,
    and where the options do not lay out a copy of the module as they lay out the module.
    """
    for callback in averaging(trainer):
        name, average, root = type(callback).__name__, callback._average_model, trainer.strategy.root_device
        if callback._device is not None and torch.device(callback._device).type != root.type:
            raise ValueError(
                f"{name}(device={str(callback._device)!r}): at stage 3 averages are sharded as the weights are, on "
                f"{root}. Pass device=None, or take stage 2."
            )
        of_weights = isinstance(callback, WeightAveraging)
        sharded = ShardedAverage(average.module if of_weights else average, **{"device_id": root, **options})
        if of_weights:
            average.module = sharded
        else:
            callback._average_model = sharded
        _refuse_other_shards(name, model, sharded)


def _refuse_other_shards(name: str, model: FSDP, average: FSDP) -> None:
    pairs = zip(model.module.named_parameters(), average.module.parameters(), strict=True)
    differs = [full for (full, param), averaged in pairs if param.shape != averaged.shape]
    problem = (
        f"{name}: options of FSDP that name single modules or parameters, of which {name} has a copy, shard that copy "
        f"otherwise than the model: {differs[0]}. Name classes of modules in auto_wrap_policy, as_one_unit and "
        "ignored_modules, or take stage 2."
        if differs
        else None
    )
    running_model(model).comm.compare(f"the averages of {name}", [], problem)


def refuse_directories(trainer: pl.Trainer) -> None:
    """Raises ValueError for WeightAveraging where checkpoints are directories, which hold the weights once."""
    found = next((one for one in averaging(trainer) if isinstance(one, WeightAveraging)), None)
    if found is not None:
        raise ValueError(
            f"{type(found).__name__} saves two sets of weights, the model's and their averages, and checkpoint="
            "'sharded' holds one. Use checkpoint='full'."
        )


def weights_to_load(checkpoint: dict[str, Any], module: pl.LightningModule) -> Mapping[str, Any]:
    """The model's weights in a checkpoint, at stage 3.

    WeightAveraging has put averages in their place. Once the strategy has loaded weights it loads the model's into the
    plain module, which holds shards, so it is given the module's own tensors instead: that changes nothing.
    """
    resumes = any(one._average_model is not None for one in averaging(module.trainer))
    if not resumes or _CURRENT not in checkpoint:
        return checkpoint["state_dict"]  # type: ignore[no-any-return]
    weights: Mapping[str, Any] = checkpoint[_CURRENT]
    checkpoint[_CURRENT] = module.state_dict(keep_vars=True)
    return weights
