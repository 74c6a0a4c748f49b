"""What is checked around the steps of OSS. Stage 3 has its own in zero/fsdp/guard.py."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from zero._torch import warn_user
from zero.measure.built import working_by
from zero.measure.numbers import Written, differs
from zero.shards.scaling import Scaling


class StepCheck:
    """Checks nothing. One of each subclass is made for each OSS. Error messages that it returns raise RuntimeError on
    every rank."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def changed(self) -> str | None:
        """Returns an error message if the optimizer, its groups or parameters were changed so that it cannot step."""
        return None

    def gradients(self, found: bool) -> str | None:
        """Returns an error message if the gradients cannot be stepped. found: whether there are any."""
        return None

    def begins(self) -> None:
        """The inner optimizer is about to step, or gets a closure."""

    def numbers(self) -> Tensor | None:
        """Returns float64 numbers after a step, whose maximum over the ranks is given to `judge`; None for none. On all
        ranks or none."""
        return None

    def judge(self, maxima: Tensor) -> str | None:
        """Returns an error message for the maxima of `numbers`."""
        return None

    def around_hook(self) -> AbstractContextManager[Any]:
        """Collective. Returns a context in which a hook of the user's may change gradients of shards."""
        return nullcontext()

    def closure_failed(self, error: Exception) -> None:
        """The user's closure raised an error, to which a note may be added."""


class Moved(StepCheck):
    """Parameters that no longer lie in their shard groups, and groups that no longer hold their parameters."""

    def changed(self) -> str | None:
        for group in self.optimizer.shards.shard_groups:
            if group.moved() is None:
                continue
            taken = self.optimizer.shards.taken_by_another()
            if taken is not None:
                return (
                    f"{taken} was given to another OSS since, which shards and steps it now. Give each parameter to "
                    "one OSS, drop the one that you do not step, and wrap the model again."
                )
            name = group.reclaim()
            if name is not None:
                return (
                    f"{name} was moved, cast or given other data after OSS was built, and would no longer be trained. "
                    "Move and cast the model first, then build OSS; load weights with load_state_dict (assign=False)."
                )
        return self._edited()

    def _edited(self) -> str | None:
        """The error message if the groups no longer hold the parameters that were laid out; None if they do."""
        found, given = [group["params"] for group in self.optimizer.param_groups], self.optimizer.shards.given
        expected, counts = [len(params) for params in given], [len(params) for params in found]
        if counts == expected and all(
            all(map(operator.is_, params, own)) for params, own in zip(found, given, strict=True)
        ):
            return None
        kept = {param for params in found for param in params}
        flats = self.optimizer.shards.shard_groups
        named = (pair for flat in flats for pair in zip(flat.params, flat.names, strict=True))
        gone = next((name for param, name in named if param not in kept), None)
        return (
            f"param_groups were edited: OSS was given groups of {expected} parameters, and finds groups of {counts}, "
            f"{f'without {gone}' if gone else 'not the same ones in the same order'}. Add a group by add_param_group; "
            "to step fewer parameters, freeze them by requires_grad_(False), or build OSS again."
        )


class Gradients(StepCheck):
    """Optimizers around OSS that look for gradients in parameters, and steps without any."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self._steps_without = 0
        self._looked_around = False

    def gradients(self, found: bool) -> str | None:
        self._steps_without = 0 if found else self._steps_without + 1
        if self._steps_without == 2:  # one is normal: a first step for a scheduler, a skipped batch
            warn_user(f"In two steps one after another {NO_GRADIENT}")
        return self._wrapped() if self.optimizer.gradients.arrive_sharded and not self._looked_around else None

    def _wrapped(self) -> str | None:
        """Returns an error message for an optimizer around OSS that keeps state of parameters. Looks once."""
        self._looked_around = True
        one = next(working_by(self.optimizer), None)
        if one is None:
            return None
        name, kind = type(one).__name__, type(self.optimizer.optim).__name__
        return (
            f"{name} steps by OSS and keeps state of its own for the parameters. With ShardedDDP gradients are with "
            f"their owners only, so ranks would do different things. Put {name} inside: "
            f"OSS(params, lambda params, **options: {name}({kind}(params, **options)))."
        )


NO_GRADIENT = (
    "OSS found no gradient. If backward was called, the model has other parameters than OSS: load weights with "
    "assign=False, and build OSS after replacing any."
)


class Numbers(StepCheck):
    """Numbers that the optimizer writes into its groups, and that all ranks that step parameters of a group must write
    alike. Torch's own write none. If the optimizer was not seen to write any, nothing is sent until it does; that must
    be on all ranks."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self._expected = optimizer.finding is not None and optimizer.finding.writes_numbers
        self._written: Written | None = None

    def begins(self) -> None:
        if self.optimizer.finding is not None:
            self._written = Written(self.optimizer.optim)

    def numbers(self) -> Tensor | None:
        if self._written is None:
            return None
        self._expected = self._expected or self._written.anything(self.optimizer.optim)
        return self._written.as_tensor(self.optimizer.optim) if self._expected else None

    def judge(self, maxima: Tensor) -> str | None:
        return differs(maxima, self.optimizer.optim)


class ScaledInHooks(StepCheck):
    """Hooks that scale gradients of shards by another number on each rank."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self._scaling = Scaling(
            optimizer.comm, "a hook before the step of OSS", "clip_grad_norm(max_norm) of the optimizer"
        )

    @contextmanager
    def around_hook(self) -> Iterator[None]:
        self._scaling.remember(self.optimizer.shards.values())
        yield
        self._scaling.compare(None)
