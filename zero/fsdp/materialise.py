"""Models built on the meta device, given memory and values one unit at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from zero._torch import buffers_of


class Materialiser:
    """Turns meta parameters into real ones, in place: optimizers that hold them go on holding them.

    Only the source of the first values initialises them; others receive them.

    param_init_fn: called with a module whose own parameters have memory but no values; by default the module's own
        `reset_parameters` is. Each module is initialised once, when the first of its parameters gets memory, and the
        one that names a shared parameter first after the others that share it.
    initialises: whether this rank is that source.
    `problem`: what kept a module from being initialised, in words for the user.
    """

    def __init__(
        self,
        root: nn.Module,
        param_init_fn: Callable[[nn.Module], None] | None,
        *,
        initialises: bool,
    ) -> None:
        cuda = torch.cuda.is_available()
        self._device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self._init, self._initialises = param_init_fn, initialises
        self._holders: dict[nn.Parameter, list[nn.Module]] = {}
        self._waiting: dict[nn.Module, str] = {}
        """Modules that are not initialised yet, and their names."""
        self._given: list[tuple[nn.Parameter, nn.Parameter]] = []
        """Parameters that were given memory, and those on the meta device whose place they took."""
        self._given_buffers: list[tuple[nn.Module, dict[str, Tensor]]] = []
        self.problem: str | None = None
        for prefix, module in root.named_modules():
            own = [*module.parameters(recurse=False)]
            for param in own:
                if param.is_meta:
                    self._holders.setdefault(param, []).append(module)
            if any(tensor.is_meta for tensor in _own(module)):
                self._waiting[module] = prefix

    @property
    def pending(self) -> bool:
        """Whether modules wait for this rank to initialise them."""
        return self._initialises and bool(self._waiting)

    def materialise_buffers(self) -> None:
        """Gives memory to all buffers that have none, and values to the modules that hold nothing else."""
        for module, name in [*self._waiting.items()]:
            empty = {key: buffer for key, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
            self._given_buffers.append((module, empty))
            for key, buffer in empty.items():
                buffers_of(module)[key] = torch.zeros_like(buffer, device=self._device)
            params = [*module.parameters(recurse=False)]
            if params and not any(param.is_meta for param in params):
                self._refuse_to_overwrite(module, name, next(iter(empty)))
            elif not params:
                self._initialise(module, name)

    def materialise(self, params: Iterable[nn.Parameter]) -> None:
        """Gives memory to those of the parameters that have none, and values to the modules that hold them."""
        for param in params:
            holders = [module for module in self._holders.get(param, []) if module in self._waiting]
            for module in holders:
                for each in module.parameters(recurse=False):
                    self._give_memory(each)
            for module in reversed(holders):
                self._initialise(module, self._waiting[module])

    def _refuse_to_overwrite(self, module: nn.Module, name: str, buffer: str) -> None:
        del self._waiting[module]
        if self._initialises:
            self.problem = self.problem or (
                f"the buffer {f'{name}.{buffer}'.lstrip('.')!r} is on the meta device, but the parameters beside it "
                "have values, which initialising the module would overwrite. Give the buffer its values first."
            )

    def take_back(self) -> None:
        """What was given memory is on the meta device again."""
        for param, meta in self._given:
            torch.utils.swap_tensors(param, meta)
        for module, empty in self._given_buffers:
            buffers_of(module).update(empty)

    def _give_memory(self, param: nn.Parameter) -> None:
        if param.is_meta:
            real = nn.Parameter(torch.empty_like(param, device=self._device), requires_grad=param.requires_grad)
            vars(real).update(vars(param))
            torch.utils.swap_tensors(param, real)
            self._given.append((param, real))

    def _initialise(self, module: nn.Module, name: str) -> None:
        del self._waiting[module]
        if not self._initialises or self.problem is not None:
            return
        reset = self._init or getattr(type(module), "reset_parameters", None)
        if reset is None:
            self.problem = (
                f"{name!r} is on the meta device, and {type(module).__name__} has no reset_parameters(). Pass "
                "param_init_fn=..., or build this module with real parameters on rank 0."
            )
            return
        try:
            with torch.no_grad():
                reset(module)
        except Exception as error:  # the other ranks wait for this one, and learn what it was
            self.problem = f"{name!r} could not be initialised: {type(error).__name__}: {error}"


def _own(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]
