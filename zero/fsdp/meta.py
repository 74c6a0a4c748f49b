"""Gives memory and values to models that were built on the meta device, one unit at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from zero._torch.modules import buffers_of, parameters_of


class Materialiser:
    """Turns meta parameters into real ones in place, so that optimizers still hold them.

    One rank initialises the values; the other ranks receive them.

    param_init_fn: called with a module whose own parameters have memory but no values; by default its
        `reset_parameters` is called. Each module is initialised once, when the first of its parameters gets memory. Of
        the modules that share a parameter, the first in the model is initialised last.
    initialises: whether this rank initialises values.
    """

    problem: str | None = None

    def __init__(
        self, root: nn.Module, param_init_fn: Callable[[nn.Module], None] | None, *, initialises: bool
    ) -> None:
        cuda = torch.cuda.is_available()
        self._device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self._init, self._initialises = param_init_fn, initialises
        self._holders: dict[nn.Parameter, list[nn.Module]] = {}
        # Modules that are not initialised yet, and their names.
        self._uninitialised: dict[nn.Module, str] = {}
        # Parameters that were given memory, and the meta parameters that they were swapped with.
        self._materialised: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._materialised_buffers: list[tuple[nn.Module, dict[str, Tensor]]] = []
        for prefix, module in root.named_modules():
            own = [*parameters_of(module, recurse=False)]
            for param in own:
                if param.is_meta:
                    self._holders.setdefault(param, []).append(module)
            if any(tensor.is_meta for tensor in (*own, *module.buffers(recurse=False))):
                self._uninitialised[module] = prefix

    @property
    def pending(self) -> bool:
        """Whether this rank has modules to initialise."""
        return self._initialises and bool(self._uninitialised)

    def materialise_buffers(self) -> None:
        """Gives memory to all meta buffers, and values to modules that hold only buffers."""
        for module, name in [*self._uninitialised.items()]:
            meta = {key: buffer for key, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
            self._materialised_buffers.append((module, meta))
            for key, buffer in meta.items():
                # Not empty_like: a buffer that reset_parameters() does not write would hold whatever lay in its memory.
                buffers_of(module)[key] = torch.zeros_like(buffer, device=self._device)
            params = [*parameters_of(module, recurse=False)]
            if not params:
                self._initialise(module, name)
            elif not any(param.is_meta for param in params):
                del self._uninitialised[module]
                if self._initialises and self.problem is None:
                    self.problem = (
                        f"the buffer {f'{name}.{next(iter(meta))}'.lstrip('.')!r} is on the meta device, but the "
                        "parameters of its module have values, which initialising the module would overwrite. Give the "
                        "buffer its values first."
                    )

    def materialise(self, params: Iterable[nn.Parameter]) -> None:
        """Gives memory to the meta parameters among `params`, and values to the modules that hold them."""
        for param in params:
            holders = [module for module in self._holders.get(param, []) if module in self._uninitialised]
            for module in holders:
                for own in parameters_of(module, recurse=False):
                    self._give_memory(own)
            for module in reversed(holders):
                self._initialise(module, self._uninitialised[module])

    def undo(self) -> None:
        """Puts all tensors that were given memory back on the meta device."""
        for param, meta in self._materialised:
            torch.utils.swap_tensors(param, meta)
        for module, buffers in self._materialised_buffers:
            buffers_of(module).update(buffers)

    def _give_memory(self, param: nn.Parameter) -> None:
        if param.is_meta:
            real = nn.Parameter(torch.empty_like(param, device=self._device), requires_grad=param.requires_grad)
            # swap_tensors also swaps the attributes that the user has set on the parameter.
            vars(real).update(vars(param))
            torch.utils.swap_tensors(param, real)
            self._materialised.append((param, real))

    def _initialise(self, module: nn.Module, name: str) -> None:
        del self._uninitialised[module]
        if not self._initialises or self.problem is not None:
            return
        # From the class: a module that forwards attributes would give the method of a module inside it.
        reset = self._init or getattr(type(module), "reset_parameters", None)
        if reset is None:
            self.problem = (
                f"{repr(name) if name else 'the module itself'} is on the meta device, and {type(module).__name__} has "
                "no reset_parameters(). Give it one, wrap the model by zero.FSDP(model, param_init_fn=...), or build "
                "this module with real parameters on rank 0."
            )
            return
        without_values = torch.get_default_device().type == "meta"  # what it computes must have values
        try:
            with torch.no_grad(), self._device if without_values else nullcontext():
                reset(module)
        except Exception as error:  # the other ranks wait for this one; all raise this problem
            self.problem = f"{name!r} could not be initialised: {type(error).__name__}: {error}"
