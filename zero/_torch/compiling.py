"""torch.compile: what it made of a module, and how."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache
from inspect import getclosurevars
from traceback import walk_stack
from typing import Any

import torch
from torch import nn

from zero._torch.modules import children_of

_WRAPPED = "_orig_mod"
_RECOMPUTED = "_checkpoint_wrapped_module"


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile(module) returned this module, or its method compile() was called. Nothing public says."""
    return module._compiled_call_impl is not None or _WRAPPED in module._modules


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that torch.compile was called with, if it returned this one; otherwise this one."""
    # The class of what torch.compile returns is not compared: that imports the compiler.
    inside = children_of(module).get(_WRAPPED)
    return module if inside is None else inside


def unwrapped_of_torchs(module: nn.Module) -> nn.Module:
    """The module inside of torch.compile and checkpoint_wrapper, one in the other; otherwise this one."""
    while (inside := children_of(module).get(_WRAPPED, children_of(module).get(_RECOMPUTED))) is not None:
        module = inside
    return module


def name_without_compile(name: str) -> str:
    """A name in a model as it is without torch.compile and checkpoint_wrapper, which wrap modules in ones of their
    own."""
    return ".".join(atom for atom in name.split(".") if atom not in (_WRAPPED, _RECOMPUTED))


def named_as_compiled(module: nn.Module, weights: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Weights by the names of a module without torch.compile, under the names that it has with it. Others stay."""
    paths = {  # without checkpoint_wrapper's atoms: its hook on load_state_dict() brings them in
        name_without_compile(path): ".".join(atom for atom in path.split(".") if atom != _RECOMPUTED)
        for path, _ in module.named_modules(remove_duplicate=False)
    }
    return renamed(weights, lambda path: paths.get(name_without_compile(path), path))


def renamed(weights: Mapping[str, Any], path_of: Callable[[str], str]) -> OrderedDict[str, Any]:
    """Weights of modules at other paths, with the versions of these that torch attaches to a state_dict()."""

    def name_of(name: str) -> str:
        path, _, last = name.rpartition(".")
        return f"{path_of(path)}.{last}".lstrip(".")

    found = OrderedDict((name_of(name), value) for name, value in weights.items())
    versions = versions_in(weights)
    return with_versions(found, versions and {path_of(path): of_module for path, of_module in versions.items()})


def versions_in(weights: Mapping[str, Any]) -> dict[str, Any] | None:
    """The versions of modules that torch attaches to a state_dict(), by their paths."""
    return getattr(weights, "_metadata", None)


def versions_of(module: nn.Module) -> dict[str, Any]:
    """The versions of a module and those inside it."""
    return {path: {"version": one._version} for path, one in module.named_modules()}


def with_versions(weights: OrderedDict[str, Any], versions: Mapping[str, Any] | None) -> OrderedDict[str, Any]:
    """Attaches them."""
    if versions is not None:
        weights._metadata = OrderedDict(versions)  # type: ignore[attr-defined]
    return weights


def compiled_without_breaks(module: nn.Module) -> bool:
    """Whether a compiled module was compiled with fullgraph=True."""
    # If a version keeps this elsewhere, tracing fails at the first unit.
    context = _compiled_by(module)
    return bool(getattr(context, "fullgraph", False) or getattr(context, "error_on_graph_break", False))


def compiled_to_cuda_graphs(module: nn.Module) -> bool:
    """Whether torch.compile runs a compiled module as CUDA graphs: by its mode, its options, torch._inductor.config, or
    backend="cudagraphs"."""
    return _records_cuda_graphs(_compiled_by(module))


def called_by_cuda_graphs() -> bool:
    """Whether anything compiled that this thread is inside of, functions too, runs as CUDA graphs."""
    # Found on the stack: torch keeps no list of what is being called.
    compiler = torch._dynamo.eval_frame.__file__
    callers = (frame for frame, _ in walk_stack(sys._getframe()) if frame.f_code.co_filename == compiler)
    return any(_records_cuda_graphs(frame.f_locals.get("self")) for frame in callers)


def _records_cuda_graphs(context: object) -> bool:
    """Whether a compile context, which has the compiler's options but not the name of its backend, does so."""
    config = getattr(context, "compiler_config", None) or {}
    if config.get("triton.cudagraphs"):
        return True
    backend: Any = getattr(context, "callback", None)
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return getattr(backend, "compiler_name", None) == "cudagraphs"


def _compiled_by(module: nn.Module) -> object:
    """torch.compile's context for a compiled module; None where a version keeps it elsewhere."""
    if module._compiled_call_impl is None:
        return getattr(module, "dynamo_ctx", None)  # a module of the user's may have a child of this name
    # The module's method compile() sets a function, and only the closure of a function in it refers to the context.
    config = getattr(module._compiled_call_impl, "get_compiler_config", None)
    return None if config is None else getclosurevars(config).nonlocals.get("self")


@cache
def never_traced(kind: type, *methods: str, reason: str | None = None) -> None:
    """Has torch.compile not trace these methods of a class. To be called before the first object is made, and not where
    the class is defined: torch.compiler.disable imports the compiler, which takes as long as to import torch."""
    for name in methods:
        setattr(kind, name, torch.compiler.disable(vars(kind)[name], reason=reason))


def call_around_compiling(start: Callable[[object], None], end: Callable[[object], None]) -> None:
    """Has torch.compile call these when it begins and when it has ended, until torch.compiler.reset(). A second call
    changes nothing."""
    handler = torch._dynamo.callback_handler
    if start not in handler.start_callbacks:
        handler.register_start_callback(start)
        handler.register_end_callback(end)
