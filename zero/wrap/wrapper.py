"""The base class of ShardedDDP and FSDP: other code sees the names of the wrapped module, as if it were not wrapped."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from zero._torch.compiling import versions_in, with_versions
from zero.shards.shapes import refuse_lazy
from zero.state.stepped import retire


class Wrapper(nn.Module):
    """A wrapper of one module, `module`. Names of parameters and buffers are those of the module's state_dict()."""

    module: nn.Module

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Returns those of the module, under its own names. None is the wrapper's own (recurse=False)."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate) if recurse else iter(())

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Returns those of the module, under its own names. None is the wrapper's own (recurse=False)."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate) if recurse else iter(())

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tells torch.distributed.checkpoint.state_dict that the child `module` is not part of any name."""
        return {"": "module"}

    def __prepare_scriptable__(self) -> NoReturn:
        """torch.jit.script calls this."""
        raise RuntimeError(NOT_SCRIPTED.format(type(self).__name__))

    # The methods of a module that is a container, such as nn.Sequential. For other modules they raise as these do.

    def __len__(self) -> int:
        return len(self._contained)

    def __bool__(self) -> bool:
        return True  # as any module, also if the module's length is 0 or not defined

    def __getitem__(self, key: Any) -> Any:
        return self._contained[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._contained)

    @property
    def _contained(self) -> Any:
        return self.module

    # state_dict() is that of the module, so its hooks are registered on the module.

    def register_state_dict_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        return cast(RemovableHandle, self.module.register_state_dict_pre_hook(hook))

    def register_state_dict_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        return cast(RemovableHandle, self.module.register_state_dict_post_hook(hook))

    def register_load_state_dict_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        return cast(RemovableHandle, self.module.register_load_state_dict_pre_hook(hook))

    def register_load_state_dict_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        return cast(RemovableHandle, self.module.register_load_state_dict_post_hook(hook))


def describe(module: nn.Module, without: Collection[nn.Parameter] = ()) -> list[str]:
    """Returns the signature of a module: names, dtypes and shapes of buffers and of parameters not in `without`."""
    tensors = [
        (name, param, "trained" if param.requires_grad else "frozen")
        for name, param in module.named_parameters()
        if param not in without
    ] + [(name, buffer, "buffer") for name, buffer in module.named_buffers()]
    return [
        f"{name}: {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, {kind}"
        for name, tensor, kind in tensors
    ]


NOT_SCRIPTED = (
    "TorchScript cannot run {}, whose parameters are spread over the ranks. Use torch.compile; or script the plain "
    "module, which zero.unwrap(model) returns."
)


def refuse_scripted(module: nn.Module, *, inside: bool) -> None:
    """Raises ValueError if the module, or with `inside` one inside it, is of TorchScript; and for lazy ones inside."""
    refuse_lazy((repr(name), one) for name, one in (*module.named_parameters(), *module.named_buffers()))
    for name, one in module.named_modules() if inside else [("", module)]:
        if isinstance(one, torch.jit.ScriptModule):
            which = f"the module {name!r}" if name else "the model"
            raise ValueError(
                f"{which} is of TorchScript ({type(one).__name__}), whose modules take no hooks. Wrap the module that "
                "was scripted or traced, and compile by torch.compile."
            )


UNWRAPPED = (
    "this {} was unwrapped by zero.unwrap() and cannot train any more. Use the module that zero.unwrap() returned, or "
    "wrap that module again."
)


def retire_all(optimizers: Iterable[Optimizer], *, saves: bool = False) -> None:
    """Retires optimizers that hold shards of parameters that are full again. saves: as of `retire`."""
    for one in optimizers:
        retire(
            one,
            f"the model of this {type(one).__name__} was unwrapped by zero.unwrap(): the optimizer holds the state of "
            "shards, but the parameters are full again. Build a new optimizer. It can load full state that was saved "
            "before zero.unwrap().",
            saves=saves,
        )


# -------------------------------------------------------------------------------------------------------- saved weights
#
# What state_dict() of a wrapper returns: weights that are found under their names with and without `module.`, which
# DistributedDataParallel puts before them. Those that are copies of shards refuse writes (zero/shards/answers.py).


class Weights(OrderedDict[str, Any]):
    """A state dict. Pickled and copied it is torch's own, which needs no `zero` to be loaded."""

    def __missing__(self, name: Any) -> Any:
        if name in self:
            return self[name.removeprefix("module.")]
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        own = super().__contains__
        return own(name) or (isinstance(name, str) and name.startswith("module.") and own(name.removeprefix("module.")))

    def get(self, name: Any, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 (which would call this)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return with_versions(OrderedDict(self), versions_in(self)).__reduce_ex__(protocol)

    def copy(self) -> OrderedDict[str, Any]:  # type: ignore[override]
        return with_versions(OrderedDict(self), versions_in(self))


def as_weights(given: Mapping[str, Any]) -> Any:
    """A state dict of torch's as Weights."""
    return with_versions(Weights(given), versions_in(given))


COPIED = (
    "{} writes into a copy that state_dict() of FSDP has made, and would not reach the model. Write into the "
    "parameters in place, under torch.no_grad(): for name, param in model.named_parameters(); buffers likewise. To "
    "keep a changed copy, clone() it first."
)
"""Of a weight in a state dict."""
