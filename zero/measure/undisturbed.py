"""Runs foreign code without side effects on random generators, hooks, modes and other ranks."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any

import numpy as np
import torch

from zero._torch.optimizers import without_optimizer_hooks
from zero._torch.recording import DispatchMode


class Collectives(DispatchMode):
    """Raises RuntimeError in place of each collective: on tensors that measure, ranks would wait for one another in
    vain. `called`: the name of the first, if there was one."""

    called: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.called = self.called or func.overloadpacket.__name__.strip("_")
            raise RuntimeError(f"the collective {self.called} was called while an optimizer was measured")
        return func(*args, **kwargs or {})


@contextmanager
def undisturbed() -> Iterator[Collectives]:
    """In this context no global hook of optimizers is called, and no collective. On exit random generators are
    restored."""
    collectives = Collectives()
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.enter_context(without_optimizer_hooks())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(redirect_stdout(None))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiling takes minutes
        stack.enter_context(collectives)
        yield collectives


def seed(number: int) -> None:
    """Seeds the generators of the CPU. torch.manual_seed would also seed those of GPUs."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def draws(work: Callable[[], object]) -> bool:
    """Whether the work draws from the generators of torch, on the CPU, or of Python."""
    before = torch.get_rng_state(), random.getstate()
    work()
    return not torch.equal(before[0], torch.get_rng_state()) or before[1] != random.getstate()
