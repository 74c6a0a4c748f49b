"""The methods of FSDP that save and load weights and optimizer state, in full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, overload

from torch import nn
from torch.optim import Optimizer

from zero._torch import named_as_compiled
from zero.fsdp import full_weights, optimizer_state
from zero.fsdp.dtensors import summon
from zero.fsdp.model import Model
from zero.fsdp.unit import Unit
from zero.tensor_parallel import parts
from zero.wrap.wrapper import Wrapper

if TYPE_CHECKING:
    from typing_extensions import Self


class Weights(Wrapper):
    """Saves, loads and summons the parameters of one model's units."""

    _model: Model

    @property
    def _units(self) -> Sequence[Unit]:
        return self._model.units

    def reshard(self) -> None:
        """Reshards units that a forward without backward may have left unsharded. Call it between steps."""
        for unit in self._units:
            unit.reshard()

    def summon_full_params(  # of `module`, not self: called on the class it takes any module, as PyTorch's does
        module: nn.Module,
        *,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> AbstractContextManager[None]:
        """Collective. Unshards all parameters on every rank, in their own dtype, within the context.

            with model.summon_full_params(): ...
            with FSDP.summon_full_params(module): ...  # an FSDP, a module that contains FSDPs, or one inside an FSDP

        Run forwards inside under no_grad; they gather nothing, which suits `generate()`. A module inside an FSDP
        unshards all units that hold its parameters. Without sharded parameters nothing happens.

        recurse: False unshards only the module's own unit, not the units inside it.
        writeback: writes changes back, those of each shard's owner; with False all changes are lost.
        rank0_only: unshards on the first rank of the group only; requires writeback=False.
        offload_to_cpu: puts the full parameters into the memory of the CPU.
        with_grads: unshards averaged gradients in `param.grad`, too; not with offload_to_cpu.

        Raises ValueError for rank0_only with writeback and for with_grads with offload_to_cpu. Raises ValueError on
        every rank if parameters were given other data inside and writeback is True. Raises RuntimeError if they were
        given other data before, and within forward, backward or another summon_full_params.
        """
        return summon(
            module,
            wrapped=module.module if isinstance(module, Weights) else module,
            recurse=recurse,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        )

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Collective. Calls fn with every module, as nn.Module.apply, on full parameters; keeps rank 0's results."""
        with self.summon_full_params():
            super().apply(fn)
            params = [parts.of(param) for param in self.module.parameters()]
            self._model.placement.broadcast([*params, *self.module.buffers()])
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Collective. Returns copies of full parameters and of buffers, by the module's own names, on every rank.

        Raises RuntimeError if parameters were moved, cast or given other data.
        """
        with self._model.together:
            self._model.refuse_moved()
            return full_weights.state_dict(self.module, [(self._model, [*self._units])], *args, **kwargs)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Collective. Loads full weights when `load_state_dict` of a plain module around the FSDP calls this."""
        given = {name.removeprefix(prefix): state_dict.pop(name) for name in [*state_dict] if name.startswith(prefix)}
        try:
            assign = local_metadata.get("assign_to_params_buffers", False)
            missing, unexpected = self.load_state_dict(given, strict=False, assign=assign)
            missing_keys += [prefix + name for name in missing]
            unexpected_keys += [prefix + name for name in unexpected]
        except (RuntimeError, ValueError) as error:
            error_msgs.append(str(error))
        # torch loads the modules inside next. They are given their own values.
        own = self.module.state_dict(keep_vars=True)
        state_dict.update({f"{prefix}module.{name}": value for name, value in own.items()})

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Collective. Loads full weights by the module's own names, with or without `_orig_mod.` in them; every rank
        must be given the same.

        Raises ValueError for assign=True, which would replace the tensors that the optimizer holds.
        """
        if assign:
            raise ValueError("assign=True replaces the parameters that are sharded. Load with assign=False.")
        with self._model.together, self.summon_full_params():
            return self.module.load_state_dict(named_as_compiled(self.module, state_dict), strict)

    @overload
    def optim_state_dict(self, optimizer: Optimizer, to: None) -> dict[str, Any]: ...
    @overload
    def optim_state_dict(self, optimizer: Optimizer, to: int | None = 0) -> dict[str, Any] | None: ...
    def optim_state_dict(self, optimizer: Optimizer, to: int | None = 0) -> dict[str, Any] | None:
        """Collective. Returns the full state of an optimizer of these parameters, in the plain optimizer's own format.

        to: the rank of the group that gets the state, or None for all; other ranks return None. The state loads into
        the optimizer of the plain model, and by `load_optim_state_dict` at any number of ranks. This rank's shard is
        `optimizer.state_dict()`. Raises ValueError on every rank for state that cannot be consolidated.
        """
        self.reshard()
        return optimizer_state.full(self._model, optimizer, to)

    def load_optim_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Loads a full state, the same on every rank: the plain optimizer's, or the result of `optim_state_dict`.

        Also loads this rank's own `optimizer.state_dict()`. Raises ValueError, and changes nothing, if the state does
        not fit.
        """
        self.reshard()
        optimizer_state.load(self._model, optimizer, state_dict)

    def register_optimizer(self, optimizer: Optimizer) -> None:
        """Lets `optimizer.load_state_dict` take full state from now on, as it does after its first step anyway."""
        optimizer_state.register(self._model, optimizer)
