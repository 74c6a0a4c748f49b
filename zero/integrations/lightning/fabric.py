"""ZeroFabricStrategy: Lightning Fabric at any stage."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.fabric.strategies.ddp import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from zero import checkpoint
from zero.checkpoint.storage import place
from zero.full_state import full_state_dict
from zero.integrations.lightning import sharding
from zero.load_full import load_full_state_dict

_KINDS = (nn.Module, Optimizer)


class ZeroFabricStrategy(sharding.ShardedStrategy, DDPStrategy):
    """ZeRO for Lightning Fabric. Numbers are those of strategy="ddp".

        fabric = Fabric(strategy=ZeroFabricStrategy(stage=3), precision="bf16-mixed", devices=8)
        model, optimizer = fabric.setup(model, optimizer)

    Arguments as in ZeroStrategy; sync_each_batch=False lets `no_backward_sync` at stages 2 and 3 leave gradients full.
    Set up model and optimizers together; `setup_module` alone works at stages 1 and 3. A directory, with
    checkpoint="sharded", is of one model.
    """

    def __init__(self, stage: int, **options: Any) -> None:
        super().__init__(stage, **options)
        self._backward_sync_control: Any = self

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Collective. Schedulers then schedule the sharded optimizers."""
        self._take_precision(self.precision)
        self._round(module)
        sharded = [self._shard_optimizer(one) for one in optimizers]
        return self._wrap(module, sharded), sharded, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """Collective. Raises RuntimeError at stage 2, which shards gradients by the optimizer."""
        if self._stage == 2:
            raise RuntimeError(
                "fabric.setup_module() at stage 2: the optimizer is needed. fabric.setup(model, optimizer)"
            )
        self._take_precision(self.precision)
        self._round(module)
        return self._wrap(module, ())

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Collective at stage 1."""
        return self._shard_optimizer(optimizer)

    def module_to_device(self, module: nn.Module) -> None:
        """Moves the module at stages 1 and 2. At stage 3 FSDP moves it, and initialises meta parameters."""
        if self._stage < 3:
            super().module_to_device(module)

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """What `fabric.no_backward_sync` enters."""
        return self._accumulating(module) if enabled else nullcontext()

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any | Tensor]:
        """Collective. Full weights on rank 0's CPU, {} elsewhere."""
        return full_state_dict(_wrapper(module), to=0)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Collective."""
        load_full_state_dict(_wrapper(module), state_dict, strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Collective. The full state in the plain optimizer's format, as the weights."""
        return sharding.full_state(optimizer)

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Collective."""
        write = super().save_checkpoint
        if not self._in_shards:
            self._remove_shards(path)
            write(path, state, storage_options, filter)
            return
        if filter:
            raise ValueError("filter: a sharded checkpoint has the full model. Leave it out, or use checkpoint='full'.")
        model, optimizers, rest = _divided(state)
        save = lambda entry, file: write(file, {**rest, **entry}, storage_options)  # noqa: E731
        self._save_shards(path, model, optimizers, save)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Collective. Loads both kinds of checkpoints."""
        given = state if isinstance(state, dict) else {"": state}
        if (of_lightning := sharding.rest_of(path)) is None:
            if isinstance(self.checkpoint_io, sharding.MappedCheckpointIO):
                self.checkpoint_io.copied = [name for name, value in given.items() if isinstance(value, _KINDS)]
            return super().load_checkpoint(path, state, strict, weights_only)
        model, optimizers, rest = _divided(given)
        remainder = super().load_checkpoint(of_lightning, rest, strict, weights_only)
        checkpoint.load((place(path) / remainder.pop(sharding.SHARDS)).url, model, optimizers)
        given.update(rest)
        return remainder


def _wrapper(module: nn.Module) -> nn.Module:
    """The wrapper of a module that Fabric passes, which may be the module inside."""
    return sharding.sharded_before(module) or module


def _divided(state: dict[str, Any]) -> tuple[nn.Module, list[Optimizer] | None, dict[str, Any]]:
    """The model, the optimizers, and all other values. Raises ValueError unless there is one model."""
    models = [_wrapper(value) for value in state.values() if isinstance(value, nn.Module)]
    if len(models) != 1:
        raise ValueError(f"a sharded checkpoint holds one model, but there are {len(models)}. Use checkpoint='full'.")
    optimizers = [value for value in state.values() if isinstance(value, Optimizer)] or None
    return models[0], optimizers, {name: value for name, value in state.items() if not isinstance(value, _KINDS)}
