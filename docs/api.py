"""Writes docs/api.md from the docstrings of zero's public names (`make api`)."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_suffix(".md")
HEAD = """# API

[README](../README.md) · [At every stage](every_stage.md)

The public names of `zero` with their docstrings, as `help` shows them. `make api` writes this page. The classes for
Accelerate, Lightning and Transformers are on [their own page](integrations.md).
"""
SECTIONS = {
    "The stages": ("zero", ["setup", "OSS", "ShardedDDP", "FSDP"]),
    "Functions for every stage": (
        "zero",
        [
            "clip_grad_norm_",
            "grad_norm",
            "no_sync",
            "full_state_dict",
            "load_full_state_dict",
            "full_optimizer_state_dict",
            "load_full_optimizer_state_dict",
            "unwrap",
            "count_parameters",
            "join",
            "GradScaler",
            "graphed",
        ],
    ),
    "Options": (
        "zero",
        [
            "MixedPrecision",
            "ShardingStrategy",
            "Prefetch",
            "BackwardPrefetch",
            "MEMORY_FIRST",
            "SPEED_FIRST",
            "CPUOffload",
            "DiskOffload",
        ],
    ),
    "Memory and traffic": ("zero", ["report", "traffic", "Traffic"]),
    "Checkpoints": ("zero.checkpoint", import_module("zero.checkpoint").__all__),
    "Plans": ("zero.plan", import_module("zero.plan").__all__),
}


# The blocks are marked `py` and not `python`: the tests run those.


def page() -> str:
    text = [HEAD]
    for title, (module, names) in SECTIONS.items():
        text.append(f"## {title}\n")
        for name in names:
            text += entry(f"{module}.{name}", getattr(import_module(module), name))
    return "\n".join(text)


def entry(name: str, value: Any) -> Iterator[str]:
    yield f"### {name}\n"
    if not isinstance(value, type) and not inspect.isfunction(value):
        fields = ", ".join(
            f"{field.name}={default_of(getattr(value, field.name))}" for field in dataclasses.fields(value)
        )
        yield f"```py\n{name} = {type(value).__name__}({fields})\n```\n"
        return
    if isinstance(value, type) and issubclass(value, (enum.Enum, Exception)):
        yield described(value.__doc__)
        if issubclass(value, enum.Enum):
            yield "".join(f"- `{member.name}`: {member.value}\n" for member in value)
        return
    signature = inspect.signature(value)
    yield f"```py\n{call(name, signature)}\n```\n"
    yield described(value.__doc__, *signature.parameters)
    if isinstance(value, type):
        for member, defined in members(value).items():
            yield from of_class(value, member, defined)


def members(cls: type) -> dict[str, Any]:
    """What zero defines and describes, the class's own first."""
    found: dict[str, Any] = {}
    for one in cls.__mro__:
        if one.__module__.startswith("zero."):
            for name, value in vars(one).items():
                described = isinstance(value, (property, classmethod, staticmethod)) or inspect.isfunction(value)
                if described and value.__doc__ and not name.startswith("_"):
                    found.setdefault(name, value)
    return found


def of_class(cls: type, name: str, defined: Any) -> Iterator[str]:
    if isinstance(defined, property):
        yield f"#### {cls.__name__}.{name}\n"
        yield described(defined.__doc__)
        return
    signature = inspect.signature(getattr(cls, name))
    parameters = [each for each in signature.parameters.values() if each.name != "self"]
    yield f"#### {cls.__name__}.{name}\n\n```py\n{call(name, signature.replace(parameters=parameters))}\n```\n"
    yield described(defined.__doc__, *signature.parameters)


def call(name: str, signature: inspect.Signature) -> str:
    """As it is written in a `def`, a parameter a line where it is long."""
    words: list[str] = []
    kind = None
    for each in signature.parameters.values():
        if each.kind is each.KEYWORD_ONLY and kind not in (each.KEYWORD_ONLY, each.VAR_POSITIONAL):
            words.append("*")
        kind = each.kind
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(kind, "")
        annotation = "" if each.annotation is each.empty else f": {annotation_of(each.annotation)}"
        default = "" if each.default is each.empty else f" = {default_of(each.default)}"
        words.append(f"{stars}{each.name}{annotation}{default}")
    returned = signature.return_annotation
    arrow = "" if returned in (signature.empty, None, "None") else f" -> {annotation_of(returned)}"
    line = f"{name}({', '.join(words)}){arrow}"
    return line if len(line) <= 100 else "\n".join([f"{name}(", *(f"    {word}," for word in words), f"){arrow}"])


def annotation_of(value: Any) -> str:
    return value if isinstance(value, str) else getattr(value, "__qualname__", repr(value))


def default_of(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    return value.__qualname__ if isinstance(value, type) else repr(value)


def described(doc: str | None, *parameters: str) -> str:
    """The docstring as Markdown: parameters become a list."""
    lines = []
    for line in inspect.cleandoc(doc or "").splitlines():
        found = re.match(r"([\w, ]+): ", line)
        if found and {*found[1].split(", ")} <= {*parameters}:
            line = f"- `{found[1]}`: {line[found.end() :]}"
        lines.append(line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
