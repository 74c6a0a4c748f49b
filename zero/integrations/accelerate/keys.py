"""Sections of Accelerate's configurations: each key is applied, refused by name, or named by one warning as without an
effect here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate.utils import str_to_bool

from zero._torch.telling import warn_user

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
Reader = Callable[[Any], Any]
"""Converts a value. Raises ValueError for those that are not available."""


def read(
    title: str, given: Mapping[str, Any], readers: Mapping[str, Reader], names: Mapping[str, str], prefix: str = ""
) -> dict[str, Any]:
    """The values of a section, by the names of their readers. What a configuration leaves open is left out: "auto".

    names: for each other name of a key that of its reader, both without the prefix. Raises ValueError for unknown keys,
    for values that are not available, and for a key that is given under two names with two values.
    """
    found, written_as, idle = dict[str, Any](), dict[str, str](), list[str]()
    for written, value in given.items():
        name = written.removeprefix(prefix)
        name = names.get(name, name)
        if name not in readers:
            raise ValueError(f"{title}: {written} is not known to zero. Remove it, or use an option of ZeroPlugin.")
        if value in (None, "auto", "none", "None", ""):
            continue
        try:
            converted = readers[name](value)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{title}: {written}={value!r} is not available: {error}") from error
        if readers[name] is without_effect:
            idle.append(written)
        elif converted is not None and found.setdefault(name, converted) != converted:
            raise ValueError(f"{title}: {written_as[name]} and {written}={value!r} are two names of one option.")
        written_as[name] = written
    if idle and int(os.environ.get("RANK", 0)) == 0:
        warn_user(f"{title}: {', '.join(idle)}: without an effect here.")
    return found


def without_effect(value: Any) -> None:
    """Of a key that means nothing here."""


def flag(value: Any) -> bool:
    return bool(str_to_bool(str(value)))


def refused(reason: str) -> Reader:
    """Of a key that may switch nothing on."""

    def read(value: Any) -> None:
        if str(value).lower() not in ("false", "0"):
            raise ValueError(reason)

    return read


def count(value: Any) -> int:
    """A whole number, also of "1e8"."""
    if float(value) < 0 or float(value) != int(float(value)):
        raise ValueError("expected a whole number of at least 0")
    return int(float(value))


def listed(value: Any) -> tuple[str, ...]:
    """Names from a list, or from text with commas between them."""
    return tuple(name.strip() for name in (value.split(",") if isinstance(value, str) else value))


def one_of(*known: str, numbered: bool = False) -> Reader:
    """Of one of these names in any case, or of an enum's member. numbered: or of its number, from 1 on."""

    def read(value: Any) -> str:
        name = str(getattr(value, "name", value)).upper().removeprefix("_")
        if numbered and name.isdigit() and 1 <= int(name) <= len(known):
            return known[int(name) - 1]
        if name not in known:
            raise ValueError(f"expected one of {', '.join(known)}{f', or 1 to {len(known)}' * numbered}")
        return name

    return read
