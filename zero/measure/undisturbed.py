"""Runs foreign code without side effects on random generators, hooks and modes."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout

import numpy as np
import torch

from zero._torch import without_optimizer_hooks


@contextmanager
def undisturbed() -> Iterator[None]:
    """In this context no global hook of optimizers is called. On exit random generators are restored."""
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
        yield


def seed(number: int) -> None:
    """Seeds the generators of the CPU. torch.manual_seed would also seed those of GPUs."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number)
