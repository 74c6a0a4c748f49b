"""DeepSpeed's sections `optimizer` and `scheduler`, of which DeepSpeed would build both.

Values that are "auto" are those of the placeholders that Accelerate's scripts prepare (DummyOptim, DummyScheduler),
or of the Trainer's arguments. Schedules count steps of the optimizer, as DeepSpeed's engine does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zero.integrations.accelerate.keys import Keys

_AUTO = "auto"
_ADAM = ("lr", "betas", "eps", "weight_decay", "adam_w_mode", "torch_adam")
_WARMUP = ("warmup_num_steps", "warmup_type")
_OPTIMIZERS = {"Adam": _ADAM, "AdamW": _ADAM, "SGD": ("lr", "momentum", "weight_decay", "nesterov")}
# What can be built here, and the parameters of each.
_SCHEDULERS = {
    "WarmupLR": (*_WARMUP, "warmup_min_lr", "warmup_max_lr"),
    "WarmupDecayLR": (*_WARMUP, "warmup_min_lr", "warmup_max_lr", "total_num_steps"),
    "WarmupCosineLR": (*_WARMUP, "warmup_min_ratio", "cos_min_ratio", "total_num_steps"),
}


@dataclass(frozen=True)
class Section:
    """name: "optimizer" or "scheduler". kind: DeepSpeed's name of its class. params: as they are written."""

    name: str
    kind: str
    params: Mapping[str, Any]

    def filled(self, auto: Mapping[str, Any], *, must_match: str | None = None) -> dict[str, Any]:
        """The parameters, with values for those that are "auto". must_match: where values come from that others must
        equal. Raises ValueError for "auto" without a value, and for other values."""
        for name, value in self.params.items():
            if value == _AUTO and name not in auto:
                raise ValueError(f"{self.name}, params: {name}='auto' has no value here. Write a number.")
            if must_match and name in auto and value not in (_AUTO, auto[name]):
                raise ValueError(
                    f"{self.name}, params: {name} is {value!r} in the configuration of zero, but {auto[name]!r} by "
                    f"{must_match}. Make them the same, or write 'auto'."
                )
        return {name: auto[name] if value == _AUTO else value for name, value in self.params.items()}

    def optimizer(self, params: Iterable[Any], auto: Mapping[str, Any], **how: Any) -> Optimizer:
        options = self.filled(auto, **how)
        if self.kind == "SGD":
            return torch.optim.SGD(params, **options)
        options.pop("torch_adam", None)
        decoupled = options.pop("adam_w_mode", True) or self.kind == "AdamW"
        return (torch.optim.AdamW if decoupled else torch.optim.Adam)(params, **{"weight_decay": 0.0, **options})

    def scheduler(self, optimizer: Optimizer, auto: Mapping[str, Any], **how: Any) -> LRScheduler:
        return Schedule(optimizer, self.kind, self.filled(auto, **how))


def section(keys: Keys, name: str) -> Section | None:
    """Reads a section. Raises ValueError for a type that is not available here, and for parameters that it lacks."""
    known = _OPTIMIZERS if name == "optimizer" else _SCHEDULERS
    own = keys.section(name)
    kind, params = own.take("type"), own.take("params", dict, {})
    own.without_effect("legacy_fusion", "the optimizer is torch's")
    own.done()
    if kind is None:
        return None
    if kind not in known:
        raise ValueError(
            f"{own.name}: type={kind!r} is not available: build the {name} in the script and remove the section, or "
            f"choose one of {', '.join(known)}."
        )
    wrong = [param for param in params if param not in known[kind]]
    if wrong:
        raise ValueError(f"{own.name}: {kind} has no {wrong[0]!r} here. It has {', '.join(known[kind])}: remove it.")
    listed = [param for param, value in params.items() if isinstance(value, (list, tuple)) and param != "betas"]
    if listed:
        raise ValueError(f"{own.name}, params: {listed[0]} is a list. Write one number for all groups of parameters.")
    if "total_num_steps" in known[kind] and "total_num_steps" not in params:
        raise ValueError(f"{own.name}: {kind} needs total_num_steps. Write a number or 'auto'.")
    return Section(name, kind, params)


class Schedule(LRScheduler):
    """DeepSpeed's WarmupLR, WarmupDecayLR and WarmupCosineLR. The optimizer's second step is the first of these."""

    def __init__(self, optimizer: Optimizer, kind: str, params: Mapping[str, Any]) -> None:
        self.kind, self.params = kind, dict(params)
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        ratio = self._ratio(self.last_epoch - 1)
        if self.kind == "WarmupCosineLR":
            return [lr * ratio for lr in self.base_lrs]
        low = self.params.get("warmup_min_lr", 0.0)
        high = self.params.get("warmup_max_lr", 0.001 if self.kind == "WarmupDecayLR" else self.base_lrs[0])
        return [low + (high - low) * ratio for _ in self.base_lrs]

    def _ratio(self, step: int) -> float:
        """The rate between the lowest, 0, and the highest, 1, after so many steps."""
        get, warmup = self.params.get, max(2, self.params.get("warmup_num_steps", 1000))
        cosine = self.kind == "WarmupCosineLR"
        if step < 0:
            return 0.0
        if step < warmup:
            by_log = get("warmup_type", "log") == "log"
            risen = 1.0 / math.log(warmup) * math.log(step + 1) if by_log else step / warmup
            low = get("warmup_min_ratio", 0.0) if cosine else 0.0
            return float(low + risen * (1.0 - low))
        if self.kind == "WarmupLR":
            return 1.0
        total, low = self.params["total_num_steps"], float(get("cos_min_ratio", 0.0001))
        if cosine:
            done = min(1.0, (step - warmup + 1) / max(1, total - warmup))
            return max(0.0, low + (1.0 - low) * (1 + math.cos(math.pi * done)) / 2)
        return max(0.0, float(total - step) / float(max(1.0, total - warmup)))


def without_placeholders(
    given: Sequence[Any], sections: tuple[Section | None, Section | None], ranks: int
) -> tuple[list[Any], list[LRScheduler]]:
    """What is to be prepared, with optimizers and schedulers for their placeholders; and these schedulers.

    sections: of the optimizer and of the scheduler. ranks: by how many the steps of a DummyScheduler are divided.
    Raises ValueError, as Accelerate, for a placeholder without its section, and for a section beside what it builds.
    """
    built: dict[Any, Any] = {}
    for kinds, one in (((Optimizer, DummyOptim), sections[0]), ((LRScheduler, DummyScheduler), sections[1])):
        for each in given:
            if isinstance(each, kinds[0]) and one is not None:
                raise ValueError(
                    f"the configuration has a section {one.name!r}, and a {type(each).__name__} was prepared. Remove "
                    f"the section, or prepare an accelerate.utils.{kinds[1].__name__}."
                )
            if isinstance(each, kinds[1]):
                build: Callable[..., Any] = _optimizer if each.__class__ is DummyOptim else _scheduler
                built[each] = build(each, one, built, ranks)
    return [built.get(each, each) if isinstance(each, (DummyOptim, DummyScheduler)) else each for each in given], [
        one for one in built.values() if isinstance(one, LRScheduler)
    ]


def _optimizer(given: DummyOptim, one: Section | None, built: Mapping[Any, Any], ranks: int) -> Optimizer:
    if one is None:
        raise ValueError(
            "accelerate.utils.DummyOptim is a placeholder, and the configuration has no section 'optimizer' with a "
            "type. Build an optimizer, such as torch.optim.AdamW, in the script."
        )
    return one.optimizer(given.params, {"lr": given.lr, "weight_decay": given.weight_decay, **given.kwargs})


def _scheduler(given: DummyScheduler, one: Section | None, built: Mapping[Any, Any], ranks: int) -> LRScheduler:
    optimizer = built.get(given.optimizer, given.optimizer)
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            "an accelerate.utils.DummyScheduler was prepared without its optimizer. Prepare both together."
        )
    if given.lr_scheduler_callable is not None:
        return given.lr_scheduler_callable(optimizer)  # type: ignore[no-any-return]
    if one is None:
        raise ValueError(
            "accelerate.utils.DummyScheduler is a placeholder, and the configuration has no section 'scheduler' with a "
            "type. Build a scheduler in the script, or pass lr_scheduler_callable."
        )
    rate = getattr(given.optimizer, "lr", None) or optimizer.defaults["lr"]
    auto = {"warmup_min_lr": 0, "warmup_max_lr": rate, "warmup_num_steps": max(1, given.warmup_num_steps)}
    if given.total_num_steps is not None:
        auto["total_num_steps"] = math.ceil(given.total_num_steps / ranks)
    return one.scheduler(optimizer, auto)


def of_trainer(args: Any, steps: int) -> dict[str, Any]:
    """The values of TrainingArguments for both sections. steps: of the optimizer in all."""
    return {
        "lr": args.learning_rate,
        "betas": [args.adam_beta1, args.adam_beta2],
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
        "warmup_min_lr": 0,
        "warmup_max_lr": args.learning_rate,
        "warmup_num_steps": max(1, args.get_warmup_steps(steps)),
        "total_num_steps": steps,
    }
