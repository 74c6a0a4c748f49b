"""Runs what nobody is to notice: generators, hooks and modes stay as they are."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout

import numpy as np
import torch
from torch.optim import optimizer as hooks


@contextmanager
def undisturbed() -> Iterator[None]:
    """What runs in here is seen by nobody: no hook of any optimizer is called, and generators are put back."""
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.enter_context(_without_hooks())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(redirect_stdout(None))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiling takes minutes
        yield


@contextmanager
def _without_hooks() -> Iterator[None]:
    """Others are put in their place: this may run in a hook, which is called in a loop over these."""
    before, after = hooks._global_optimizer_pre_hooks, hooks._global_optimizer_post_hooks
    try:
        hooks._global_optimizer_pre_hooks, hooks._global_optimizer_post_hooks = type(before)(), type(after)()
        yield
    finally:
        hooks._global_optimizer_pre_hooks, hooks._global_optimizer_post_hooks = before, after


def seed(number: int) -> None:
    """On the CPU alone: torch.manual_seed would reach the GPUs' generators."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number)
